"""Read data sets of a user: class folders or a table, described by a short YAML file.

Labels: numbers are used as they are, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths
in the YAML file are relative to it. Images are packed in the order of the table, or of folders by label and name; a
random split shuffles each class. Names on the disk and in tables are untrusted; paths must stay inside the folder of
the images, and links are followed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from unicodedata import normalize

from procap.errors import UserError
from shards.catalogue import UNKNOWN
from shards.check import IMAGES_PER_TASK, readable_paths
from shards.manifest import UPRIGHT
from shards.names import first_few, join_first
from shards.raw.class_folders import ListedImage, scan_folders
from shards.raw.description import Description, SplitRule, read_description
from shards.raw.folders import LabelledPaths, Listing, list_images, missing_files, read_images, split_classes
from shards.raw.published import SPLITS
from shards.raw.tables import read_tables
from shards.source import Source
from shards.tasks import map_in_order

Label = str | int


def user_source(file: Path, text: str = "", *, skip_broken: bool = False, workers: int = 1) -> Source:
    """Make a source of the data set that a YAML file describes.

    text: the content of a file that is not written yet. What is wrong in single images or classes are its `problems`.
    skip_broken: decode every image, with up to `workers` processes, and leave out those that do not decode.
    """
    description = read_description(file, text)
    try:
        return _image_source(file, description, skip_broken, workers)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _image_source(file: Path, description: Description, skip_broken: bool, workers: int) -> Source:
    if description.table is not None:
        root, origin = _resolve(file, description.images or "."), "own table"
        tables = {split: _resolve(file, path) for split, path in description.tables.items()}
        images, problems, notes = read_tables(tables, root), list[str](), list[str]()
        missing = missing_files(root, [image.path for image in images])
        if missing and not (skip_broken and len(missing) < len(images)):
            what = f"table: {len(missing):,} of {len(images):,} images are not in {root}"
            raise UserError(f"{what}: {first_few(missing)}")
    elif description.classes == "none":
        root, origin, problems = _resolve(file, description.folder or ""), "own images of no class", []
        paths, notes = list_images(root)
        images = [ListedImage(path=path, label=UNKNOWN, split="test") for path in paths]
    else:
        root, origin = _resolve(file, description.folder or ""), "own folders"
        images, problems, notes = scan_folders(root)
    if not images:
        raise UserError(f"{root} holds no image that is read; {'; '.join(notes).removeprefix('warning: ')}")
    names, labels = _number_classes(description, images)
    if skip_broken:
        readable = _find_readable(root, [image.path for image in images], workers)
        broken = [image.path for image in images if image.path not in readable]
        images = [image for image in images if image.path in readable]
        notes += [f"left out, not readable: {path}" for path in broken]
        origin += f", without {len(broken):,} unreadable images: {join_first(broken, 100)}" if broken else ""
    if description.table is None:
        # A stable sort: images of a class stay sorted by name.
        images.sort(key=lambda image: labels[image.label])
    splits = _assign_splits(description, images, labels)
    for split, rows in sorted(splits.items()):
        present = {label for _, label in rows}
        absent = [name for label, name in enumerate(names) if label not in present]
        if split != "val":
            problems += [f"class {name!r} has no {split} image: add some, or remove the class" for name in absent]
        elif rows and absent:
            notes.append(f"val has no image of {first_few(absent)}: settings chosen on it ignore such classes")
    listing = Listing(root, names, splits, origin, max_side=description.max_side)
    # A user's data has no version.
    details = f", sizes {hashlib.sha256(' '.join(map(str, listing.sizes)).encode()).hexdigest()[:16]}, "
    if description.max_side:
        details += f"at most {description.max_side} pixels on the short side, "
    # `Manifest.upright` looks for UPRIGHT: whether images are turned as their EXIF orientation says.
    source = listing.make_source(description.name, description.template, description.token_templates, details + UPRIGHT)
    return replace(source, problems=tuple(problems), notes=tuple(notes))


def _find_readable(root: Path, paths: Sequence[str], workers: int) -> set[str]:
    """Decode every image; return the paths of those that decode."""
    # Labels do not matter: only whether the images decode.
    images = [(path, 0) for path in paths]
    starts = range(0, len(images), IMAGES_PER_TASK)
    parts = [partial(read_images, root, images[start : start + IMAGES_PER_TASK]) for start in starts]
    return {*chain.from_iterable(map_in_order(readable_paths, parts, min(workers, len(parts) // 2)))}


def _resolve(file: Path, path: str) -> Path:
    return file.parent / os.path.expanduser(path)


def _number_classes(
    description: Description, images: Sequence[ListedImage]
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the class names in label order, and the label of each class in the data."""
    present, classes = {image.label for image in images}, description.classes
    texts = [label for label in present if isinstance(label, str)]
    if texts and len(texts) < len(present):
        raise UserError(f"labels are text ({first_few(texts)}) and numbers: they must be all text or all numbers")
    names: dict[Label, str]
    if isinstance(classes, dict):
        names = {normalize("NFC", str(key)) if texts else key: name for key, name in classes.items()}
    elif classes not in (None, "none"):
        names = {normalize("NFC", name) if texts else number: name for number, name in enumerate(classes)}
    elif texts:
        names = {text: text for text in texts}
    else:
        raise UserError("labels are numbers without names: list them under classes, [name of 0, name of 1, ...]")
    differences = {"not listed": present - names.keys(), "listed without images": names.keys() - present}
    if any(differences.values()):
        named = [f"{what}: {join_first(sorted(map(ascii, some)), 100)}" for what, some in differences.items() if some]
        raise UserError(f"classes: {'; '.join(named)}")
    # A list of names is an order of text labels; other text and numbers are sorted.
    order: list[Label] = list(names) if isinstance(classes, tuple) else sorted(names)
    classnames = tuple(normalize("NFC", names[label]) for label in order)
    if texts and (repeated := [name for name, count in Counter(classnames).items() if count > 1]):
        raise UserError(f"classes: two labels are called {first_few(repeated)}: give the images of one class one label")
    return classnames, {label: number for number, label in enumerate(order)}


def _assign_splits(
    description: Description, listed: Sequence[ListedImage], labels: dict[Label, int]
) -> dict[str, LabelledPaths]:
    """Assign a split to every image, as the data give it or else by the description."""
    images = {
        split: [(image.path, labels[image.label]) for image in listed if image.split == split]
        for split in ("", *SPLITS)
    }
    unassigned, rule = images.pop(""), description.split
    if len(unassigned) < len(listed):
        if unassigned:
            raise UserError(f"table: {unassigned[0][0]!r} has no split, and other images have one")
        if rule is not None:
            raise UserError("split: the data define their own splits: leave it out")
    elif rule is None:
        example = "add split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}, or split: test if all images are for testing"
        raise UserError(f"the data do not define train and test: {example}")
    elif rule == "test":
        images["test"] = unassigned
    else:
        fractions = {split: fraction for split in SPLITS if (fraction := getattr(rule, split))}
        # Whatever the order of a table, the same images give the same split.
        images = split_classes(sorted(unassigned, key=lambda image: image[::-1]), fractions, rule.seed)
    if not images["test"]:
        raise UserError("there are no test images: nothing could be evaluated")
    # A split of the rule is there without images as well: its absence from a class is a problem.
    return {split: rows for split, rows in images.items() if rows or isinstance(rule, SplitRule)}
