"""Check a packed data set completely (`procap data check`): hash every shard, list its members, decode every image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from procap.errors import UserError
from shards.check_source import SplitProgress
from shards.files import read_regular
from shards.manifest import Shard, convention_texts
from shards.manifest_checks import list_problem, path_problem, read_paths, shard_problem
from shards.mirror import is_mirror
from shards.names import MAX_NAMED
from shards.pools import map_in_order
from shards.reader import Split, open_dataset
from shards.tar import member_problem, sample_key

IMAGES_PER_PROCESS = 300
"""Starting a process takes about as long as decoding this many images."""


@dataclass
class SplitReport:
    """The result of a full check of one split; `readable` of `images` decode and `shards_found` of `shards` exist."""

    name: str
    images: int
    shards: int
    shards_found: int
    readable: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DatasetReport:
    """The result of a full check of a data set; `problems` holds those of the whole set."""

    splits: tuple[SplitReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not any(split.problems for split in self.splits)


Task = tuple[Path, str, Shard, Split | None, list[bytes]]
"""A shard to check of a split in a folder: its images and their paths, None and [] if index or list are unusable."""


def check_dataset(
    data_root: Path, name: str, *, workers: int = 1, on_progress: SplitProgress | None = None
) -> DatasetReport:
    """Check a packed data set, or what a mirror has of it, with up to `workers` processes; faults are reported."""
    folder = data_root / name
    try:
        shards = open_dataset(data_root, name)
    except UserError as error:
        return DatasetReport((), (str(error),))
    entries, tasks = shards.manifest.splits, list[Task]()
    reports: dict[str, SplitReport] = {}
    for split, entry in entries.items():
        found = sum((folder / shard.file).is_file() for shard in entry.shards)
        report = reports[split] = SplitReport(split, entry.count, len(entry.shards), found)
        images, paths = None, []
        try:
            opened, text = shards.open_unverified(split), read_paths(folder, shards.manifest, split)
            wrong = list_problem(folder, shards.manifest, split, text, opened.labels), path_problem(text)
            report.problems += [f"'{name}' {split}: {problem}" for problem in wrong if problem]
            images, paths = opened, text.split(b"\n")[:-1]
        except UserError as error:
            report.problems.append(str(error))
        start = 0
        for shard in entry.shards:
            # Shards of a mirror that were not read yet are not there.
            if not is_mirror(data_root) or (folder / shard.file).exists():
                own = images and images.subset(np.arange(start, start + shard.count))
                tasks.append((folder, split, shard, own, paths[start : start + shard.count]))
            start += shard.count
    largest = max(shard.count for entry in entries.values() for shard in entry.shards)
    processes = min(workers, shards.manifest.images // max(largest, IMAGES_PER_PROCESS))
    done = dict.fromkeys(entries, 0)
    undecodable: dict[str, list[str]] = {split: [] for split in entries}
    checked = map_in_order(_check_shard, tasks, processes)
    for (_, split, shard, *_), (problem, decoded, errors) in zip(tasks, checked, strict=True):
        reports[split].problems += [problem] if problem else []
        reports[split].readable += decoded
        undecodable[split] += errors
        done[split] += shard.count
        if on_progress:
            on_progress(split, done[split], entries[split].count)
    for split, errors in undecodable.items():
        if errors:
            reports[split].problems += errors[:MAX_NAMED]
            reports[split].problems.append(f"'{name}' {split}: {len(errors)} images are unreadable")
    return DatasetReport(tuple(reports.values()), tuple(_differing(folder, convention_texts(shards.manifest))))


def _check_shard(task: Task) -> tuple[str | None, int, list[str]]:
    """Return what is wrong with a shard as a whole, how many of its images decode, and why the others do not."""
    folder, _, shard, images, paths = task
    problem = shard_problem(folder, shard, hashed=True)
    if images is None:
        return problem, 0, []
    if problem is None:
        # Other readers go by the members of the tar: these must be the images and labels of the index.
        rows = images.rows[["label", "offset", "size"]].tolist()
        keys = map(sample_key, images.positions.tolist())
        samples = ((key, path.decode(), *row) for key, path, row in zip(keys, paths, rows, strict=False))
        if found := member_problem(folder / shard.file, samples):
            problem = f"{folder / shard.file} {found}"
    errors = []
    for i in range(len(images)):
        try:
            images.image(i)
        except UserError as error:
            errors.append(str(error))
    return problem, len(images) - len(errors), errors


def _differing(folder: Path, texts: Mapping[str, str]) -> Iterator[str]:
    """Describe the text files below `folder` that are absent or hold other text."""
    for name, text in texts.items():
        with suppress(OSError):
            if read_regular(folder, name, len(text.encode())) == text.encode():
                continue
        yield f"{folder / name} differs from the manifest"
