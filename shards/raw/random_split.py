"""Make a random split by CoOp's rules if the official split file is missing. Nothing is written.

CoOp draws such a split from global random numbers, in the order the disk lists files, and keeps it under the official
name. Here files are sorted by name and the draw has a seed and a random stream of its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import islice

from shards.errors import DataError
from shards.raw.classnames import published_classnames
from shards.raw.folders import Images, Listing, RawProblem, split_missing
from shards.raw.lists import read_labelled_images, read_official_list, scan_published_folders
from shards.raw.locations import RawLocation

FRACTIONS = {"train": 0.5, "val": 0.2, "test": 0.3}
TRAINVAL_FRACTIONS = {"val": 0.2, "train": 0.8}


def make_random_split(location: RawLocation, seed: int) -> Listing:
    """Split the existing images at random; class names and labels are the published ones."""
    names = published_classnames(location.dataset)
    rule, draw = location.raw.random_split, random.Random(seed)
    problems: list[RawProblem] = []
    try:
        if rule == "trainval":
            lists = (read_official_list(location, part) for part in ("trainval", "test"))
            trainval, test = (split_missing(location.images, images)[0] for images in lists)
            drawn = split_classes(trainval, names, TRAINVAL_FRACTIONS, draw)
            absent = sorted(set(range(len(names))) - {label for _, label in test})
            if absent:
                raise DataError(f"class {names[absent[0]]!r} has no test images")
            splits = {"train": drawn["train"], "val": drawn["val"], "test": test}
        elif rule == "labels":
            images, _ = split_missing(location.images, read_labelled_images(location))
            splits = split_classes(images, names, FRACTIONS, draw)
        else:
            images, problems = scan_published_folders(location)
            splits = split_classes(images, names, FRACTIONS, draw)
    except RawProblem:
        raise
    except DataError as error:
        raise RawProblem(f"no random split can be made: {error}") from error
    of_what = {"folders": "class folders", "labels": "labelled images", "trainval": "official training list"}[rule]
    origin = f"random split of the {of_what}, seed {seed}"
    return Listing(location.images, names, splits, origin, True, tuple(problems))


def split_classes(
    images: Images, classnames: Sequence[str], fractions: Mapping[str, float], draw: random.Random
) -> dict[str, Images]:
    """Shuffle each class, in order of first appearance, and cut it into `fractions`; the last takes the rest."""
    by_class: dict[int, list[str]] = {}
    for path, label in images:
        by_class.setdefault(label, []).append(path)
    splits: dict[str, Images] = {split: [] for split in fractions}
    for label in (*by_class, *(label for label in range(len(classnames)) if label not in by_class)):
        paths = by_class.get(label, [])
        if not (sizes := split_sizes(len(paths), fractions)):
            has = f"class {classnames[label]!r} has {len(paths)} image{'s' * (len(paths) != 1)}"
            raise DataError(f"{has}, too few for {', '.join(fractions)}: add images")
        draw.shuffle(paths)
        rest = iter(paths)
        for split, size in sizes.items():
            splits[split] += [(path, label) for path in islice(rest, size)]
    return splits


def split_sizes(count: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Divide `count` images by `fractions`, of which the last takes the rest; empty if one of them would get none."""
    sizes = {split: round(fraction * count) for split, fraction in fractions.items()}
    last = [*fractions][-1]
    sizes[last] = count - sum(size for split, size in sizes.items() if split != last)
    return sizes if min(sizes.values()) > 0 else {}
