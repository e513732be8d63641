"""Check images before packing, and packed shards (`procap data check`): broken files, equal images, altered bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from procap.errors import UserError
from shards.index import list_digest
from shards.manifest import Shard, is_mirror
from shards.names import MAX_NAMED, join_first
from shards.reader import ImageList, open_dataset, shard_problem
from shards.source import ImageRecord, RecordReader
from shards.tasks import map_in_order

IMAGES_PER_TASK = 250
"""Images of one task; starting a process takes as long as decoding a few hundred."""

SplitProgress = Callable[[str, int, int], None]
"""Called with a split, its images that are done, and all of them."""
Reporter = Callable[[str], None]


class CheckedImage(NamedTuple):
    """An image that decodes, and its bytes in its shard; images of equal bytes have the same digest."""

    path: str
    label: int
    digest: bytes
    offset: int = 0
    size: int = 0


def readable_paths(read_records: RecordReader) -> list[str]:
    """List the images that can be read and decoded."""
    return [record.path for record in read_records() if not describe_unreadable("", record)]


def describe_unreadable(split: str, record: ImageRecord) -> str:
    """Describe why an image cannot be read or decoded; "" if it can."""
    from shards.images import ImageError, decode_pixels

    reason = record.unreadable
    if not reason:
        try:
            decode_pixels(record.data)
            return ""
        except ImageError as error:
            reason = str(error)
    remedy = "replace it, or leave out unreadable own images with --skip-broken"
    return f"{split}: {record.path} is not a readable image ({reason}); {remedy}"


def find_duplicates(images: Iterable[tuple[str, CheckedImage]]) -> list[str]:
    """Describe images of equal bytes, across splits and within: each copy with its split and the first such image."""
    firsts: dict[bytes, tuple[str, CheckedImage]] = {}
    copies: dict[tuple[str, str], list[str]] = {}
    for split, image in images:
        first_split, first = firsts.setdefault(image.digest, (split, image))
        if first is not image:
            copies.setdefault((first_split, split), []).append(f"{image.path} = {first.path}")
    notes = []
    for (first_split, split), pairs in copies.items():
        # Splits come in the order train, val, test, so of a leak the image in test is the copy.
        is_leak = first_split != split == "test"
        number = "1 image is a copy" if len(pairs) == 1 else f"{len(pairs):,} images are copies"
        note = f"{split}: {number}, byte for byte, of images in {first_split} ({join_first(pairs)})"
        notes.append(f"warning: {note}: accuracy on them is not that of new images" if is_leak else note)
    return notes


@dataclass
class SplitReport:
    """The check of a split; `readable` of `images` decode, `shards_present` of `shards` exist."""

    name: str
    images: int
    shards: int
    shards_present: int
    readable: int = 0
    problems: list[str] = field(default_factory=list)


CheckTask = tuple[Path, Shard, ImageList | None]
"""The folder of a data set, a shard to check, and its images: None if index or list of its split are unusable."""


def check_dataset(
    data_root: Path, name: str, *, workers: int = 1, on_progress: SplitProgress | None = None
) -> list[SplitReport]:
    """Check each split of a packed set, or what a mirror has of it, with up to `workers` processes."""
    dataset = open_dataset(data_root, name)
    reports: list[SplitReport] = []
    tasks: list[tuple[SplitReport, CheckTask]] = []
    for split, entry in dataset.manifest.splits.items():
        present = [(dataset.folder / shard.file).is_file() for shard in entry.shards]
        reports.append(report := SplitReport(split, entry.count, len(entry.shards), sum(present)))
        images: ImageList | None = None
        try:
            images = dataset.list_images(split)
            if list_digest(images.paths, images.labels, dataset.classnames) != entry.digest:
                report.problems.append("paths, labels or class names differ from the digest in the manifest")
        except UserError as error:
            images = None
            report.problems.append(str(error))
        stops = accumulate(shard.count for shard in entry.shards)
        for shard, stop, is_present in zip(entry.shards, stops, present, strict=True):
            # Shards of a mirror that were not read yet are not there.
            if is_present or not is_mirror(dataset.folder.parent):
                in_shard = images and images.subset(range(stop - shard.count, stop))
                tasks.append((report, (dataset.folder, shard, in_shard)))
    done, broken_images = Counter[str](), defaultdict[str, list[str]](list)
    processes = min(workers, dataset.manifest.images // IMAGES_PER_TASK)
    results = map_in_order(_check_shard, [task for _, task in tasks], processes)
    for (report, (_, shard, _)), (problem, readable, errors) in zip(tasks, results, strict=True):
        report.problems += [problem] if problem else []
        report.readable += readable
        broken_images[report.name] += errors
        done[report.name] += shard.count
        if on_progress:
            on_progress(report.name, done[report.name], report.images)
    for report in reports:
        if errors := broken_images[report.name]:
            number = f"'{name}' {report.name}: {len(errors)} images are unreadable"
            report.problems += [*errors[:MAX_NAMED], number]
    return reports


def _check_shard(task: CheckTask) -> tuple[str, int, list[str]]:
    """Return what is wrong with a shard as a whole, how many of its images decode, and why the others do not."""
    folder, shard, images = task
    problem, errors = shard_problem(folder, shard, hashed=True), []
    if images is None:
        return problem, 0, []
    for i in range(len(images)):
        try:
            images.image(i)
        except UserError as error:
            errors.append(str(error))
    return problem, len(images) - len(errors), errors
