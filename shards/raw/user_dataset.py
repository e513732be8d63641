"""Read data sets of a user: class folders or a table, described by a short YAML file.

Labels: numbers are used as they are, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths
in the YAML file are relative to it. Images are packed in the order of the table, or of folders by label and name. Names
on the disk and in tables are untrusted; paths must stay inside the folder of the images, and links are followed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from procap.errors import UserError
from shards.names import first_few, join_first, unfit_texts
from shards.raw.class_folders import ListedImage, scan_folders
from shards.raw.description import Description, parse_description, read_description
from shards.raw.folders import Images, Listing, file_sizes, small_classes, split_classes, split_missing
from shards.raw.published import SPLITS
from shards.raw.tables import read_table
from shards.records import Source

Label = str | int


def user_source(file: Path, text: str = "") -> Source:
    """Make a source of the data set that a YAML file describes.

    text: the content of a file that is not written yet. What is wrong in single images or classes are its `problems`.
    """
    description = parse_description(text, file) if text else read_description(file)
    try:
        return _image_source(file, description)
    except UserError as error:
        unwritten = " (to be written: the guess above, changed)" if text else ""
        raise UserError(f"{file}{unwritten}: {error}") from None


def _image_source(file: Path, description: Description) -> Source:
    if description.table is not None:
        root, origin = _resolve(file, description.images or "."), "own table"
        images, folder_problems, notes = _list_table(_resolve(file, description.table), root), list[str](), list[str]()
    else:
        root, origin = _resolve(file, description.folder or ""), "own folders"
        images, folder_problems, notes = scan_folders(root, dict((description.splits or {}).items()))
    names, labels = _number_classes(description, images)
    if description.table is None:
        images.sort(key=lambda image: labels[image.label])
    splits, problems = _assign_splits(description, images, names, labels)
    listing = Listing(root, names, splits, origin, scanned=True)
    if len(names) == 1:
        notes.append("there is one class: such a set can be evaluated, and nothing can be trained on it")
    sizes = file_sizes(root, listing.paths)
    # A user's data has no version; the sizes detect most images that were replaced under the same name.
    sizes_digest = hashlib.sha256(" ".join(map(str, sizes)).encode()).hexdigest()[:16]
    return Source(
        name=description.name,
        classnames=names,
        template=description.template,
        templates=description.prompts,
        origin=f"{origin}, lists {listing.digest()}, sizes {sizes_digest}",
        counts=listing.counts,
        part=listing.part,
        size=sum(sizes),
        problems=(*folder_problems, *problems),
        notes=tuple(notes),
    )


def _resolve(file: Path, path: str) -> Path:
    return file.parent / os.path.expanduser(path)


def _list_table(table: Path, root: Path) -> list[ListedImage]:
    images = read_table(table)
    if missing := split_missing(root, [(image.path, 0) for image in images])[1]:
        what = f"table: {len(missing):,} of {len(images):,} images are not in {root}"
        raise UserError(f"{what}: {first_few(missing)}")
    return images


def _number_classes(
    description: Description, images: Sequence[ListedImage]
) -> tuple[tuple[str, ...], dict[Label, int]]:
    """Return the class names in label order, and the label of each class in the data."""
    present: dict[Label, str] = {image.label: str(image.label) for image in images}
    texts = sorted(label for label in present if isinstance(label, str))
    if texts and len(texts) < len(present):
        raise UserError(f"labels are text ({first_few(texts)}) and numbers: they must be all text or all numbers")
    names = _name_classes(description, present, bool(texts))
    differences = {
        "not listed": present.keys() - names.keys(),
        "listed without images": names.keys() - present.keys(),
    }
    if any(differences.values()):
        named = [f"{what}: {join_first(sorted(map(ascii, some)), 100)}" for what, some in differences.items() if some]
        without = "leave out its rows" if description.table else "pack a folder of links to the others"
        hint = f"; to leave a class out, {without}" if differences["not listed"] else ""
        raise UserError(f"classes: {'; '.join(named)}{hint}")
    # A list of names is an order of text labels; other text is sorted, and numbers are their own order.
    order: list[Label] = [*range(len(names))]
    if texts:
        order = list(names) if isinstance(description.classes, tuple) else [*texts]
    elif absent := [label for label in order if label not in names]:
        raise UserError(f"no image has label {absent[0]}: labels are 0 to C - 1 without a gap")
    classnames = tuple(names[label] for label in order)
    repeated = [name for name, count in Counter(classnames).items() if count > 1]
    if texts and repeated:
        merge = "give them one label in the table" if description.table else "put their images into folders of one name"
        raise UserError(f"classes: two labels are called {first_few(repeated)}: to make them one class, {merge}")
    if reason := next(unfit_texts(classnames, ()), ""):
        raise UserError(f"{reason}: a name is one line without blanks around it")
    return classnames, {label: number for number, label in enumerate(order)}


def _name_classes(description: Description, present: dict[Label, str], is_text: bool) -> dict[Label, str]:
    """Return the class name of each label, as `classes` of the description or the labels themselves give it."""
    classes = description.classes
    if isinstance(classes, dict):
        return {str(key) if is_text else key: name for key, name in classes.items()}
    if classes is not None:
        return {name if is_text else number: name for number, name in enumerate(classes)}
    if not is_text:
        raise UserError("labels are numbers without names: list them under classes, [name of 0, name of 1, ...]")
    return present


def _assign_splits(
    description: Description, listed: Sequence[ListedImage], names: Sequence[str], labels: dict[Label, int]
) -> tuple[dict[str, Images], list[str]]:
    """Assign a split to every image, as the data give it or else by the description, and list problems of classes.

    If classes are too small for the rule, all images are in the split "".
    """
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
        by_name = sorted(unassigned, key=lambda image: (image[1], image[0]))
        if few := small_classes(by_name, names, fractions):
            return {"": by_name}, few
        images = split_classes(by_name, fractions, rule.seed)
    if not images["test"]:
        raise UserError("there are no test images: nothing could be evaluated")
    if images.get("val") and not images["train"]:
        raise UserError("there are val images and no train images")
    splits = {split: rows for split, rows in images.items() if rows}
    return splits, _empty_classes(splits, names)


def _empty_classes(splits: dict[str, Images], names: Sequence[str]) -> list[str]:
    """Describe the classes without images in train or test."""
    problems = []
    for split in splits.keys() - {"val"}:
        present = {label for _, label in splits[split]}
        for label, name in enumerate(names):
            if label not in present:
                advice = "add some, or remove the class from all splits"
                problems.append(f"class {name!r} has no {split} image: {advice}")
    return sorted(problems)
