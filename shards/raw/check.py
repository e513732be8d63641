"""Compare raw folders with the published lists without packing: what is present, what is wrong, how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shards.dataset import Dataset
from shards.errors import DataError
from shards.process_pool import map_in_order
from shards.raw.folders import RawProblem
from shards.raw.lists import read_published
from shards.raw.locations import find_folder, find_location
from shards.raw.published import existing_images, published_differences

NAMED = 5
CHUNK = 64
# Below this many images a second process takes longer to start than it saves.
FEW = 500
# Called with the images decoded so far and all of them.
CheckProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class RawSplit:
    """How many images of one split were published, and how many of those in the lists are on the disk."""

    name: str
    expected: int
    present: int


@dataclass(frozen=True)
class RawReport:
    """One data set below a raw root; `ok` means that it can be packed as published.

    folder: where it was found, None if nowhere. fixes: one line for each kind of problem.
    """

    dataset: str
    folder: Path | None
    splits: tuple[RawSplit, ...]
    problems: tuple[str, ...]
    fixes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def check_raw(
    dataset: Dataset,
    raw_root: Path,
    *,
    decode: bool = True,
    workers: int = 1,
    on_progress: CheckProgress | None = None,
) -> RawReport:
    """Check a published data set below `raw_root`, and with `decode` every image; faults are reported, not raised."""
    problems: list[DataError] = []
    splits: list[RawSplit] = []
    try:
        location = find_location(dataset, raw_root)
        listing = read_published(location)
        existing, missing = existing_images(dataset, listing)
        problems += [*listing.problems, *published_differences(dataset, listing), *missing]
        splits += [RawSplit(split, dataset.counts.get(split, 0), len(images)) for split, images in existing.items()]
        paths = list(dict.fromkeys(path for images in existing.values() for path, _ in images))
        chunks = [paths[start : start + CHUNK] for start in range(0, len(paths) if decode else 0, CHUNK)]
        decoded = map_in_order(partial(_decode, listing.root), chunks, workers if len(paths) > FEW else 1)
        broken: list[tuple[str, str]] = []
        for number, found in enumerate(decoded, 1):
            broken += found
            if on_progress:
                on_progress(min(number * CHUNK, len(paths)), len(paths))
        if broken:
            count = "1 image" if len(broken) == 1 else f"{len(broken):,} images"
            named = ", ".join(f"{path}: {reason}" for path, reason in broken[:NAMED])
            more = f", and {len(broken) - NAMED:,} more" if len(broken) > NAMED else ""
            what = f"{count} in {listing.root} cannot be decoded: {named}{more}"
            problems.append(RawProblem(what, "get these files again from the source"))
    except DataError as problem:
        problems.append(problem)
    raw_problems = [problem for problem in problems if isinstance(problem, RawProblem)]
    return RawReport(
        dataset=dataset.name,
        folder=find_folder(dataset, raw_root),
        splits=tuple(splits),
        problems=tuple(getattr(problem, "what", str(problem)) for problem in problems),
        fixes=tuple(dict.fromkeys(problem.remedy for problem in raw_problems if problem.remedy)),
    )


def _decode(root: Path, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Find the images among `paths` that do not decode, with reasons."""
    from shards.images import ImageError, decode

    broken = []
    for path in paths:
        try:
            decode((root / path).read_bytes())
        except OSError as error:
            broken.append((path, f"it cannot be read ({error.strerror or error})"))
        except ImageError as error:
            broken.append((path, str(error)))
    return broken
