"""Errors about data that a user can act on: one line that says what is wrong, where, and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(Exception):
    """Data that is missing, broken or altered; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1


class DataUsageError(DataError):
    """A wrong data set, split or number asked for: nothing was started."""

    exit_code = 2


class Unreachable(DataError):
    """A server did not answer, or not to the end: trying again may help."""


class NotFound(DataError):
    """A file that does not exist, or that a server does not give to us, which some servers report alike."""


def unknown_name(kind: str, name: str, choices: Iterable[str], known: Iterable[str] = ()) -> DataUsageError:
    """Make a `DataUsageError` for `name` that lists the nearest of `choices`, then `known` (default: `choices`)."""
    choices = list(choices)
    near = difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return DataUsageError(f"unknown {kind} '{name}': {hint}known: {', '.join(known or choices)}")
