"""Read published data sets from raw folders of the user as sources for packing: exactly CoOp's lists, or an error.

Three ways off that road, each by request and each under another name: a random split, a subset of the images,
smaller images.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from shards.catalogue import derive_dataset
from shards.dataset import Dataset
from shards.errors import DataError
from shards.manifest import lines_digest
from shards.raw.classfolders import absent_classes, scan_imagenet, scan_numbered_folders, scan_wnid_folders
from shards.raw.folders import FolderPart, Listing, RawProblem, Rows, entries, files_exist, total_size
from shards.raw.lists import read_split_file, read_variant_lists
from shards.raw.locations import RawLocation, find_location, has_images, raw_layout, unpack_advice
from shards.raw.random_split import random_split as split_at_random
from shards.records import Source

NAMED = 3


def raw_source(
    dataset: Dataset,
    raw_root: Path,
    *,
    random_split: int | None = None,
    subset: bool = False,
    resize: int | None = None,
) -> Source:
    """Make a source of a published data set below `raw_root` as CoOp lists it: paths, labels, class names and order.

    random_split: split the images that are there with this seed, by CoOp's rule. subset: pack only the files that are
    there, unchanged in labels and class list. resize: pixels of the shorter side. Each makes a set of another name.
    Raises DataError, in one line, when files or lists are missing, broken, or not the published ones.
    """
    target = derive_dataset(dataset, random_split=random_split, subset=subset, resize=resize)
    try:
        listing = list_images(dataset, raw_root, random_split)
        for problem in listing.problems if subset or random_split is not None else published_problems(dataset, listing):
            raise problem
        splits = dict(_splits_there(dataset, listing, subset))
        if not splits:
            raise RawProblem(f"none of its images is in {listing.images}", f"get {raw_layout(dataset).get}")
        if "test" not in splits:
            raise RawProblem(f"none of its test images is in {listing.images}", f"get {raw_layout(dataset).get}")
    except RawProblem as problem:
        raise DataError(f"'{dataset.name}': {problem}") from problem
    paths = [path for rows in splits.values() for path in rows.paths]
    return Source(
        name=target.name,
        classnames=listing.classnames,
        template=target.template,
        templates=target.templates,
        origin=f"{listing.origin}, lists {Listing(listing.images, listing.classnames, splits, '').digest()}",
        counts={split: len(rows) for split, rows in splits.items()},
        part=partial(_part, listing.images, splits),
        size=total_size(listing.images, paths),
        variant=_variant(dataset, target, listing, len(paths)),
        resize=resize,
    )


def _splits_there(dataset: Dataset, listing: Listing, subset: bool) -> Iterator[tuple[str, Rows]]:
    for split, rows in listing.splits.items():
        is_there = present(listing, split)
        problem = missing_images(dataset, split, rows, is_there)
        if problem and not subset:
            raise problem
        kept = rows.only(is_there)
        if len(kept):
            yield split, kept


def _variant(dataset: Dataset, target: Dataset, listing: Listing, count: int) -> str:
    """Describe how the source differs from the published set, with counts from its files."""
    published = sum(dataset.counts.values())
    figures = f"{count:,} of {published:,} images"
    if target.variant.startswith("subset"):
        foreign = not listing.scanned and any(published_problems(dataset, listing))
        figures += ", by lists that are not the published ones" if foreign else ""
        return target.variant.replace("subset of the images", f"subset: {figures}")
    return f"{target.variant}, {figures}" if target.variant and count != published else target.variant


def find_folder(dataset: Dataset, raw_root: Path) -> Path | None:
    """Find the folder of a published data set below `raw_root`; None if there is none."""
    location = find_location(dataset, raw_root)
    return location.folder if location else None


def list_images(dataset: Dataset, raw_root: Path, random_split: int | None = None) -> Listing:
    """Read the lists of a data set. Raises RawProblem if there is no folder, no images or no readable list."""
    location = require_location(dataset, raw_root)
    location.require_images()
    if random_split is not None:
        return split_at_random(location, random_split)
    readers = {
        "split-file": _split_file,
        "imagenet": scan_imagenet,
        "wnid-folders": scan_wnid_folders,
        "numbered-folders": scan_numbered_folders,
        "variant-lists": read_variant_lists,
    }
    return readers[raw_layout(dataset).layout](location)


def require_location(dataset: Dataset, raw_root: Path) -> RawLocation:
    """Find the data set's images. Raises RawProblem with the place where they belong, and a command if one helps."""
    location = find_location(dataset, raw_root)
    raw = raw_layout(dataset)
    if location is not None and location.images is not None:
        return location
    what = f"there is no folder {raw.folders[0]} in {raw_root}"
    if location is not None:
        what = f"no images in {' or '.join(str(location.folder / images) for images in raw.images[:2])}"
    elif not os.path.isdir(raw_root):
        raise RawProblem(f"{raw_root} is no folder", f"name the folder that holds {raw.folders[0]}/")
    elif raw_root.resolve().name in raw.folders or any(has_images(dataset, raw_root / images) for images in raw.images):
        raise RawProblem(what, f"name the folder above it: {shlex.quote(str(raw_root.resolve().parent))}")
    # Report a folder without read permission, which otherwise looks empty.
    entries(location.folder if location else raw_root)
    raise RawProblem(what, unpack_advice(dataset, raw_root, location) or f"get {raw.get}")


