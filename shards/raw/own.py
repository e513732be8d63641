"""Read data sets of a user: class folders, a table or shards, described by a short YAML file.

Labels: numbers are taken as given, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths in
the YAML file are relative to it. Images are packed in the order of the table, or of folders by label and name. Names on
the disk and in tables are untrusted; paths must stay inside the folder of the images, and links are followed.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shards.errors import DataError
from shards.manifest import unfit_texts
from shards.raw.description import Description, SplitRule, read_description
from shards.raw.folders import (
    FolderPart,
    Listing,
    Rows,
    entries,
    file_sizes,
    files_exist,
    image_names,
    is_folder,
    unsafe_path,
)
from shards.records import Source

SPLITS = ("train", "val", "test")
NAMED = 3
COLUMNS = {"path", "label", "split"}
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Item:
    """One image: its path, its label as the data give it (text or number), and split and class name if given."""

    path: str
    label: str | int
    split: str = ""
    classname: str = ""


def scan_folders(root: Path) -> list[Item]:
    """List the images of class folders, or of class folders in train, val and test, sorted by code point.

    The second is assumed if a folder called train, val or test contains folders, so a class can be called "train".
    Hidden entries and files beside the class folders are ignored. Raises DataError for a class folder that is empty or
    contains anything but images.
    """
    if not root.is_dir():
        raise DataError(
            f"folder: {root} is {'a file' if root.exists() else 'not there'}; name the folder of the images"
        )
    folders = [entry.name for entry in entries(root) if is_folder(entry)]
    if not folders:
        raise DataError(f"folder: {root} holds no class folders: it needs one folder of images per class")
    if any(is_folder(entry) for name in folders if name in SPLITS for entry in entries(root / name)):
        others = [name for name in folders if name not in SPLITS]
        if others:
            raise DataError(
                f"folder: {root} holds {', '.join(name for name in folders if name in SPLITS)} with classes inside and "
                f"also {first_few(others)}: parts are called train, val and test, and nothing may lie beside them"
            )
        parts = {split: f"{split}/" for split in SPLITS if split in folders}
    else:
        parts = {"": ""}
    return [item for split, prefix in parts.items() for item in _scan_split(root, split, prefix)]


def _scan_split(root: Path, split: str, prefix: str) -> Iterator[Item]:
    for entry in entries(root / prefix):
        if not is_folder(entry):
            continue
        folder = f"{prefix}{entry.name}"
        names, others = image_names(root / folder)
        if others:
            what = f"folder: {root / folder} holds {first_few(others)}"
            raise DataError(f"{what}, no image of a known kind: move it away")
        if not names:
            raise DataError(f"folder: {root / folder} holds no image: remove the folder, or add its images")
        for name in names:
            yield Item(f"{folder}/{name}", entry.name, split)


def read_table(file: Path) -> list[Item]:
    """Read the rows of a table in order: CSV with a header, or JSON of rows or of CoOp's train, val and test lists.

    Raises DataError naming the row for anything that is no path and label (and split).
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"table: {file} cannot be read ({reason})") from None
    kinds = {".csv": _csv_rows, ".json": _json_rows}
    if file.suffix.lower() not in kinds:
        raise DataError(f"table: {file} is neither .csv nor .json")
    items = list(kinds[file.suffix.lower()](file, text))
    if not items:
        raise DataError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    twice = [path for path, count in Counter(item.path for item in items).items() if count > 1]
    if twice:
        raise DataError(f"table: {file} lists {first_few(twice)} more than once: list each image once")
    return items


def _csv_rows(file: Path, text: str) -> Iterator[Item]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
        if not {"path", "label"} <= set(header) <= COLUMNS or len(set(header)) != len(header):
            raise DataError(
                f"table: {file} begins with {','.join(header)!r:.80}, not with path,label or path,label,split"
            )
        reader.fieldnames = header
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"table: {file}, line {reader.line_num}: {error}") from None
    numbers = all(NUMBER.fullmatch(row["label"] or "") for row in rows)
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise DataError(f"table: {file}, row {line} has not {len(header)} columns")
        label = int(row["label"]) if numbers else row["label"]
        yield _item(f"{file}, row {line}", row["path"], label, row.get("split"))


