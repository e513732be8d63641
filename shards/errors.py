"""Errors about data that a user can act on: one line that says what is wrong, where, and what would work."""

from __future__ import annotations


class DataError(Exception):
    """Data that is missing, broken or altered; the command line prints the message alone and exits with `exit_code`."""

    exit_code = 1


class DataUsageError(DataError):
    """A wrong data set, split or number asked for: nothing was started."""

    exit_code = 2
