"""Check a packed data set completely (`procap data check`): hash every shard, list its members, decode every image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.errors import DataError
from shards.manifest import Shard, convention_texts
from shards.manifest_checks import hash_problem, read_paths, size_problem
from shards.mirror import is_mirror
from shards.pack import PackProgress
from shards.process_pool import map_in_order
from shards.reader import Split, open_dataset
from shards.tar import scan_tar

NAMED_IMAGES = 3
"""How many of the undecodable images of a split are named."""
IMAGES_PER_PROCESS = 300
"""Starting a process takes about as long as decoding this many images."""


@dataclass(frozen=True)
class SplitReport:
    """The result of a full check of one split; `readable` of `images` decode and `shards_found` of `shards` exist."""

    name: str
    images: int
    readable: int
    shards: int
    shards_found: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class DatasetReport:
    """The result of a full check of a data set; `problems` holds those of the whole set."""

    dataset: str
    splits: tuple[SplitReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not any(split.problems for split in self.splits)


Task = tuple[Path, str, Shard, Split | None]
"""A shard to check of a split in a folder; its images are None if the index of the split is unusable."""


def check_dataset(
    data_root: Path, name: str, *, workers: int = 1, on_progress: PackProgress | None = None
) -> DatasetReport:
    """Check a packed data set, or what a mirror has of it, with up to `workers` processes; faults are reported."""
    folder = data_root / name
    try:
        shards = open_dataset(data_root, name)
    except DataError as error:
        return DatasetReport(name, (), (str(error),))
    entries = shards.manifest.splits
    tasks: list[Task] = []
    problems: dict[str, list[str]] = {}
    for split, entry in entries.items():
        problems[split] = _differing(folder, {f"{split}/nshards.txt": f"{len(entry.shards)}\n"})
        images = None
        try:
            images = shards.unverified(split)
            read_paths(folder, shards.manifest, split)
        except DataError as error:
            problems[split].append(str(error))
        start = 0
        for shard in entry.shards:
            # Shards of a mirror that were not read yet are not there.
            if not is_mirror(data_root) or (folder / shard.file).exists():
                own = images and images.subset(np.arange(start, start + shard.count))
                tasks.append((folder, split, shard, own))
            start += shard.count
    largest = max(shard.count for entry in entries.values() for shard in entry.shards)
    processes = min(workers, sum(entry.count for entry in entries.values()) // max(largest, IMAGES_PER_PROCESS))
    done, readable = dict.fromkeys(entries, 0), dict.fromkeys(entries, 0)
    undecodable: dict[str, list[str]] = {split: [] for split in entries}
    checked = map_in_order(_check_shard, tasks, processes)
    for (_, split, shard, _), (problem, decoded, errors) in zip(tasks, checked, strict=True):
        problems[split] += [problem] if problem else []
        undecodable[split] += errors
        readable[split] += decoded
        done[split] += shard.count
        if on_progress:
            on_progress(split, done[split], entries[split].count)
    reports = []
    for split, entry in entries.items():
        problems[split] += undecodable[split][:NAMED_IMAGES]
        if len(undecodable[split]) > NAMED_IMAGES:
            problems[split].append(
                f"'{name}' {split}: {len(undecodable[split]) - NAMED_IMAGES} more images are unreadable"
            )
        found = sum((folder / shard.file).is_file() for shard in entry.shards)
        report = SplitReport(split, entry.count, readable[split], len(entry.shards), found, tuple(problems[split]))
        reports.append(report)
    return DatasetReport(name, tuple(reports), tuple(_differing(folder, convention_texts(shards.manifest))))


def _check_shard(task: Task) -> tuple[str | None, int, list[str]]:
    """Return what is wrong with a shard as a whole, how many of its images decode, and why the others do not."""
    folder, split, shard, images = task
    problem = size_problem(folder, shard) or hash_problem(folder, shard)
    if images is None:
        return problem, 0, []
    if problem is None:
        # Other readers go by the members of the tar: these must be the images and labels of the index.
        file, rows = folder / shard.file, images.rows
        try:
            found = scan_tar(file, split, read_paths=False)
            pairs = ((found.offsets, rows["offset"]), (found.sizes, rows["size"]), (found.labels, rows["label"]))
            if not all(np.array_equal(*pair) for pair in pairs):
                problem = f"{file} holds other images or labels than its index says"
        except ValueError as error:
            problem = f"{file} {error}"
    errors = []
    for i in range(len(images)):
        try:
            images.image(i)
        except DataError as error:
            errors.append(str(error))
    return problem, len(images) - len(errors), errors


def _differing(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Describe the text files below `folder` that are absent or hold other text."""
    problems = []
    for name, text in texts.items():
        try:
            same = (folder / name).read_bytes() == text.encode()
        except OSError:
            same = False
        if not same:
            problems.append(f"{folder / name} differs from the manifest")
    return problems
