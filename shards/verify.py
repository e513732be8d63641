"""Check a packed data set completely: hash every shard, read it member by member, and decode every image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.checks import hash_problem, read_paths, size_problem
from shards.errors import DataError
from shards.manifest import Shard, convention_texts
from shards.mirror import is_fetched
from shards.pack import PackProgress
from shards.process_pool import map_in_order
from shards.reader import Split, open_dataset
from shards.tar import scan_tar

# Of the undecodable images of a split so many are named.
NAMED = 3
IMAGES_PER_PROCESS = 300
"""A process takes about as long to start as so many images take to decode."""


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


@dataclass(frozen=True)
class _Task:
    """One shard to check; its images are None if the index of their split is unusable."""

    folder: Path
    split: str
    shard: Shard
    images: Split | None


def verify(data_root: Path, name: str, *, workers: int = 1, on_progress: PackProgress | None = None) -> DatasetReport:
    """Check a packed data set with up to `workers` processes; faults are reported, not raised.

    Of a mirror what has been fetched so far is checked.
    """
    folder = data_root / name
    try:
        shards = open_dataset(data_root, name)
    except DataError as error:
        return DatasetReport(name, (), (str(error),))
    entries = shards.manifest.splits
    tasks: list[_Task] = []
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
            if is_fetched(folder, shard):
                own = images and images.subset(np.arange(start, start + shard.count))
                tasks.append(_Task(folder, split, shard, own))
            start += shard.count
    largest = max(shard.count for entry in entries.values() for shard in entry.shards)
    processes = min(workers, sum(entry.count for entry in entries.values()) // max(largest, IMAGES_PER_PROCESS))
    done, readable = dict.fromkeys(entries, 0), dict.fromkeys(entries, 0)
    undecodable: dict[str, list[str]] = {split: [] for split in entries}
    for task, (problem, decoded, errors) in zip(tasks, map_in_order(_check_shard, tasks, processes), strict=True):
        problems[task.split] += [problem] if problem else []
        undecodable[task.split] += errors
        readable[task.split] += decoded
        done[task.split] += task.shard.count
        if on_progress:
            on_progress(task.split, done[task.split], entries[task.split].count)
    reports = []
    for split, entry in entries.items():
        problems[split] += undecodable[split][:NAMED]
        if len(undecodable[split]) > NAMED:
            problems[split].append(f"'{name}' {split}: {len(undecodable[split]) - NAMED} more images are unreadable")
        found = sum((folder / shard.file).is_file() for shard in entry.shards)
        report = SplitReport(split, entry.count, readable[split], len(entry.shards), found, tuple(problems[split]))
        reports.append(report)
    return DatasetReport(name, tuple(reports), tuple(_differing(folder, convention_texts(shards.manifest))))


def _check_shard(task: _Task) -> tuple[str | None, int, list[str]]:
    """Return what is wrong with a shard as a whole, how many of its images decode, and why the others do not."""
    problem = size_problem(task.folder, task.shard) or hash_problem(task.folder, task.shard)
    if task.images is None:
        return problem, 0, []
    if problem is None:
        # Other readers go by the members of the tar: these must be the images and labels of the index.
        file, rows = task.folder / task.shard.file, task.images.rows
        try:
            found = scan_tar(file, task.split, read_paths=False)
            pairs = ((found.offsets, rows["offset"]), (found.sizes, rows["size"]), (found.labels, rows["label"]))
            if not all(np.array_equal(*pair) for pair in pairs):
                problem = f"{file} holds other images or labels than its index says"
        except ValueError as error:
            problem = f"{file} {error}"
    errors = []
    for i in range(len(task.images)):
        try:
            task.images.image(i)
        except DataError as error:
            errors.append(str(error))
    return problem, len(task.images) - len(errors), errors


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
