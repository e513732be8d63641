"""Find what is wrong in the images of a source: files that do not decode, and images of equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from procap.errors import UserError
from shards.names import Finding
from shards.pools import map_in_order
from shards.records import Part, Source

PART = 250
"""Images of one task; starting a process takes as long as decoding a few hundred."""
MAX_LISTED = 100
"""Broken images that are listed one by one."""
MAX_PAIRS = 20
"""Pairs of classes with equal images that are named in one line."""

SplitProgress = Callable[[str, int, int], None]
"""Called with a split, its images that are done, and all of them."""
Reporter = Callable[[str], None]


class CheckedImage(NamedTuple):
    """An image that decodes, and where it lies in its shard; images of equal bytes have the same digest."""

    path: str
    label: int
    digest: str
    offset: int = 0
    size: int = 0


def content_digest(data: bytes) -> str:
    """Compute 16 hex digits that identify the bytes of an image."""
    return hashlib.sha256(data).hexdigest()[:16]


def check_source(source: Source, *, workers: int = 1, on_progress: SplitProgress | None = None) -> Source:
    """Decode every image of a source without writing anything, and return the source with all problems and notes."""
    ranges = source.ranges(PART)
    images: list[tuple[str, CheckedImage]] = []
    problems = [*source.problems]
    parts = ((split, source.part(split, start, stop)) for split, start, stop in ranges)
    processes = min(workers, len(ranges) // 2)
    for (split, _, stop), (found, broken) in zip(ranges, map_in_order(_check_part, parts, processes), strict=True):
        images += [(split, image) for image in found]
        problems += broken
        if on_progress:
            on_progress(split, stop, source.counts[split])
    notes = (*source.notes, *find_duplicates(images, source.classnames))
    return replace(source, problems=tuple(problems), notes=notes)


def _check_part(task: tuple[str, Part]) -> tuple[list[CheckedImage], list[str]]:
    from shards.images import ImageError, decode

    split, part = task
    images, problems = [], []
    for record in part.records():
        try:
            decode(record.data)
            images.append(CheckedImage(record.path, record.label, content_digest(record.data)))
        except ImageError as error:
            problems.append(describe_unreadable(split, record.path, error))
    return images, problems


def describe_unreadable(split: str, path: str, error: Exception) -> str:
    """Format the problem of an image that does not decode."""
    return f"{split}: {path} is not a readable image ({error}); replace it".removeprefix(": ")


def find_duplicates(images: Iterable[tuple[str, CheckedImage]], classnames: Sequence[str]) -> list[str]:
    """Describe images of equal bytes, each copy beside the first one: with other labels, across splits and within.

    images: each with its split, "" if it has none yet.
    """
    firsts: dict[str, tuple[str, CheckedImage]] = {}
    copies: dict[tuple[str, str], list[str]] = {}
    mixed: dict[tuple[int, ...], list[str]] = {}
    for split, image in images:
        first_split, first = firsts.setdefault(image.digest, (split, image))
        if first is not image:
            pair = f"{image.path} = {first.path}"
            copies.setdefault((first_split, split), []).append(pair)
            if image.label != first.label:
                mixed.setdefault(tuple(sorted((first.label, image.label))), []).append(pair)
    named = [
        f"{' and '.join(repr(classnames[label]) for label in labels)} ({len(pairs):,}, first {pairs[0]})"
        for labels, pairs in mixed.items()
    ]
    found: list[str] = [Finding.make("warning: equal images in two classes: ", named, limit=MAX_PAIRS)] if named else []
    for (split, other), pairs in copies.items():
        leaks = split != other == "test"
        number = "1 image is a copy" if len(pairs) == 1 else f"{len(pairs):,} images are copies"
        where = f"{'other ' * (split == other)}images{f' in {split}' * bool(split)}"
        what = f"{'warning: ' * leaks}{other or 'images'}: {number}, byte for byte, of {where} ("
        found.append(Finding.make(what, pairs, "): accuracy on them is not of new images" if leaks else ")"))
    return found


def raise_problems(name: str, problems: Sequence[str], report: Reporter | None = None) -> None:
    """Raise UserError for problems, if there are any; several are reported one by one, the first MAX_LISTED of them."""
    if not problems:
        return
    if len(problems) == 1 or report is None:
        raise UserError(f"'{name}' {'; '.join(problems[:MAX_LISTED])}")
    for problem in problems[:MAX_LISTED]:
        report(f"problem: {problem}")
    more = f" (the first {MAX_LISTED} are listed)" if len(problems) > MAX_LISTED else ""
    raise UserError(
        f"'{name}' is not packed: {len(problems):,} problems are listed above{more}; fix them and pack again"
    )
