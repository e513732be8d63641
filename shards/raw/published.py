"""Read published data sets from raw folders of the user, for packing or for a check: exactly CoOp's lists, or an error.

A random split, a subset of the images, and smaller images are made on request, each under another name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shards.catalogue import Dataset
from shards.errors import DataError
from shards.manifest import lines_digest
from shards.names import first_few, join_first
from shards.process_pool import map_in_order
from shards.raw.folders import Images, Listing, RawProblem, split_missing, total_size
from shards.raw.lists import read_published
from shards.raw.locations import find_folder, find_location, raw_layout
from shards.raw.random_split import make_random_split
from shards.records import Source

# Undecodable images that a problem names.
NAMED_IMAGES = 5
CHUNK = 64
# Below this many images a second process takes longer to start than it saves.
FEW = 500
# Called with the images decoded so far and all of them.
CheckProgress = Callable[[int, int], None]


def raw_source(dataset: Dataset, raw_root: Path) -> Source:
    """Make a source of a published data set, or one derived from it, as CoOp lists it: paths, labels, names, order."""
    published, variant, seed = sum(dataset.counts.values()), dataset.variant, dataset.random_split
    try:
        location = find_location(dataset, raw_root)
        listing = read_published(location) if seed is None else make_random_split(location, seed)
        differences = [] if seed is not None else list(published_differences(dataset, listing))
        splits, missing = existing_images(dataset, listing)
        for problem in (*listing.problems, *([] if dataset.subset else [*differences, *missing])):
            raise problem
        splits = {split: images for split, images in splits.items() if images}
        if "test" not in splits:
            raise RawProblem(f"none of its test images is in {listing.root}", f"get {location.raw.get}")
    except RawProblem as problem:
        raise DataError(f"'{dataset.base}': {problem}") from problem
    existing = replace(listing, splits=splits)
    count = len(existing.paths)
    if dataset.subset:
        counts = f"subset: {count:,} of {published:,} images"
        counts += ", by lists that are not the published ones" if differences and not listing.scanned else ""
        variant = variant.replace("subset of the images", counts)
    elif variant and count != published:
        variant = f"{variant}, {count:,} of {published:,} images"
    return Source(
        name=dataset.name,
        classnames=listing.classnames,
        template=dataset.template,
        templates=dataset.templates,
        origin=f"{listing.origin}, lists {existing.digest()}",
        counts=existing.counts,
        part=existing.part,
        size=total_size(listing.root, existing.paths),
        variant=variant,
        resize=dataset.resize,
    )


def published_differences(dataset: Dataset, listing: Listing) -> Iterator[RawProblem]:
    """List the differences of the lists from the published ones; does not look for the images on disk."""
    raw, counts = raw_layout(dataset), listing.counts
    wrong = {split: count for split, count in dataset.counts.items() if counts.get(split, 0) != count}
    if listing.scanned:
        for split, count in wrong.items():
            what = f"{split}: {counts[split]:,} images in {listing.root}, published {count:,}"
            absent = sorted(set(range(dataset.classes)) - {label for _, label in listing.splits[split]})
            if 0 < len(absent) < dataset.classes:
                names = first_few([listing.classnames[label] for label in absent])
                what += f"; {len(absent)} classes have none: {names}"
            much = "take out what was added, or pack all that is there with --subset"
            yield RawProblem(what, much if counts[split] > count else _get_the_rest(dataset))
        return
    if wrong:
        split, count = next(iter(wrong.items()))
        difference = f"{counts.get(split, 0):,} {split} images are listed, published {count:,}"
    elif lines_digest(listing.classnames) != raw.classnames_digest:
        difference = "the class names are others"
    elif not _has_published_lines(dataset, listing):
        difference = "the lists are others"
    else:
        return
    if not raw.split_file:
        what = f"{listing.origin} in {listing.root.parent} are not the published ones: {difference}"
        yield RawProblem(what, f"get {raw.get}")
        return
    hint = "CoOp writes a private one under that name when it is missing"
    remedy = f"get {raw.get}; or use --random-split SEED, or --subset when the file is a part of the published one"
    yield RawProblem(f"{raw.split_file} is not the published split: {difference} ({hint})", remedy)


def _has_published_lines(dataset: Dataset, listing: Listing) -> bool:
    raw = raw_layout(dataset)
    if raw.split_digests or not raw.split_file:
        return all(lines_digest(listing.lines(split)) == digest for split, digest in raw.split_digests.items())
    # No digest is known of Food101's and SUN397's split files, in which all classes are equally large.
    sizes = {split: set(Counter(label for _, label in images).values()) for split, images in listing.splits.items()}
    return all(sizes[split] == {count // dataset.classes} for split, count in dataset.counts.items())


def existing_images(dataset: Dataset, listing: Listing) -> tuple[dict[str, Images], list[RawProblem]]:
    """Return the listed images that are files, by split, and a problem for each split in which some are missing."""
    if listing.scanned:
        return dict(listing.splits), []
    splits, problems = {}, []
    for split, images in listing.splits.items():
        splits[split], missing = split_missing(listing.root, images)
        if missing:
            what = f"{split}: {len(missing):,} of {len(images):,} images are missing: {first_few(missing)}"
            problems.append(RawProblem(what, _get_the_rest(dataset)))
    return splits, problems


def _get_the_rest(dataset: Dataset) -> str:
    return f"get the rest ({raw_layout(dataset).get}), or pack what is there with --subset"


def unverified_lists_note(dataset: Dataset) -> str:
    """Describe in one line the lists that no digest verifies; "" if digests detect any change."""
    raw = raw_layout(dataset)
    if not raw.split_file or raw.split_digests:
        return ""
    return (
        f"no digest of {raw.split_file} is known: it is held to the published class names and sizes, and a private "
        "split of the same sizes, as CoOp writes when the file is missing, cannot be recognised"
    )


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
    dataset: Dataset, raw_root: Path, *, decode: bool = True, workers: int = 1, on_progress: CheckProgress | None = None
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
        broken: list[str] = []
        for number, found in enumerate(decoded, 1):
            broken += found
            if on_progress:
                on_progress(min(number * CHUNK, len(paths)), len(paths))
        if broken:
            count = "1 image" if len(broken) == 1 else f"{len(broken):,} images"
            what = f"{count} in {listing.root} cannot be decoded: {join_first(broken, limit=NAMED_IMAGES)}"
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


def _decode(root: Path, paths: Sequence[str]) -> list[str]:
    """List the images among `paths` that do not decode, with reasons."""
    from shards.images import ImageError, decode

    broken = []
    for path in paths:
        try:
            decode((root / path).read_bytes())
        except OSError as error:
            broken.append(f"{path}: it cannot be read ({error.strerror or error})")
        except ImageError as error:
            broken.append(f"{path}: {error}")
    return broken
