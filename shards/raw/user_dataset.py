"""Read data sets of a user: class folders or a table, described by a short YAML file.

Labels: numbers are taken as given, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths in
the YAML file are relative to it. Images are packed in the order of the table, or of folders by label and name. Names on
the disk and in tables are untrusted; paths must stay inside the folder of the images, and links are followed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.files import read_file
from shards.names import Finding, first_few, join_first, unfit_texts
from shards.raw.class_folders import TABLES, ListedImage, scan_folders
from shards.raw.description import Description, parse_description, read_description
from shards.raw.folders import (
    Images,
    Listing,
    file_sizes,
    is_image_name,
    list_folder,
    small_classes,
    split_classes,
    split_missing,
)
from shards.raw.published import SPLITS
from shards.records import Source

UNEQUAL = 10
"""How many times as many images the largest class has if a note says so."""
AGREEMENT = 0.9
"""The share of images whose folder is called like their label, from which the others are likely mistakes."""


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
        root, kind = _resolve(file, description.images or "."), "table"
        items = read_table(_resolve(file, description.table))
        if missing := split_missing(root, [(item.path, 0) for item in items])[1]:
            what = f"table: {len(missing):,} of {len(items):,} images are not in {root}"
            raise UserError(f"{what}: {first_few(missing)}")
        faults, notes = list[str](), compare_table(root, items)
    else:
        root, kind = _resolve(file, description.folder or ""), "folders"
        items, faults, notes = scan_folders(root, dict((description.splits or {}).items()), description.folder or "")
    names, labels = _number_classes(description, items)
    if kind == "folders":
        items.sort(key=lambda item: labels[item.label])
    splits, problems = _assign_splits(description, items, names, labels)
    listing = Listing(root, names, splits, f"own {kind}", scanned=True)
    sizes = file_sizes(root, listing.paths)
    # A user's data has no version; the sizes detect most images that were replaced under the same name.
    sizes_digest = hashlib.sha256(" ".join(map(str, sizes)).encode()).hexdigest()[:16]
    return Source(
        name=description.name,
        classnames=names,
        template=description.template,
        templates=description.prompts,
        origin=f"{listing.origin}, lists {listing.digest()}, sizes {sizes_digest}",
        counts=listing.counts,
        part=listing.part,
        size=sum(sizes),
        problems=(*faults, *problems),
        notes=(*notes, *describe_classes(names, splits)),
    )


def _resolve(file: Path, path: str) -> Path:
    return file.parent / os.path.expanduser(path)


def read_table(file: Path) -> list[ListedImage]:
    """Read the rows of a table in order: CSV or TSV with a header, or a JSON list of objects."""
    try:
        kind: Any
        text = read_file(file).decode("utf-8-sig")
        if file.suffix.lower() == ".json":
            rows, kind = json.loads(text), list[ListedImage]
        elif file.suffix.lower() in TABLES:
            stream = io.StringIO(text, newline="")
            delimiter, columns = parse_header(stream.readline())
            if sorted(columns) not in (["label", "path"], ["label", "path", "split"]):
                found = join_first([*map(ascii, columns)], 8) or "-"
                raise UserError(f"table: {file} has the columns {found}; path, label and perhaps split are needed")
            options: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True, "strict": True}
            reader = csv.DictReader(stream, columns, restkey="more", **options)
            rows, kind = {f"line {reader.line_num + 1}": row for row in reader}, dict[str, ListedImage]
            labels = [str(row.get("label")) for row in rows.values()]
            if all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels):
                rows = {line: {**row, "label": int(row["label"])} for line, row in rows.items()}
        else:
            raise ValueError(f"it is none of {', '.join(TABLES)}")
        found = TypeAdapter(kind).validate_python(rows)
        items: list[ListedImage] = [*found.values()] if isinstance(found, dict) else found
    except ValidationError as error:
        count = " (images count from 0)" if isinstance(rows, list) else ""
        raise UserError(f"table: {file}{count}: {describe_invalid(error, 'the table')}") from None
    except UnicodeDecodeError:
        raise UserError(f"table: {file} is not in UTF-8: save it as UTF-8") from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read: {reason}") from None
    if not items:
        raise UserError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := _repeated(item.path for item in items):
        raise UserError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return items


def parse_header(line: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV or TSV file and its columns in small letters, from its first line."""
    delimiter = max(",;\t", key=line.count)
    return delimiter, [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]


