"""Read published data sets from raw folders of the user, for packing or for a check: exactly CoOp's lists, or an error.

A random split, a subset of the images, and smaller images are made on request, each under another name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shards.catalogue import Dataset
from shards.errors import DataError
from shards.manifest import lines_digest
from shards.names import first_few
from shards.raw.folders import Listing, split_missing, total_size
from shards.raw.lists import find_location, make_random_split, raw_layout, read_published
from shards.records import Source


def raw_source(dataset: Dataset, raw_root: Path, *, whole: bool = True) -> Source:
    """Make a source of a published data set, or one derived from it, as CoOp lists it: paths, labels, names, order.

    whole: raise DataError for the first difference from the published set; otherwise they are its `problems`.
    """
    published, variant, seed = sum(dataset.counts.values()), dataset.variant, dataset.random_split
    try:
        location = find_location(dataset, raw_root)
        listing = read_published(location) if seed is None else make_random_split(location, seed)
        differences = [] if seed is not None else list(published_differences(dataset, listing))
        existing, missing = _existing_images(dataset, listing)
        problems = (*listing.problems, *([] if dataset.subset else [*differences, *missing]))
        if whole and "test" not in existing.splits:
            problems += (f"none of its test images is in {listing.root}; get {location.raw.get}",)
        for problem in problems if whole else ():
            raise DataError(problem)
    except DataError as error:
        raise DataError(f"'{dataset.base}': {error}") from error
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
        problems=problems,
    )


def published_differences(dataset: Dataset, listing: Listing) -> Iterator[str]:
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
            yield f"{what}; {much if counts[split] > count else _get_the_rest(dataset)}"
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
    if raw.split_file:
        remedy = "or use --subset when the file is a part of the published one"
        hint = "CoOp writes a private one under that name when it is missing"
        yield f"{raw.split_file} is not the published split: {difference} ({hint}); get {raw.get}; {remedy}"
    else:
        yield f"{listing.origin} in {listing.root.parent} are not the published ones: {difference}; get {raw.get}"


def _has_published_lines(dataset: Dataset, listing: Listing) -> bool:
    raw = raw_layout(dataset)
    if raw.split_digests or not raw.split_file:
        return all(lines_digest(listing.lines(split)) == digest for split, digest in raw.split_digests.items())
    # No digest is known of Food101's and SUN397's split files, in which all classes are equally large.
    sizes = {split: set(Counter(label for _, label in images).values()) for split, images in listing.splits.items()}
    return all(sizes[split] == {count // dataset.classes} for split, count in dataset.counts.items())


def _existing_images(dataset: Dataset, listing: Listing) -> tuple[Listing, list[str]]:
    """Return a listing of the images that are files, and a problem for each split in which some are missing."""
    splits, problems = {}, []
    for split, images in listing.splits.items():
        splits[split], missing = (images, []) if listing.scanned else split_missing(listing.root, images)
        if missing:
            what = f"{split}: {len(missing):,} of {len(images):,} images are missing: {first_few(missing)}"
            problems.append(f"{what}; {_get_the_rest(dataset)}")
    return replace(listing, splits={split: images for split, images in splits.items() if images}), problems


def _get_the_rest(dataset: Dataset) -> str:
    return f"get the rest ({raw_layout(dataset).get}), or pack what is there with --subset"