def _json_rows(file: Path, text: str) -> Iterator[Item]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"table: {file} is no JSON ({' '.join(str(error).split())})") from None
    if isinstance(document, dict):
        yield from _coop_rows(file, document)
        return
    if not isinstance(document, list):
        raise DataError(f"table: {file} is neither a list of rows nor CoOp's lists of train, val and test")
    for number, row in enumerate(document, 1):
        where = f"{file}, entry {number}"
        if isinstance(row, dict):
            if not {"path", "label"} <= set(row) <= COLUMNS:
                keys = first_few(sorted(map(str, row)))
                raise DataError(f"table: {where} has {keys}, not path, label and maybe split")
            row = [row["path"], row["label"], *([row["split"]] if "split" in row else [])]
        if not isinstance(row, list) or len(row) not in (2, 3):
            raise DataError(f"table: {where} is not [path, label] or [path, label, split]")
        yield _item(where, *row)


def _coop_rows(file: Path, document: dict[str, object]) -> Iterator[Item]:
    if not document or not set(document) <= set(SPLITS):
        raise DataError(
            f"table: {file} holds {first_few(sorted(document)) or 'nothing'}, not lists of train, val and test"
        )
    for split in SPLITS:
        rows = document.get(split, [])
        if not isinstance(rows, list):
            raise DataError(f"table: {file}, {split} is no list")
        for number, row in enumerate(rows, 1):
            where = f"{file}, {split} entry {number}"
            if not isinstance(row, list) or len(row) != 3 or type(row[1]) is not int or not isinstance(row[2], str):
                raise DataError(f"table: {where} is not [path, number of the class, name of the class]")
            yield _item(where, row[0], row[1], split, row[2])


def _item(where: str, path: object, label: object, split: object = None, classname: str = "") -> Item:
    if not isinstance(path, str) or unsafe_path(path):
        reason = unsafe_path(path) if isinstance(path, str) else "is no text"
        raise DataError(f"table: {where}: path {path!r:.100} {reason}")
    if isinstance(label, bool) or not isinstance(label, int | str) or (isinstance(label, int) and label < 0):
        raise DataError(f"table: {where}: label {label!r:.60} is neither text nor a number of 0 or more")
    if label == "":
        raise DataError(f"table: {where} has no label")
    if split is not None and split not in SPLITS:
        raise DataError(f"table: {where}: split {split!r:.60} is none of train, val and test")
    return Item(path, label, "" if split is None else str(split), classname)


def first_few(names: Sequence[str]) -> str:
    """Format the first of many names, and how many more there are."""
    return ", ".join(map(repr, names[:NAMED])) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def own_source(file: Path, cache: Path | None = None) -> Source:
    """Make a source for packing of the data set that a YAML file describes.

    cache: where shards from a URL are kept until they are packed; beside the file by default. Raises DataError, on one
    line that names the file, for a mistake in it and for images that do not match it.
    """
    description = read_description(file)
    try:
        if description.shards is not None:
            return _shards(file, description, cache or file.parent)
        return _images(file, description)
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(str(file)) else f"{file}: {message}") from None


def _images(file: Path, description: Description) -> Source:
    if description.table is not None:
        root, kind = _beside(file, description.images or "."), "table"
        items = read_table(_beside(file, description.table))
        _refuse_missing(root, items)
    else:
        root, kind = _beside(file, description.folder or ""), "folders"
        items = scan_folders(root)
    classes = _classes(description, items)
    if kind == "folders":
        items.sort(key=lambda item: classes.labels[item.label])
    items = _split(description, items, classes)
    _refuse_empty(items, classes)
    splits = {
        split: Rows([item.path for item in part], [classes.labels[item.label] for item in part])
        for split in SPLITS
        if (part := [item for item in items if item.split == split])
    }
    listing = Listing(root, classes.names, splits, f"own {kind}", scanned=True)
    sizes = list(file_sizes(root, [path for rows in splits.values() for path in rows.paths]))
    return Source(
        name=description.name,
        classnames=classes.names,
        template=description.template,
        templates=description.prompts,
        # A user's data has no version; the sizes detect most images that were replaced under the same name.
        origin=f"{listing.origin}, lists {listing.digest()}, sizes {_digest(sizes)}",
        counts={split: len(rows) for split, rows in splits.items()},
        part=partial(_part, root, splits),
        size=sum(sizes),
    )


