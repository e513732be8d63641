"""Read tables of images: CSV, TSV, a JSON list, or an object per line, with files, labels and perhaps splits.

Columns are recognised by name or by what lies in the folder of the images, as tables of the Hub and of Kaggle differ.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.files import read_regular
from shards.names import first_few, join_first
from shards.raw.class_folders import ListedImage
from shards.raw.folders import IMAGE_EXTENSIONS, is_image_name

TABLES = (".csv", ".tsv", ".jsonl")
"""Endings of files in a folder of images that may be a table of them."""
PATHS = ("path", "filename", "file_name", "file", "image", "filepath", "file_path", "image_path", "image_id", "id")
LABELS = ("label", "class", "class_name", "label_name", "labels", "category", "species", "breed", "target")
"""Names of columns, in lower case, in the order in which they are looked for."""
NEEDED = "path (or filename), label (or class) and perhaps split are needed"
ZERO, ONE = ("0", "0.0"), ("1", "1.0")
PREDICTIONS = {"path", "class", "label", "probability"}
"""Columns of what `procap predict` writes, which labels nothing."""


class Table:
    """The rows of a table, the number of the first, and which columns have files (`path`), labels and splits.

    located: the first rows have images in `root`. labels: one column, or several if there is one for each class.
    """

    def __init__(self, lines: Sequence[Any], root: Path) -> None:
        self.rows, self.first_line = _name_cells(lines, root)
        self.columns = list(dict.fromkeys(name for row in self.rows[:100] for name in row if name is not None))
        self._names = {name.lower(): name for name in reversed(self.columns)}
        paths = self._known(PATHS)
        located = [
            name
            for name in dict.fromkeys((*paths, *self.columns))
            if any(find_image(root, row.get(name)) for row in self.rows[:20])
        ]
        self.located, self.path = bool(located), (*located, *paths, "")[0]
        self.split = self._names.get("split", "")
        # Programs write row numbers into a column without a name.
        self.labels = self._find_labels([name for name in self.columns if name not in ("", self.path, self.split)])

    @property
    def is_unclear(self) -> bool:
        """Whether the table is about images, and columns for files and labels are not recognised."""
        return (self.located or bool(self._known(LABELS))) and not (self.located and self.labels)

    @property
    def is_prediction(self) -> bool:
        return self._names.keys() >= PREDICTIONS

    def label(self, row: Mapping[Any, Any]) -> Any:
        if len(self.labels) == 1:
            return row.get(self.labels[0])
        return next(name for name in self.labels if str(row.get(name)) in ONE)

    def _known(self, names: Iterable[str]) -> list[str]:
        return [self._names[name] for name in names if name in self._names]

    def _find_labels(self, others: list[str]) -> list[str]:
        if named := [name for name in self._known(LABELS) if name in others]:
            # A different column may have the names of numbers.
            return [next((name for name in named if not _is_number(self.rows[0].get(name))), named[0])]
        if len(others) < 2:
            return others
        cells = [[str(row.get(name)) for name in others] for row in self.rows]
        is_one_hot = all({*row} <= {*ZERO, *ONE} and sum(cell in ONE for cell in row) == 1 for row in cells)
        return others if is_one_hot else []


def read_table(file: Path, root: Path) -> list[ListedImage]:
    """Read the rows of a table of images in `root`, in order. Raises UserError naming the line that is wrong."""
    table = Table(read_lines(file), root)
    if not table.rows:
        raise UserError(f"table: {file} lists no images")
    if not table.path or not table.labels:
        raise UserError(f"table: {file}: {describe_columns(table)}")
    numbered = all(_is_number(table.label(row)) for row in table.rows)
    listed = {}
    for number, row in enumerate(table.rows, table.first_line):
        label, path = table.label(row), row.get(table.path)
        # pandas writes whole numbers of a column with gaps as 0.0, 1.0.
        fields = {"path": find_image(root, path) or path, "label": int(float(label)) if numbered else label}
        fields |= {"split": row[table.split]} if table.split and table.split in row else {}
        # Cells behind the last column become the field `more`, which `ListedImage` refuses.
        listed[f"line {number}"] = fields | ({"more": row[None]} if row.get(None) else {})
    try:
        images = [*TypeAdapter(dict[str, ListedImage]).validate_python(listed).values()]
    except ValidationError as error:
        reason = describe_invalid(error, "the table")
        raise UserError(f"table: {file}: {reason}; {describe_columns(table)}") from None
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := [path for path, count in Counter(image.path for image in images).items() if count > 1]:
        raise UserError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return images


def describe_columns(table: Table) -> str:
    """Describe the columns of a table, and those that it needs."""
    return f"columns: {join_first([*map(ascii, table.columns)], 8)}; {NEEDED}"


def read_lines(file: Path) -> list[Any]:
    """Read the lines of a CSV or TSV file as lists of cells, the objects of a JSON file. Raises UserError."""
    try:
        data = read_regular(file)
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if wide else "utf-8-sig")
        if file.suffix.lower() not in (".json", ".jsonl"):
            # Excel separates by semicolons where the comma is the decimal separator.
            delimiter = max(",;\t", key=text.partition("\n")[0].count)
            cells = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
            return [row for row in cells if row]
        is_list = file.suffix.lower() == ".json"
        rows = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is no list of objects")
        return rows
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read: {reason}") from None


def find_image(root: Path, cell: object) -> str:
    """Find the image of a cell: its path in `root`, perhaps without ending, or behind the folders that lead to `root`.

    Returns its path relative to `root`; "" if there is none.
    """
    parts = PurePosixPath(str(cell).strip().replace("\\", "/")).parts if isinstance(cell, str | int) else ()
    if not parts or ".." in parts:
        return ""
    is_absolute = bool(re.fullmatch("/|[A-Za-z]:", parts[0]))
    ends = root.resolve().parts
    for start in range(is_absolute, len(parts)):
        if start and not is_absolute and parts[:start] != ends[-start:]:
            continue
        path = "/".join(parts[start:])
        endings = [""] if is_image_name(path) else ["", *(f".{ending}" for ending in sorted(IMAGE_EXTENSIONS))]
        for ending in (*endings, *map(str.upper, endings[1:])):
            if os.path.isfile(f"{root}/{path}{ending}"):
                return f"{path}{ending}"
    return ""


def _name_cells(lines: Sequence[Any], root: Path) -> tuple[list[dict[Any, Any]], int]:
    """Return rows by the names of their columns, with cells behind these under None, and the number of the first."""
    if not lines or isinstance(lines[0], dict):
        return [*lines], 1
    header, rows, first = [name.strip() for name in lines[0]], lines[1:], 2
    # An image in the first line: there is no header, and the columns have the usual order.
    if not {name.lower() for name in header} & {*PATHS, *LABELS} and any(find_image(root, cell) for cell in header):
        header, rows, first = ["path", "label", "split"][: len(lines[0])], lines, 1
    return [{**dict(zip(header, row, strict=False)), None: row[len(header) :]} for row in rows], first


def _is_number(label: object) -> bool:
    """Whether a label is a whole number; longer ones are identifiers, which stay text."""
    return not isinstance(label, bool) and re.fullmatch(r"\d{1,9}(\.0+)?", str(label).strip(), re.ASCII) is not None
