"""Errors that a user can act on, for all packages: one line that says what is wrong, where, and what would work.

This module imports nothing of the project: all packages may import it, `shards` nothing else of `procap`.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound="BaseModel")

SYNONYMS = {"learning_rate": "lr"}
"""Names that other programs use, and ours."""


class UserError(Exception):
    """A failure that the user can fix; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1


class UsageError(UserError):
    """A wrong name, flag, type or configuration: nothing was started."""

    exit_code = 2


class Unreachable(UserError):
    """A server did not answer, or not to the end: trying again may help."""


class NotFound(UserError):
    """A file that does not exist, or one that a server refuses; some servers answer both alike."""


def unknown_name(
    noun: str, name: str, choices: Iterable[str], *, known: Iterable[str] = (), listing: str = ""
) -> UsageError:
    """Make a `UsageError` for an unknown `noun` with the nearest of `choices`, or else all `known` names.

    known: names to list when none is near; default: `choices`.
    listing: a hint that is always added, in place of the names.
    """
    by_lower = {choice.lower(): choice for choice in sorted(choices)}
    near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    near = near or [ours for ours in (SYNONYMS.get(name),) if ours in by_lower]
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    hints += [listing] if listing else [] if near else [f"known: {', '.join(known or by_lower.values())}"]
    return UsageError(f"unknown {noun} '{name}': {' '.join(hints)}")


def check_names(noun: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Raise `UsageError` for the first of `names` that is not among `choices`."""
    for name in names:
        if name not in choices:
            raise unknown_name(noun, name, choices)


def describe_invalid(error: ValidationError, root: str = "the file") -> str:
    """Describe the first problem of a document in one line: its field, the value there, and the reason.

    root: printed in place of the field for a problem of the whole document.
    """
    first = error.errors()[0]
    # For a field with a union type, pydantic adds the type that it tried, such as "tuple[str, ...]".
    parts = [str(part) for part in first["loc"] if not re.match(r"[\w-]+\[", str(part))]
    # Keys of a file can have any character, and any number of them.
    field = ".".join(part if part.isprintable() else repr(part) for part in parts)[:200] or root
    message = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    value = f" = {reprlib.repr(first['input'])}" if isinstance(first["input"], str | int | float) and parts else ""
    return f"{field}{value}{': ' * bool(field)}{message[:1].lower()}{message[1:]}"


def validate(model: type[Model], values: Mapping[str, Any], owner: str, noun: str = "field") -> Model:
    """Make a pydantic model of `values`; see `explain_invalid` for the UsageError of wrong ones."""
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain_invalid(error, owner, model.model_fields, noun) from error


def explain_invalid(error: ValidationError, owner: str, fields: Collection[str], noun: str = "field") -> UsageError:
    """Make a `UsageError` of a pydantic error: the first wrong field of `owner`, its value, the nearest of `fields`."""
    first, *others = error.errors()
    path = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return UsageError(f"{unknown_name(f'{noun} of {owner}', path, fields)}{more}")
    if first["type"] == "missing":
        return UsageError(f"{owner}: {path} is missing{more}")
    return UsageError(f"{owner}: {describe_invalid(error, root='')}{more}")