def _number_classes(
    description: Description, items: Sequence[ListedImage]
) -> tuple[tuple[str, ...], dict[str | int, int]]:
    """Return the class names in label order, and the label of each class in the data."""
    found: dict[str | int, str] = {item.label: str(item.label) for item in items}
    given = description.classes
    texts = sorted(label for label in found if isinstance(label, str))
    if texts and len(texts) < len(found):
        raise UserError(f"labels are text ({first_few(texts)}) and numbers: they must be all of one kind")
    names: dict[str | int, str] = found
    if isinstance(given, dict):
        names = {str(key) if texts else key: name for key, name in given.items()}
    elif given is not None:
        names = {name if texts else number: name for number, name in enumerate(given)}
    elif not texts:
        raise UserError("labels are numbers without names: list them under classes, [name of 0, name of 1, ...]")
    kinds = {"not listed": found.keys() - names.keys(), "listed without images": names.keys() - found.keys()}
    if wrong := [f"{what}: {join_first(sorted(map(ascii, own)), 100)}" for what, own in kinds.items() if own]:
        without = "leave out its rows" if description.table else "pack a folder of links to the others"
        hint = f"; to leave a class out, {without}" if kinds["not listed"] else ""
        raise UserError(f"classes: {'; '.join(wrong)}{hint}")
    # A list of names is an order of text labels; other text is sorted, and numbers are their own order.
    order: list[str | int] = [*range(len(names))]
    if texts:
        order = list(names) if isinstance(given, tuple) else [*texts]
    elif absent := [label for label in order if label not in names]:
        raise UserError(f"no image has label {absent[0]}: labels are 0 to C - 1 without a gap")
    classnames = tuple(names[label] for label in order)
    if texts and (repeated := _repeated(classnames)):
        merge = "give them one label in the table" if description.table else "put their images into folders of one name"
        raise UserError(f"classes: two labels are called {first_few(repeated)}: to make them one class, {merge}")
    if reason := next(unfit_texts(classnames, ()), ""):
        raise UserError(f"{reason}: a name is one line without blanks around it")
    return classnames, {label: number for number, label in enumerate(order)}


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _assign_splits(
    description: Description, items: Sequence[ListedImage], names: Sequence[str], labels: dict[str | int, int]
) -> tuple[dict[str, Images], list[str]]:
    """Assign a split to every image, as the data give it or else by the description, and list problems of classes.

    If classes are too small for the rule, all images are in the split "".
    """
    images = {
        split: [(item.path, labels[item.label]) for item in items if item.split == split] for split in ("", *SPLITS)
    }
    unassigned, rule = images.pop(""), description.split
    if len(unassigned) < len(items):
        if unassigned:
            raise UserError(f"table: {unassigned[0][0]!r} has no split, and others have one")
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
    found = {split: rows for split, rows in images.items() if rows}
    present = {split: {label for _, label in rows} for split, rows in found.items() if split != "val"}
    absent = {split: [name for label, name in enumerate(names) if label not in own] for split, own in present.items()}
    problems = []
    for split, missing in absent.items():
        elsewhere = {_normalize(name): name for other, gone in absent.items() if other != split for name in gone}
        for name in missing:
            advice = "add some, or remove the class from all splits"
            if alike := get_close_matches(_normalize(name), elsewhere, 1, 0.8):
                what = "change the label" if description.table else "rename the folder"
                advice = f"if it is another spelling of {elsewhere[alike[0]]!r}, {what}; else {advice}"
            problems.append(f"class {name!r} has no {split} image: {advice}")
    return found, problems


