"""Find what is wrong in the images of a source: files that do not decode, and images of equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from shards.errors import DataError
from shards.names import Finding
from shards.process_pool import map_in_order
from shards.records import Part, Source

PART = 250
"""Images of one task; starting a process takes as long as decoding a few hundred."""
LISTED = 100
"""Broken images that are listed one by one."""
MOST_PAIRS = 20
"""Pairs of classes with equal images that are named in one line."""

SplitProgress = Callable[[str, int, int], None]
"""Called with a split, its images that are done, and all of them."""
Reporter = Callable[[str], None]


@dataclass(frozen=True)
class SourceReport:
    """What a check of a source found: problems, for which it is not packed, and notes."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


class CheckedImage(NamedTuple):
    """An image that decodes; images of equal bytes have the same digest."""

    split: str
    path: str
    label: int
    digest: str


def content_digest(data: bytes) -> str:
    """Compute 16 hex digits that identify the bytes of an image."""
    return hashlib.sha256(data).hexdigest()[:16]


def check_source(source: Source, *, workers: int = 1, on_progress: SplitProgress | None = None) -> SourceReport:
    """Decode every image of a source without writing anything."""
    ranges = [
        (split, start, min(start + PART, count))
        for split, count in source.counts.items()
        for start in range(0, count, PART)
    ]
    images: list[CheckedImage] = []
    problems = [*source.problems]
    parts = ((split, source.part(split, start, stop)) for split, start, stop in ranges)
    processes = min(workers, len(ranges) // 2)
    for (split, _, stop), (found, broken) in zip(ranges, map_in_order(_check_part, parts, processes), strict=True):
        images += found
        problems += broken
        if on_progress:
            on_progress(split, stop, source.counts[split])
    return SourceReport(tuple(problems), (*source.notes, *find_duplicates(images, source.classnames)))


def _check_part(task: tuple[str, Part]) -> tuple[list[CheckedImage], list[str]]:
    from shards.images import ImageError, decode

    split, part = task
    images, problems = [], []
    for record in part.records():
        try:
            decode(record.data)
            images.append(CheckedImage(split, record.path, record.label, content_digest(record.data)))
        except ImageError as error:
            problems.append(describe_unreadable(split, record.path, error))
    return images, problems


def describe_unreadable(split: str, path: str, error: Exception) -> str:
    """Format the problem of an image that does not decode."""
    return f"{split}: {path} is not a readable image ({error}); replace it".removeprefix(": ")


def find_duplicates(images: Iterable[CheckedImage], classnames: Sequence[str]) -> list[str]:
    """Describe images of equal bytes: across splits, within a split, and with different labels."""
    groups: dict[str, list[CheckedImage]] = {}
    for image in images:
        groups.setdefault(image.digest, []).append(image)
    equal = [group for group in groups.values() if len(group) > 1]
    by_split = [{split: [one for one in group if one.split == split] for split in _SPLITS} for group in equal]
    found: list[str] = []
    for first, second in combinations(_SPLITS, 2):
        shared = [group for group in by_split if group[first] and group[second]]
        if shared:
            pairs = [(group[second][0], group[first][0]) for group in shared]
            copies = _count(sum(len(group[second]) for group in shared), second)
            before, after = ("warning: ", ": accuracy on them is not of new images") if second == "test" else ("", "")
            found.append(Finding.make(f"{before}{copies} in {first} too, byte for byte (", _name(pairs), f"){after}"))
    for split in _SPLITS:
        pairs = [(one, group[split][0]) for group in by_split for one in group[split][1:]]
        if pairs:
            found.append(Finding.make(f"{_count(len(pairs), split)} a copy of another one there (", _name(pairs), ")"))
    mixed: dict[tuple[int, int], list[tuple[CheckedImage, CheckedImage]]] = {}
    by_label = [{one.label: one for one in reversed(group)} for group in equal]
    for images_of in by_label:
        for labels in combinations(sorted(images_of), 2):
            mixed.setdefault(labels, []).append((images_of[labels[0]], images_of[labels[1]]))
    named = [
        f"{classnames[one]!r} and {classnames[other]!r} ({len(copies):,}, first {_name(copies)[0]})"
        for (one, other), copies in mixed.items()
    ]
    if count := sum(len(images_of) > 1 for images_of in by_label):
        what = f"warning: {'1 image has' if count == 1 else f'{count:,} images have'} copies of another class: "
        found.insert(0, Finding.make(what, named, limit=MOST_PAIRS))
    return found


_SPLITS = ("train", "val", "test", "")
"""All splits; "" is for images that have none yet."""


def raise_problems(name: str, problems: Sequence[str], report: Reporter | None = None) -> None:
    """Raise DataError for problems, if there are any; several are reported one by one, the first LISTED of them."""
    if not problems:
        return
    if len(problems) == 1 or report is None:
        raise DataError(f"'{name}' {'; '.join(problems[:LISTED])}")
    for problem in problems[:LISTED]:
        report(f"problem: {problem}")
    more = f" (the first {LISTED} are listed)" if len(problems) > LISTED else ""
    raise DataError(f"'{name}' is not packed: {len(problems):,} problems are listed above{more}; mend them, pack again")


def _count(number: int, split: str) -> str:
    return f"{number:,} {split} image{'s are' if number != 1 else ' is'}".replace("  ", " ")


def _name(pairs: Sequence[tuple[CheckedImage, CheckedImage]]) -> list[str]:
    return [f"{one.path} = {other.path}" for one, other in pairs]
