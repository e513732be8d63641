"""Read tables of images: CSV, TSV, a JSON list, or JSON lines, with columns for files, labels and perhaps splits.

Columns are recognised by their names, or by what lies in the folder: tables of the Hub and of Kaggle differ.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.files import read_regular
from shards.names import first_few, join_first
from shards.raw.class_folders import SPLIT_WORDS, ListedImage, list_class_folders
from shards.raw.folders import IMAGE_EXTENSIONS, is_image_name

PATHS = ("path", "filename", "file_name", "file", "image", "filepath", "file_path", "image_path", "image_id", "id")
LABELS = ("label", "class", "class_name", "label_name", "labels", "category", "species", "breed", "target", "diagnosis")
"""Names of columns, in the order in which they are looked for."""
PREDICTIONS = {"path", "class", "label", "probability"}
"""Columns of what `procap predict` writes: it labels no data set."""
ZERO, ONE = {"0", "0.0"}, {"1", "1.0"}
WORD_ENDS = "[/ _.-]"
IMAGES = {"image", "images", "img", "imgs"}
SPLIT_NAMES = {"split", "subset", "partition", "fold"}
FLAG = re.compile(rf"is[_ ]?({'|'.join(SPLIT_WORDS)})([_ ].*)?")
"""Names, in lower case, of columns that say of each image whether it belongs to one split."""
FLAG_CELLS = {**dict.fromkeys(ZERO | {"false"}, False), **dict.fromkeys(ONE | {"true"}, True)}


class Table:
    """The rows of a table with the name of its column of files, and the labels and splits of the rows.

    splits: empty if no column is read as theirs; `unread_splits` are those that may be.
    is_located: images in `root` have the names of the first rows. is_unclear: it is about images, and not understood.
    """

    def __init__(self, lines: Sequence[Any], root: Path) -> None:
        self.rows, self.first_line = _name_cells(lines, root)
        # Programs write row numbers into a column without a name.
        self.columns = [*dict.fromkeys(name for row in self.rows[:100] for name in row if name)]
        names = {name.lower(): name for name in self.columns}
        paths, labels = ([names[name] for name in usual if name in names] for usual in (PATHS, LABELS))
        head = self.rows[:20]
        located = [name for name in (*paths, *self.columns) if any(find_image(root, row.get(name)) for row in head)]
        self.path = (*located, *paths, "")[0]
        others = [name for name in self.columns if name not in (self.path, *labels)] if labels else []
        split, self.splits = self._read_splits(names.get("split"), others)
        self.unread_splits = [name for name in (self.path, *others) if self._may_be_split(name)] if not split else []
        others = [name for name in self.columns if name not in (self.path, split)]
        labels = [name for name in labels if name in others]
        if labels and _is_number(head[0].get(labels[0])):
            # Names stand for their numbers; a column of groups, such as the species of breeds, names no class.
            labels = [next((name for name in labels[1:] if self._are_names(name, labels[0])), labels[0])]
        self.labels = self._read_labels(labels[:1] or others)
        is_prediction = names.keys() >= PREDICTIONS
        self.is_located, self.is_labelled = bool(located), bool(located and self.labels) and not is_prediction
        # A list of the names of class folders is no table of images.
        names_files = bool(paths and labels) and not all(os.path.isdir(root / str(row.get(self.path))) for row in head)
        self.is_unclear = (bool(located) or names_files) and not self.is_labelled and not is_prediction

    def _read_splits(self, named: str | None, others: list[str]) -> tuple[str, list[Any]]:
        """Return the column of splits, "" if there is none, and its cells as names of splits.

        Next to labels, words such as train and test are a split, whatever the column is called, and is_train is one.
        """
        if column := named or next(filter(self._has_splits, others), ""):
            return column, [row.get(column, "") for row in self.rows]
        # One says all, of several none.
        flags = {name: match[1] for name in others if (match := FLAG.fullmatch(name.lower()))}
        column, split = next(iter(flags.items()), ("", ""))
        if len(flags) != 1 or {*map(FLAG_CELLS.get, self._cells(column))} != {True, False}:
            return "", []
        rest = "test" if SPLIT_WORDS[split] == "train" else "train"
        return column, [split if FLAG_CELLS[_plain(row[column])] else rest for row in self.rows]

    def _cells(self, column: str) -> set[str]:
        return {_plain(row.get(column)) for row in self.rows}

    def _has_splits(self, column: str) -> bool:
        """Whether a column has names of splits alone, those of train and of another among them."""
        splits = {SPLIT_WORDS.get(cell, "") for cell in self._cells(column)}
        return "train" in splits and len(splits) > 1 and "" not in splits

    def _may_be_split(self, column: str) -> bool:
        """Whether a column, by its name or its cells, or the folders of the files may say the split of the images."""
        if column == self.path:
            return {cell.partition("/")[0] for cell in self._cells(column)} <= SPLIT_WORDS.keys()
        return may_name_split(column) or bool(self._cells(column) & SPLIT_WORDS.keys())

    def _are_names(self, column: str, numbers: str) -> bool:
        """Whether a column has text, another one for each number of the column `numbers`."""
        pairs = {(str(row.get(column)), str(row.get(numbers))) for row in self.rows}
        names, others = ({*texts} for texts in zip(*pairs, strict=True))
        return len(names) == len(others) == len(pairs) and not any(map(_is_number, names))

    def _read_labels(self, columns: list[str]) -> list[Any]:
        """Read the labels of one column, or of one column per class; returns none for different columns."""
        if len(columns) == 1:
            return [row.get(columns[0]) for row in self.rows]
        cells = [{name: str(row.get(name)) for name in columns} for row in self.rows]
        chosen = [[name for name in columns if row[name] in ONE] for row in cells]
        is_one_hot = all({*row.values()} <= ZERO | ONE for row in cells) and all(len(names) == 1 for names in chosen)
        return [name for (name,) in chosen] if is_one_hot else []

    def __str__(self) -> str:
        if self.labels and self.path and not self.is_located:
            paths = first_few([str(row.get(self.path)) for row in self.rows])
            return f"its images are not there, or in several folders: {paths}"
        needed = "path (or filename), label (or class) and perhaps split are needed"
        return f"columns: {join_first([*map(ascii, self.columns)], 8)}; {needed}"


def read_tables(files: Mapping[str, Path], root: Path) -> list[ListedImage]:
    """Read one table of images in `root`, by the empty name, or the table of each split, in order.

    Raises UserError naming the line that is wrong.
    """
    images = list[ListedImage]()
    for split, file in files.items():
        if not split:
            images = _read_table(file, root)
            continue
        base = find_base(read_lines(file), root, split)
        for image in _read_table(file, root / base):
            changes = {"path": posixpath.join(base, image.path), "split": image.split or split}
            images.append(image.model_copy(update=changes))
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := [path for path, count in Counter(image.path for image in images).items() if count > 1]:
        listing = " and ".join(map(str, files.values()))
        raise UserError(f"table: {listing} lists {first_few(repeated)} more than once: list each image once")
    # As of folders: without test, the images of val are the test images.
    if any(image.split == "test" for image in images):
        return images
    return [image.model_copy(update={"split": "test"}) if image.split == "val" else image for image in images]


def find_base(lines: Sequence[Any], root: Path, split: str) -> str:
    """Find the folder below `root`, at most two levels deep, that the files of a table of `split` are relative to.

    Those called like the split or like images come before others; "" also if several of equal names and depth fit.
    """
    below = list_class_folders(root)
    below += [posixpath.join(path, sub) for path in below for sub in list_class_folders(root / path)]

    def rank(path: str) -> tuple[bool, int, bool]:
        return split_of(path) != split, len(Path(path).parts), IMAGES.isdisjoint(re.split(WORD_ENDS, path.lower()))

    for _, paths in groupby(sorted(["", *below], key=rank), key=rank):
        if located := [path for path in paths if Table(lines[:20], root / path).is_located]:
            return located[0] if len(located) == 1 else ""
    return ""


def split_of(name: str) -> str:
    """Return the split that the name of a table or folder tells, as train.csv does; "" for none and for several."""
    words = re.split(WORD_ENDS, name.lower())
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else ""


def _read_table(file: Path, root: Path) -> list[ListedImage]:
    table = Table(read_lines(file), root)
    if not table.path or not table.labels:
        raise UserError(f"table: {file}{f': {table}' if table.rows else ' lists no images'}")
    texts = {str(label).strip().partition(".")[0] for label in table.labels}
    # 7 and 007 are two names.
    is_numbered = all(map(_is_number, table.labels)) and len({*map(int, texts)}) == len(texts)
    listed = dict[str, dict[str, Any]]()
    for number, (row, label) in enumerate(zip(table.rows, table.labels, strict=True), table.first_line):
        path = row.get(table.path)
        # pandas writes whole numbers of a column with gaps as 0.0, 1.0.
        fields = {"path": find_image(root, path) or path, "label": int(float(label)) if is_numbered else label}
        fields |= {"split": table.splits[len(listed)]} if table.splits else {}
        # Cells behind the last column become the field `more`, which `ListedImage` refuses.
        listed[f"line {number}"] = fields | ({"more": row[None]} if row.get(None) else {})
    try:
        return [*TypeAdapter(dict[str, ListedImage]).validate_python(listed).values()]
    except ValidationError as error:
        raise UserError(f"table: {file}: {describe_invalid(error, 'the table')}; {table}") from None


def read_lines(file: Path) -> list[Any]:
    """Read the lines of a CSV or TSV file as lists of cells, those of a JSON file as objects. Raises UserError."""
    try:
        data = read_regular(file)
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if wide else "utf-8-sig")
        if file.suffix.lower() not in (".json", ".jsonl"):
            # Excel separates by semicolons where the comma is the decimal separator.
            delimiters = ",;\t " if file.suffix.lower() == ".txt" else ",;\t"
            delimiter = max(delimiters, key=text.partition("\n")[0].count)
            cells = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
            return [row for row in cells if row]
        is_list = file.suffix.lower() == ".json"
        rows = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is no list of objects")
        return rows
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read ({reason}): save it as CSV, in UTF-8") from None


def may_name_split(name: str) -> bool:
    """Whether a column or a file may say the split of images, by its name."""
    return not (SPLIT_NAMES | SPLIT_WORDS.keys()).isdisjoint(re.split(WORD_ENDS, name.lower()))


def find_image(root: Path, cell: object) -> str:
    """Find the image that a cell names: its path in `root`, "" if there is none.

    The ending may be missing, and folders that lead to `root` may stand in front, or any in an absolute path.
    """
    parts = PurePosixPath(str(cell).strip().replace("\\", "/")).parts if isinstance(cell, str | int) else ()
    is_absolute = bool(parts and re.fullmatch("/|[A-Za-z]:", parts[0]))
    ends = root.resolve().parts
    for start in range(is_absolute, 0 if ".." in parts else len(parts)):
        if start and not is_absolute and parts[:start] != ends[-start:]:
            continue
        path = "/".join(parts[start:])
        endings = () if is_image_name(path) else (*sorted(IMAGE_EXTENSIONS), *map(str.upper, sorted(IMAGE_EXTENSIONS)))
        for name in (path, *(f"{path}.{ending}" for ending in endings)):
            if os.path.isfile(root / name):
                return name
    return ""


def _name_cells(lines: Sequence[Any], root: Path) -> tuple[list[dict[Any, Any]], int]:
    """Return rows by the names of their columns, with cells behind these under None, and the number of the first."""
    if not lines or isinstance(lines[0], dict):
        return [*lines], 1
    header, rows, first_line = [name.strip() for name in lines[0]], lines[1:], 2
    # An image in the first line: there is no header, and the columns have the usual order.
    if not {name.lower() for name in header} & {*PATHS, *LABELS} and any(find_image(root, cell) for cell in header):
        header, rows, first_line = ["path", "label", "split"][: len(lines[0])], lines, 1
    return [{**dict(zip(header, row, strict=False)), None: row[len(header) :]} for row in rows], first_line


def _plain(cell: object) -> str:
    return str(cell).strip().lower()


def _is_number(label: object) -> bool:
    """Whether a label is a whole number; longer ones are identifiers, which stay text."""
    return not isinstance(label, bool) and re.fullmatch(r"\d{1,9}(\.0+)?", str(label).strip(), re.ASCII) is not None