def _split_file(location: RawLocation) -> Listing:
    raw = raw_layout(location.dataset)
    file = location.find_list(raw.split_file)
    if file is None:
        own = "or split the images yourself with --random-split SEED, which no published figure compares with"
        raise RawProblem(
            f"the official split file {location.folder / raw.split_file} is missing", f"get {raw.get}; {own}"
        )
    content = read_split_file(file)
    return Listing(location.require_images(), content.classnames, content.splits, f"CoOp split {raw.split_file}")


def unverified_lists_note(dataset: Dataset) -> str:
    """Describe in one line the lists that no digest verifies; "" if digests detect any change."""
    raw = raw_layout(dataset)
    if not raw.split_file or raw.split_digests:
        return ""
    return (
        f"no digest of {raw.split_file} is known: it is held to the published class names and sizes, and a private "
        "split of the same sizes, as CoOp writes when the file is missing, cannot be recognised"
    )


def published_problems(dataset: Dataset, listing: Listing) -> Iterator[RawProblem]:
    """List the differences of the lists from the published ones; does not look for the images on disk."""
    yield from listing.problems
    raw = raw_layout(dataset)
    named = lines_digest(listing.classnames) == raw.classnames_digest
    listed = named and all(lines_digest(listing.lines(split)) == digest for split, digest in raw.split_digests.items())
    counts = {split: len(rows) for split, rows in listing.splits.items()}
    if listing.scanned:
        for split, rows in listing.splits.items():
            if len(rows) != dataset.counts[split]:
                yield _wrong_count(dataset, listing, split, rows)
    elif not named or not listed or counts != dict(dataset.counts) or not _balanced(dataset, listing):
        yield _not_published(dataset, listing, named)


def _balanced(dataset: Dataset, listing: Listing) -> bool:
    """Whether classes are equally large in split files without a known digest: Food101's and SUN397's are."""
    raw = raw_layout(dataset)
    if not raw.split_file or raw.split_digests:
        return True
    sizes = {split: set(Counter(rows.labels).values()) for split, rows in listing.splits.items()}
    return all(sizes[split] == {count // dataset.classes} for split, count in dataset.counts.items())


def _not_published(dataset: Dataset, listing: Listing, named: bool) -> RawProblem:
    raw = raw_layout(dataset)
    differs = "the lists are others" if named else "the class names are others"
    for split, count in dataset.counts.items():
        if len(listing.splits.get(split, ())) != count:
            differs = f"{len(listing.splits.get(split, ())):,} {split} images are listed, published {count:,}"
            break
    if not raw.split_file:
        return RawProblem(
            f"{listing.origin} in {listing.images.parent} are not the published ones: {differs}", f"get {raw.get}"
        )
    return RawProblem(
        f"{raw.split_file} is not the published split: {differs} (CoOp writes a private one under that name when it is "
        "missing)",
        f"get {raw.get}; or use --random-split SEED, or --subset when the file is a part of the published one",
    )


def _wrong_count(dataset: Dataset, listing: Listing, split: str, rows: Rows) -> RawProblem:
    published = dataset.counts[split]
    what = f"{split}: {len(rows):,} images in {listing.images}, published {published:,}"
    absent = absent_classes(dataset, rows)
    if 0 < len(absent) < dataset.classes:
        names = ", ".join(repr(listing.classnames[label]) for label in absent[:NAMED])
        what += f"; {len(absent)} classes have none: {names}{', ...' if len(absent) > NAMED else ''}"
    if len(rows) > published:
        return RawProblem(what, "take out what was added, or pack all that is there with --subset")
    return RawProblem(what, f"get the rest ({raw_layout(dataset).get}), or pack what is there with --subset")


def present(listing: Listing, split: str) -> list[bool]:
    """Whether each image of a split exists on disk."""
    rows = listing.splits[split]
    return [True] * len(rows) if listing.scanned else list(files_exist(listing.images, rows.paths))


def missing_images(dataset: Dataset, split: str, rows: Rows, is_there: list[bool]) -> RawProblem | None:
    missing = [path for path, here in zip(rows.paths, is_there, strict=True) if not here]
    if not missing:
        return None
    named = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
    what = f"{split}: {len(missing):,} of {len(rows):,} images are missing: {named}"
    return RawProblem(what, f"get the rest ({raw_layout(dataset).get}), or pack what is there with --subset")


def _part(images: Path, splits: Mapping[str, Rows], split: str, start: int, stop: int) -> FolderPart:
    rows = splits[split]
    return FolderPart(images, tuple(rows.paths[start:stop]), tuple(rows.labels[start:stop]))
