"""Read tables of images: CSV or TSV with a header, with the columns path, label and perhaps split."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.names import first_few
from shards.raw.class_folders import ListedImage


def read_table(file: Path) -> list[ListedImage]:
    """Read the rows of a table in order. Raises UserError naming the line or image that is wrong."""
    try:
        rows = _parse_lines(file.read_bytes().decode("utf-8-sig"))
        # A header is line 1 of its file.
        named = {f"line {number}": row for number, row in enumerate(rows, 2)}
        images = [*TypeAdapter(dict[str, ListedImage]).validate_python(named).values()]
    except ValidationError as error:
        hint = "the columns path, label and perhaps split are needed"
        raise UserError(f"table: {file}: {describe_invalid(error, 'the table')}; {hint}") from None
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"table: {file} cannot be read: {reason}") from None
    if not images:
        raise UserError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := [path for path, count in Counter(image.path for image in images).items() if count > 1]:
        raise UserError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return images


def _parse_lines(text: str) -> list[dict[str, Any]]:
    """Parse a CSV or TSV file. Labels become numbers if all are."""
    stream = io.StringIO(text, newline="")
    header = stream.readline()
    delimiter = max(",;\t", key=header.count)
    columns = [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter), [])]
    rows = [*csv.DictReader(stream, columns, "more", delimiter=delimiter, skipinitialspace=True, strict=True)]
    labels = [str(row.get("label")) for row in rows]
    if all(label.isascii() and label.isdecimal() and len(label) < 10 for label in labels):
        return [{**row, "label": int(row["label"])} for row in rows]
    return rows
