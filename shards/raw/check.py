"""Compare raw folders with the published lists without packing: what is present, what is wrong, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.dataset import Dataset
from shards.errors import DataError
from shards.process_pool import map_in_order
from shards.raw.folders import Listing, RawProblem
from shards.raw.locations import find_location, raw_layout
from shards.raw.published import list_images, missing_images, present, published_problems, unverified_lists_note

NAMED = 5
CHUNK = 64

# Below this many images a second process takes longer to start than it saves.
FEW = 500

# Called with the images decoded so far and all of them.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RawSplit:
    """Images of one split: how many were published, are listed, and are on the disk; the first paths that are not."""

    name: str
    expected: int
    listed: int
    there: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class RawReport:
    """One data set below a raw root; `ok` means that it can be packed as published.

    folder: where it was found. undecodable: the first files that are no readable images, of `undecodable_count`.
    fixes: one line for each kind of problem, with a command if there is one. notes: information that is no problem.
    """

    dataset: str
    folder: Path | None
    splits: tuple[RawSplit, ...] = ()
    undecodable: tuple[str, ...] = ()
    undecodable_count: int = 0
    problems: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return self.folder is not None

    @property
    def ok(self) -> bool:
        return self.found and not self.problems

    @property
    def nearly(self) -> bool:
        """Whether it was not found but a fix is known: an archive to unpack, or a folder to move."""
        return not self.found and any(not fix.startswith("get ") for fix in self.fixes)


def check_raw(
    dataset: Dataset,
    raw_root: Path,
    *,
    decode: bool = True,
    workers: int = 1,
    on_progress: Progress | None = None,
) -> RawReport:
    """Check a published data set below `raw_root`; a broken root gives a report, never an error.

    decode: read every image that is there, in `workers` processes.
    """
    problems: list[DataError] = []
    splits: list[RawSplit] = []
    broken: list[tuple[str, str]] = []
    notes: list[str] = []
    folder: Path | None = None
    try:
        location = find_location(dataset, raw_root)
        folder = location.folder if location else None
        notes += _notes(dataset, raw_root)
        listing = list_images(dataset, raw_root)
        problems += published_problems(dataset, listing)
        paths: dict[str, None] = {}
        for split, rows in listing.splits.items():
            is_there = present(listing, split)
            absent = missing_images(dataset, split, rows, is_there)
            problems += [absent] if absent else []
            found = rows.only(is_there)
            missing = rows.only(not here for here in is_there)
            expected = dataset.counts.get(split, 0)
            splits.append(RawSplit(split, expected, len(rows), len(found), tuple(missing.paths[:NAMED])))
            paths.update(dict.fromkeys(found.paths))
        if decode:
            broken = undecodable(listing.images, list(paths), workers, on_progress)
            problems += _broken_images(listing, broken)
    except DataError as problem:
        problems.append(problem)
    return RawReport(
        dataset=dataset.name,
        folder=folder,
        splits=tuple(splits),
        undecodable=tuple(path for path, _ in broken[:NAMED]),
        undecodable_count=len(broken),
        problems=tuple(problem.what if isinstance(problem, RawProblem) else str(problem) for problem in problems),
        fixes=tuple(
            dict.fromkeys(problem.remedy for problem in problems if isinstance(problem, RawProblem) and problem.remedy)
        ),
        notes=tuple(notes),
    )


def _notes(dataset: Dataset, raw_root: Path) -> Iterator[str]:
    location, raw = find_location(dataset, raw_root), raw_layout(dataset)
    if location is None or location.images is None:
        return
    usual = raw_root / raw.folders[0] / raw.images[0]
    if location.images != usual:
        yield f"images are read from {location.images}, which CoOp has as {usual}: nothing need be renamed"
    if raw.layout == "imagenet":
        hint = "to train on its few-shot samples, import them"
        yield f"files of a class are sorted by name; CoOp's come as the disk lists them: {hint}"
    if caution := unverified_lists_note(dataset):
        yield caution


def undecodable(
    images: Path, paths: Sequence[str], workers: int = 1, on_progress: Progress | None = None
) -> list[tuple[str, str]]:
    """Find the unreadable images among `paths`, with reasons. Raises DataError when a worker is killed."""
    tasks = [(images, tuple(paths[start : start + CHUNK])) for start in range(0, len(paths), CHUNK)]
    broken: list[tuple[str, str]] = []
    done = 0
    for (_, chunk), found in zip(tasks, map_in_order(_decode, tasks, workers if len(paths) > FEW else 1), strict=True):
        broken += found
        done += len(chunk)
        if on_progress:
            on_progress(done, len(paths))
    return broken


def _decode(task: tuple[Path, tuple[str, ...]]) -> list[tuple[str, str]]:
    from shards.images import ImageError, decode

    images, paths = task
    broken = []
    for path in paths:
        try:
            decode((images / path).read_bytes())
        except OSError as error:
            broken.append((path, f"it cannot be read ({error.strerror or error})"))
        except ImageError as error:
            broken.append((path, str(error)))
    return broken


def _broken_images(listing: Listing, broken: list[tuple[str, str]]) -> Iterator[RawProblem]:
    if broken:
        named = ", ".join(f"{path}: {reason}" for path, reason in broken[:NAMED])
        more = f", and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
        count = "1 image" if len(broken) == 1 else f"{len(broken):,} images"
        what = f"{count} in {listing.images} cannot be decoded: {named}{more}"
        yield RawProblem(what, "get these files again from the source")
