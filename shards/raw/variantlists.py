"""FGVCAircraft: the images of each split are text lists of image number and variant name, in list order."""

from __future__ import annotations

from pathlib import Path

from shards.raw.folders import UNCHANGED, Listing, RawProblem, Rows, unsafe_path
from shards.raw.places import Place
from shards.raw.splitfile import SPLITS
from shards.raw.textlists import read_lines, required_list


def read_variant_lists(place: Place) -> Listing:
    """`variants.txt`, whose line number is the label, and `images_variant_<split>.txt`.

    Raises RawProblem for a list that is missing or has a line that it should not have.
    """
    images = place.require_images()
    names_file = required_list(place, "variants.txt")
    classnames = tuple(line.strip() for _, line in read_lines(names_file))
    labels = {name: label for label, name in enumerate(classnames)}
    if len(labels) != len(classnames):
        raise RawProblem(f"{names_file} names a variant twice", UNCHANGED)
    seen: set[str] = set()
    splits = {split: _split(required_list(place, f"images_variant_{split}.txt"), labels, seen) for split in SPLITS}
    return Listing(images, classnames, splits, "official variant lists")


def _split(file: Path, labels: dict[str, int], seen: set[str]) -> Rows:
    """`seen` holds the images of the splits that were read before."""
    paths, found = [], []
    for number, line in read_lines(file):
        image, _, name = line.strip().partition(" ")
        path = f"{image}.jpg"
        reason = unsafe_path(path) or ("" if name in labels else f"names the unknown variant {name!a}")
        reason = reason or ("is an image that was listed before" if path in seen else "")
        if reason:
            raise RawProblem(f"{file}, line {number}: {line[:80]!a} {reason}", UNCHANGED)
        seen.add(path)
        paths.append(path)
        found.append(labels[name])
    return Rows(paths, found)
