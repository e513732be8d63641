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
from shards.files import read_file
from shards.names import first_few, join_first
from shards.raw.class_folders import ListedImage

TABLES = (".csv", ".tsv", ".json")
"""Endings of tables of images."""


def read_table(file: Path) -> list[ListedImage]:
    """Read the rows of a table in order. Raises UserError naming the line or image that is wrong."""
    try:
        text = read_file(file).decode("utf-8-sig")
        if file.suffix.lower() == ".json":
            images = TypeAdapter(list[ListedImage]).validate_python(json.loads(text))
        elif file.suffix.lower() in TABLES:
            images = [*TypeAdapter(dict[str, ListedImage]).validate_python(_parse_lines(text, file)).values()]
        else:
            raise ValueError(f"it is none of {', '.join(TABLES)}")
    except ValidationError as error:
        raise UserError(f"table: {file}: {describe_invalid(error, 'the table')}") from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read: {reason}") from None
    if not images:
        raise UserError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := [path for path, count in Counter(image.path for image in images).items() if count > 1]:
        raise UserError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return images


def _parse_lines(text: str, file: Path) -> dict[str, dict[str, Any]]:
    """Parse a CSV or TSV file; returns its rows by the name of their line. Labels become numbers if all are."""
    stream = io.StringIO(text, newline="")
    delimiter, columns = parse_header(stream.readline())
    if sorted(columns) not in (["label", "path"], ["label", "path", "split"]):
        names = join_first([*map(ascii, columns)], 8) or "-"
        raise UserError(f"table: {file} has the columns {names}; path, label and perhaps split are needed")
    reader = csv.DictReader(stream, columns, restkey="more", delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: dict[str, dict[str, Any]] = {f"line {reader.line_num + 1}": row for row in reader}
    labels = [str(row.get("label")) for row in rows.values()]
    if all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels):
        return {line: {**row, "label": int(row["label"])} for line, row in rows.items()}
    return rows


def parse_header(line: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV or TSV file and its columns in small letters, from its first line."""
    delimiter = max(",;\t", key=line.count)
    return delimiter, [name.strip().lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