def _digest(sizes: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, sizes)).encode()).hexdigest()[:16]


def _part(root: Path, splits: Mapping[str, Rows], split: str, start: int, stop: int) -> FolderPart:
    rows = splits[split]
    return FolderPart(root, tuple(rows.paths[start:stop]), tuple(rows.labels[start:stop]))


def _shards(file: Path, description: Description, cache: Path) -> Source:
    from shards.raw.tars import tar_source
    from shards.urls import is_url, redact

    location = description.shards or ""
    assert not isinstance(description.classes, dict)
    source = tar_source(
        description.name,
        location if is_url(location) else str(_beside(file, location)),
        splits=None if description.splits is None else dict(description.splits.items()),
        classnames=description.classes,
        template=description.template,
        templates=description.prompts,
        origin=f"own shards {redact(location)}",
        cache=cache,
    )
    if "test" not in source.counts:
        raise DataError(f"shards: {location} has no test images; splits: {{test: FOLDER}} says where they are")
    return source


def _beside(file: Path, path: str) -> Path:
    try:
        return file.parent / Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: there is no user of that name; write the whole path") from None


def _refuse_missing(root: Path, items: Sequence[Item]) -> None:
    missing = [
        item.path for item, here in zip(items, files_exist(root, [i.path for i in items]), strict=True) if not here
    ]
    if missing:
        raise DataError(f"table: {len(missing):,} of {len(items):,} images are not in {root}: {first_few(missing)}")


@dataclass(frozen=True)
class _Classes:
    """Class names in label order, and the label of each class key in the data."""

    names: tuple[str, ...]
    labels: Mapping[str | int, int]


def _classes(description: Description, items: Sequence[Item]) -> _Classes:
    raw = list(dict.fromkeys(item.label for item in items))
    texts = {label for label in raw if isinstance(label, str)}
    if texts and len(texts) < len(raw):
        raise DataError(f"labels are text ({first_few(sorted(texts))}) and numbers: they must be all of one kind")
    classes = _named(description.classes, sorted(texts)) if texts else _numbered(description.classes, items)
    for reason in unfit_texts(classes.names, ()):
        raise DataError(f"{reason}: a name is one line without blanks around it")
    return classes


def _named(given: Sequence[str] | Mapping[str | int, str] | None, found: Sequence[str]) -> _Classes:
    """Number the classes of text labels: folder names, or words in a table."""
    order = [str(key) for key in (found if given is None else given)]
    twice = [name for name, count in Counter(order).items() if count > 1]
    if twice:
        raise DataError(f"classes: {first_few(twice)} is there twice")
    for name in found:
        if name not in order:
            near = difflib.get_close_matches(name, order, n=1, cutoff=0.6)
            hint = f"; is it meant by {near[0]!r}?" if near else ""
            raise DataError(f"classes: {name!r} has images and is not there{hint}")
    empty = [name for name in order if name not in found]
    if empty:
        raise DataError(f"classes: {first_few(empty)} has no images")
    if isinstance(given, Mapping):
        named = {str(key): name for key, name in given.items()}
        order = sorted(order)
        names = tuple(named[key] for key in order)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise DataError(f"classes: two labels are called {first_few(twice)}: nothing could tell them apart")
        return _Classes(names, {key: label for label, key in enumerate(order)})
    return _Classes(tuple(order), {name: label for label, name in enumerate(order)})


