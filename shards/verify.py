"""Check a packed data set completely: hash every shard, read it member by member, and decode every image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.checks import hash_problem, read_paths, size_problem
from shards.errors import DataError
from shards.manifest import Manifest, Shard, convention_texts
from shards.mirror import is_fetched
from shards.pack import Progress
from shards.process_pool import map_in_order
from shards.reader import ShardSet, Split, open_dataset
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
class Report:
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
    dataset: str
    split: str
    shard: Shard
    images: Split | None


@dataclass(frozen=True)
class _Finding:
    """What is wrong with a shard as a whole, how many images decode and do not, and the first that do not."""

    split: str
    images: int
    problem: str | None
    readable: int
    unreadable: int
    named: tuple[str, ...]


def verify(data_root: Path, name: str, *, workers: int = 1, on_progress: Progress | None = None) -> Report:
    """Check a packed data set with up to `workers` processes; faults are reported, not raised.

    Of a mirror what has been fetched so far is checked.
    """
    folder = data_root / name
    try:
        shards = open_dataset(data_root, name)
    except DataError as error:
        return Report(name, (), (str(error),))
    manifest = shards.manifest
    problems = [
        f"{folder / file} differs from the manifest"
        for file, text in convention_texts(manifest).items()
        if not _holds(folder / file, text)
    ]
    faults: dict[str, list[str]] = {split: [] for split in manifest.splits}
    tasks = _tasks(shards, faults)
    counts = {split: entry.count for split, entry in manifest.splits.items()}
    largest = max(shard.count for entry in manifest.splits.values() for shard in entry.shards)
    processes = min(workers, sum(counts.values()) // max(largest, IMAGES_PER_PROCESS))
    found: dict[str, list[_Finding]] = {split: [] for split in manifest.splits}
    done = dict.fromkeys(counts, 0)
    for finding in map_in_order(_check_shard, tasks, processes):
        found[finding.split].append(finding)
        done[finding.split] += finding.images
        if on_progress:
            on_progress(finding.split, done[finding.split], counts[finding.split])
    reports = (_report(folder, manifest, split, found[split], faults[split]) for split in manifest.splits)
    return Report(name, tuple(reports), tuple(problems))


def _tasks(shards: ShardSet, faults: dict[str, list[str]]) -> Iterator[_Task]:
    """Make a task per shard; problems of the index and the paths of a split are added to `faults`."""
    folder, manifest = shards.folder, shards.manifest
    for split, entry in manifest.splits.items():
        images = None
        try:
            images = shards.unverified(split)
            read_paths(folder, manifest, split)
        except DataError as error:
            faults[split].append(str(error))
        start = 0
        for shard in entry.shards:
            own = images and images.subset(np.arange(start, start + shard.count))
            if is_fetched(folder, shard):
                yield _Task(folder, manifest.dataset, split, shard, own)
            start += shard.count


def _check_shard(task: _Task) -> _Finding:
    problem = size_problem(task.folder, task.shard) or hash_problem(task.folder, task.shard)
    if task.images is None:
        return _Finding(task.split, task.shard.count, problem, 0, 0, ())
    problem = problem or _differs(task)
    readable = 0
    named: list[str] = []
    for i in range(len(task.images)):
        try:
            task.images.image(i)
            readable += 1
        except DataError as error:
            if len(named) < NAMED:
                named.append(str(error))
    return _Finding(task.split, len(task.images), problem, readable, len(task.images) - readable, tuple(named))


def _differs(task: _Task) -> str | None:
    """Whether other readers, which go by the members of the tar, see other labels or images than the index has."""
    assert task.images is not None
    file = task.folder / task.shard.file
    try:
        found = scan_tar(file, task.split, read_paths=False)
    except ValueError as error:
        return f"{file} {error}"
    rows = task.images.rows
    pairs = ((found.offsets, rows["offset"]), (found.sizes, rows["size"]), (found.labels, rows["label"]))
    return (
        None
        if all(np.array_equal(*pair) for pair in pairs)
        else f"{file} holds other images or labels than its index says"
    )


def _report(folder: Path, manifest: Manifest, split: str, found: list[_Finding], faults: list[str]) -> SplitReport:
    entry = manifest.splits[split]
    problems = [finding.problem for finding in found if finding.problem]
    if not _holds(folder / split / "nshards.txt", f"{len(entry.shards)}\n"):
        problems.append(f"{folder / split / 'nshards.txt'} differs from the manifest")
    problems += faults
    unreadable = sum(finding.unreadable for finding in found)
    problems += [message for finding in found for message in finding.named][:NAMED]
    if unreadable > NAMED:
        problems.append(f"'{manifest.dataset}' {split}: {unreadable - NAMED} more images are unreadable")
    there = sum((folder / shard.file).is_file() for shard in entry.shards)
    readable = sum(finding.readable for finding in found)
    return SplitReport(split, entry.count, readable, len(entry.shards), there, tuple(problems))


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_bytes() == text.encode()
    except OSError:
        return False