def describe_classes(names: Sequence[str], splits: Mapping[str, Images]) -> list[str]:
    """Describe unequal classes, those of one train or test image, and names that are likely two spellings of one."""
    notes = []
    counts = Counter(names[label] for images in splits.values() for _, label in images)
    if len(counts) == 1:
        notes.append("there is one class: such a set can be evaluated, and nothing can be trained on it")
    least, most = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[least]:
        middle = statistics.median(counts.values())
        extremes = f"{counts[least]:,} ({least!r}) to {counts[most]:,} images ({most!r})"
        notes.append(f"classes are unequal: {extremes}, median {middle:g}")
    for split, images in splits.items():
        sizes = Counter(names[label] for _, label in images)
        if split != "val" and (single := [ascii(name) for name, size in sizes.items() if size == 1]):
            what = f"classes of 1 {split} image".replace("  ", " ")
            notes.append(Finding.make(f"{what}: {len(single):,} (", single, ")"))
    alike: dict[str, list[str]] = {}
    for name in sorted(counts, key=lambda name: counts[name]):
        # Names that are equal but for one letter left out of either have an entry in common.
        for place in range(len(name) + 1):
            if not name[place : place + 1].isdigit():
                alike.setdefault((name[:place] + name[place + 1 :]).casefold(), []).append(name)
    pairs = dict.fromkeys(pair for group in alike.values() for pair in combinations(dict.fromkeys(group), 2))
    for one, other in pairs:
        if _normalize(one) == _normalize(other):
            notes.append(f"classes {one!r} and {other!r} differ in case, blanks or dashes alone")
        elif _is_slip(one, other):
            what = f"warning: class {one!r} ({counts[one]:,}) may be a misspelling of"
            notes.append(f"{what} {other!r} ({counts[other]:,} images): if so, move the images into one folder")
    return notes


def _is_slip(one: str, other: str) -> bool:
    """Whether one word of five letters or more has a letter that is moved, missing, extra or, from eight on, another.

    Names that differ in the first letter, in digits or in a plural s are often names of two classes.
    """
    words = (re.split(r"[\W_]+", name.casefold()) for name in (one, other))
    differing = [sorted(pair, key=len) for pair in zip_longest(*words, fillvalue="") if pair[0] != pair[1]]
    short, long = differing[0] if len(differing) == 1 else ("", "")
    least = 8 if len(short) == len(long) and sorted(short) != sorted(long) else 5
    return len(short) >= least and (short + long).isalpha() and short[0] == long[0] and long != f"{short}s"


def compare_table(root: Path, items: Sequence[ListedImage]) -> list[str]:
    """Describe the images that a table leaves out of its folders, and labels that differ from the folders' names."""
    listed = {item.path for item in items}
    folders = dict.fromkeys(item.path.rpartition("/")[0] for item in items)
    beside = [
        path
        for folder in folders
        for name, kind in list_folder(root / folder).items()
        if kind == "file" and is_image_name(name) and (path := f"{folder}/{name}".lstrip("/")) not in listed
    ]
    what = f"left out: {len(beside):,} images that the table does not list ("
    notes: list[str] = [Finding.make(what, [*map(ascii, beside)], ")")] if beside else []
    differing = [
        item
        for item in items
        if _normalize(str(item.label)) != _normalize(item.path.rpartition("/")[0].rpartition("/")[2])
    ]
    if differing and len(differing) <= (1 - AGREEMENT) * len(items):
        named = [ascii(f"{item.path} is {item.label}") for item in differing]
        number = "1 label differs" if len(differing) == 1 else f"{len(differing):,} labels differ"
        notes.append(Finding.make(f"{number} from the folder of the image: ", named))
    return notes


def _normalize(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())