def _numbered(given: Sequence[str] | Mapping[str | int, str] | None, items: Sequence[Item]) -> _Classes:
    """Name the classes of numeric labels, which must be 0..C-1; names come from the description or CoOp's lists."""
    found = {int(item.label) for item in items}
    names: dict[int, str] = {}
    if given is None:
        for item in items:
            label = int(item.label)
            if not item.classname:
                raise DataError(f"labels are numbers (0 to {max(found)}) without names: list them under classes")
            if names.setdefault(label, item.classname) != item.classname:
                raise DataError(f"table: label {label} is called {names[label]!r} and {item.classname!r}")
    elif isinstance(given, Mapping):
        wrong = [key for key in given if not isinstance(key, int)]
        if wrong:
            raise DataError(f"classes: labels are numbers, and {wrong[0]!r} is none")
        names = {int(key): name for key, name in given.items()}
    else:
        names = dict(enumerate(given))
    unnamed = sorted(found - set(names))
    if unnamed:
        raise DataError(f"classes: label {unnamed[0]} has images and no name ({len(names)} names are there)")
    count = len(names)
    absent = next((label for label in range(count) if label not in found), None)
    if absent is not None:
        called = f" ({names[absent]!r})" if absent in names else ""
        raise DataError(f"no image has label {absent}{called}: labels are 0 to C - 1 without a gap")
    return _Classes(tuple(names[label] for label in range(count)), {label: label for label in range(count)})


def _split(description: Description, items: list[Item], classes: _Classes) -> list[Item]:
    """Assign a split to every item, as the data give it or else by the description."""
    splits = {item.split for item in items}
    if splits == {""}:
        if description.split is None:
            raise DataError(
                "the data do not say what is for training: add split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}, "
                "or split: test where all images are for testing"
            )
        if description.split == "test":
            return [replace(item, split="test") for item in items]
        assert isinstance(description.split, SplitRule)
        return list(_drawn(description.split, items, classes))
    if "" in splits:
        unassigned = next(item.path for item in items if not item.split)
        raise DataError(f"table: {unassigned!r} has no split, and others have one")
    if description.split is not None:
        raise DataError(
            f"split: the data say it themselves ({', '.join(s for s in SPLITS if s in splits)}): leave it out"
        )
    return items


def _drawn(rule: SplitRule, items: Sequence[Item], classes: _Classes) -> Iterator[Item]:
    """Draw the splits: per class, in label order, sort names, shuffle and cut, with one random stream for all."""
    draw = random.Random(rule.seed)
    by_class: dict[int, list[Item]] = {label: [] for label in range(len(classes.names))}
    for item in items:
        by_class[classes.labels[item.label]].append(item)
    for label, part in by_class.items():
        part.sort(key=lambda item: item.path)
        draw.shuffle(part)
        train = round(rule.train * len(part))
        val = train + (round(rule.val * len(part)) if rule.val else 0)
        parts = {"train": part[:train], "val": part[train:val], "test": part[val:]}
        empty = [split for split in SPLITS if not parts[split] and (split != "val" or rule.val)]
        if empty:
            few = f"class {classes.names[label]!r} has {len(part)} image{'s' * (len(part) > 1)}"
            raise DataError(f"split: {few}, too few for {' and '.join(empty)}: add images, or change the fractions")
        for split, chosen in parts.items():
            yield from (replace(item, split=split) for item in chosen)


def _refuse_empty(items: Sequence[Item], classes: _Classes) -> None:
    """Refuse classes without test images, or without train images if there are train images."""
    there = {split: {item.label for item in items if item.split == split} for split in SPLITS}
    if not there["test"]:
        raise DataError("there are no test images: nothing could be evaluated")
    if there["val"] and not there["train"]:
        raise DataError("there are val images and no train images")
    for split in ("train", "test"):
        for key, label in classes.labels.items():
            if there[split] and key not in there[split]:
                raise DataError(f"class {classes.names[label]!r} has no {split} image")
