"""Images of a data set of one's own as its folders or its table list them, before labels become numbers.

Names on the disk and in tables are untrusted; paths must stay inside the folder of the images, and links are followed.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.errors import DataError
from shards.raw.folders import entries, image_names, is_folder, unsafe_path

SPLITS = ("train", "val", "test")
NAMED = 3
COLUMNS = {"path", "label", "split"}
NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Item:
    """One image: where it is, its label as the data say it (text, or a number), and what else they say."""

    path: str
    label: str | int
    split: str = ""
    classname: str = ""


def scan_folders(root: Path) -> list[Item]:
    """The images of class folders, or of class folders in train, val and test, sorted by code point.

    It is the second when one of those three holds folders itself, so that a class can be called "train". Hidden entries
    and files beside the class folders are no images; anything else in a class folder is refused, and so is a class
    folder without an image.
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
    return [item for split, prefix in parts.items() for item in _classes(root, split, prefix)]


def _classes(root: Path, split: str, prefix: str) -> Iterator[Item]:
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
    """The rows of a table, in their order: CSV with a header, or JSON of rows or of CoOp's train, val and test lists.

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
    # An image in two splits, or of two classes, would be trained and tested on.
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
    """The first of many names, and how many more there are."""
    return ", ".join(map(repr, names[:NAMED])) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
