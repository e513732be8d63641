"""Read tables of images: CSV or TSV with a header, or a JSON list of objects, with path, label and perhaps split."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.names import first_few, join_first
from shards.raw.class_folders import ListedImage

TABLES = (".csv", ".tsv", ".json")
"""Endings of tables of images."""

COLUMNS = {"filename": "path", "file_name": "path", "file": "path", "image": "path", "class": "label"}
"""Different names of columns."""


def read_table(file: Path) -> list[ListedImage]:
    """Read the rows of a table in order. Raises UserError naming the line or image that is wrong."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
        rows = json.loads(text) if file.suffix.lower() == ".json" else _parse_lines(text)
        # A header is line 1 of its file.
        named = {f"line {number}": row for number, row in enumerate(map(_rename_columns, rows), 2)}
        images = [*TypeAdapter(dict[str, ListedImage]).validate_python(named).values()]
    except ValidationError as error:
        columns = join_first([*map(ascii, rows[0] if isinstance(rows[0], dict) else [])], 8)
        hint = "path (or filename), label (or class) and perhaps split are needed"
        raise UserError(f"table: {file}: {describe_invalid(error, 'the table')}; columns: {columns}; {hint}") from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read: {reason}") from None
    if not images:
        raise UserError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := [path for path, count in Counter(image.path for image in images).items() if count > 1]:
        raise UserError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return images


def read_columns(line: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV or TSV file and its columns, from its first line."""
    # Excel separates by semicolons where the comma is the decimal separator.
    delimiter = max(",;\t", key=line.count)
    names = [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
    return delimiter, [COLUMNS.get(name, name) for name in names]


def _parse_lines(text: str) -> list[dict[str, Any]]:
    """Parse a CSV or TSV file. Labels become numbers if all are."""
    stream = io.StringIO(text, newline="")
    delimiter, columns = read_columns(stream.readline())
    # Cells behind the last column become the field `more`, which `ListedImage` refuses.
    rows = [*csv.DictReader(stream, columns, "more", delimiter=delimiter, skipinitialspace=True, strict=True)]
    labels = [str(row.get("label")) for row in rows]
    # Longer numbers are identifiers, which stay text.
    if all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels):
        return [{**row, "label": int(row["label"])} for row in rows]
    return rows


def _rename_columns(row: Any) -> Any:
    return {COLUMNS.get(name, name): value for name, value in row.items()} if isinstance(row, dict) else row
