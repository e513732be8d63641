"""Errors about data that a user can act on: one line that says what is wrong, where, and what would work."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class DataError(Exception):
    """Data that is missing, broken or altered; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1


class DataUsageError(DataError):
    """A wrong data set, split or number asked for: nothing was started."""

    exit_code = 2


class Unreachable(DataError):
    """A server did not answer, or not to the end: trying again may help."""


class NotFound(DataError):
    """A file that does not exist, or one that a server refuses; some servers answer both alike."""


def unknown_name(kind: str, name: str, choices: Iterable[str], known: Iterable[str] = ()) -> DataUsageError:
    """Make a `DataUsageError` for `name` that lists the nearest of `choices`, or else `known` (default: `choices`)."""
    choices = list(choices)
    near = difflib.get_close_matches(name.lower(), choices, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known or choices)}"
    return DataUsageError(f"unknown {kind} '{name}': {hint}")


def describe_invalid(error: ValidationError, root: str = "the file") -> str:
    """Describe the first problem of a document in one line: where it is, the value there, and the reason.

    root: stands for the place of a problem of the whole document.
    """
    first = error.errors()[0]
    # For a field with a union type, pydantic adds the type that it tried, such as "tuple[str, ...]".
    parts = [str(part) for part in first["loc"] if not re.match(r"[\w-]+\[", str(part))]
    # Keys of a file can hold any character, and any number of them.
    where = ".".join(part if part.isprintable() else repr(part) for part in parts)[:200] or root
    message = first["msg"].removeprefix("Value error, ")
    given = f" = {reprlib.repr(first['input'])}" if isinstance(first["input"], str | int | float) and parts else ""
    return f"{where}{given}{': ' * bool(where)}{message[:1].lower()}{message[1:]}"
