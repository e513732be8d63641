"""Errors that a user can act on: one line that says what is wrong, where, and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

SYNONYMS = {"learning_rate": "lr"}
"""Names that other programs use, and ours."""


class UserError(Exception):
    """A failure that the user can fix; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1
    printed_elsewhere: bool | None = None
    """Whether another process of the same run prints the error; None if unknown."""


class UsageError(UserError):
    """A wrong name, flag, type or configuration: nothing was started."""

    exit_code = 2


def unknown_name(kind: str, name: str, choices: Iterable[str], *, listing: str = "") -> UsageError:
    """Make a `UsageError` for `name` with the nearest of `choices`, or else all of them; `listing` is always added."""
    by_lower = {choice.lower(): choice for choice in sorted(choices)}
    near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=3)]
    near = near or [ours for ours in (SYNONYMS.get(name),) if ours in by_lower]
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    hints += [listing] if listing else [] if near else [f"known: {', '.join(by_lower.values())}"]
    return UsageError(f"unknown {kind} '{name}': {' '.join(hints)}")


def check_names(kind: str, names: Iterable[str], choices: Collection[str]) -> None:
    """Raise `UsageError` for the first of `names` that is not among `choices`."""
    for name in names:
        if name not in choices:
            raise unknown_name(kind, name, choices)
