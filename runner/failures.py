"""Describe errors that end a run."""

from __future__ import annotations

from procap.errors import UserError
from procap.methods.plugins import describe_unexpected
from shards.credentials import mask

EXPECTED = (UserError, OSError)
"""Errors of the user or the environment, which are no fault of the program."""


def describe_failure(error: Exception) -> str:
    """Describe in one line, without credentials, why a run or another part of a command failed."""
    return mask(" ".join((str(error) if isinstance(error, EXPECTED) else describe_unexpected(error)).split()))
