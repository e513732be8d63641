"""Describe errors that end a run."""

from __future__ import annotations

from procap.errors import UserError
from procap.methods.plugins import describe_unexpected
from shards.errors import DataError


def describe_failure(error: Exception) -> str:
    """Describe in one line why a run or another part of a command failed."""
    expected = isinstance(error, UserError | DataError | OSError)
    return " ".join((str(error) if expected else describe_unexpected(error)).split())
