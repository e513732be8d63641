"""What a report consists of, before it is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.tables.table import Table


@dataclass(frozen=True)
class Problem:
    """Something that could not be read or made. where: the suite it belongs to."""

    where: str
    what: str


@dataclass(frozen=True)
class Picture:
    """A plot and its files, by suffix. alt: its description in words. kind: suffix of `shown`. width: CSS pixels."""

    name: str
    caption: str
    alt: str
    shown: bytes
    kind: str
    files: Mapping[str, bytes]
    width: int


@dataclass(frozen=True)
class Link:
    """A page of an MLflow server."""

    title: str
    address: str


@dataclass(frozen=True)
class Block:
    """Tables and pictures under one heading. leads: its first table is never folded."""

    title: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    text: str = ""
    leads: bool = False


@dataclass(frozen=True)
class Section:
    """One suite. short: a mark in the table of contents. facts: terms and values of how it was run.

    leads: its main table and plot are the headline of the page instead of a part of `blocks`.
    """

    name: str
    text: str
    paper: str
    command: str
    ui: str
    short: str
    facts: Sequence[tuple[str, str]]
    links: Sequence[Link]
    blocks: Sequence[Block]
    leads: bool = False


@dataclass(frozen=True)
class Gap:
    """What of a suite failed or is missing. command: continues it. runs: path and reason of each unfinished run."""

    name: str
    state: str
    status: str
    command: str
    runs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Caveat:
    """What a reader has to know before any number. short: for the notice at the top, empty where it needs none."""

    text: str
    short: str = ""


@dataclass(frozen=True)
class Report:
    """The whole page, in its order.

    lead: what was run and when. state: how many runs are finished, in one sentence. headline: the main table and plot,
    None where there is none yet.
    """

    title: str
    lead: str
    state: str
    headline: Block | None
    sections: Sequence[Section]
    problems: Sequence[Problem]
    gaps: Sequence[Gap]
    caveats: Sequence[Caveat]
    cost: Sequence[str]
    work: Sequence[Table]
    versions: Sequence[tuple[str, str]]
    footer: str

    @property
    def complete(self) -> bool:
        """Whether nothing failed, is missing or could not be made."""
        return not (self.gaps or self.problems)
