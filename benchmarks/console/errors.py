"""Convert an error to one line, with what would work, and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import typer

from benchmarks.console.output import VERBOSE, one_line
from procap.errors import UserError, describe_invalid

LISTS = ("--methods", "--method", "--datasets", "--dataset", "--seeds", "--shots", "--targets", "--names")
# Click's UsageError, wherever this version of typer keeps it.
COMMAND_LINE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def explain(error: Exception, arguments: Sequence[str] = ()) -> tuple[str, int]:
    """Convert an error to one line and an exit code. arguments: of the command line."""
    if isinstance(error, UserError):
        # Codes above 128 are signals: stopping a command is not an error.
        return f"{'' if error.exit_code > 128 else 'error: '}{one_line(str(error))}", error.exit_code
    if isinstance(error, COMMAND_LINE_ERROR):
        message: Any = error
        if listed := find_blank_list(arguments) if "unexpected extra argument" in str(error) else "":
            return f"error: lists have commas: {listed}", 2
        if near := getattr(message, "possibilities", None):
            # Click's limit of similarity, 0.6, admits names that only share a few letters.
            message.possibilities = difflib.get_close_matches(message.option_name, near, cutoff=0.75)
        path = message.ctx.command_path if message.ctx else "procap"
        reason, cause = message.format_message(), message.__cause__
        # Of pydantic, by which typer reads flags.
        if hasattr(cause, "errors"):
            reason = describe_invalid(cause, f"{message.param.opts[0]} {cause.errors()[0]['input']}")
        return f"error: {one_line(reason).rstrip('.')} (see `{path} --help`)", 2
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"error: {name}{error.strerror or one_line(str(error))}", 1
    # Of pathlib.
    if "Could not determine home directory" in str(error):
        return "error: a path begins with ~, and there is no such user or home folder", 2
    # This imports pydantic, which the help does not need.
    from procap.methods.plugins import describe_unexpected

    text = describe_unexpected(error)
    more = "" if VERBOSE.get() else " (add -v to the command for the traceback)"
    return f"{'' if text.startswith('internal') else 'error: '}{text}{more}", 1


def find_blank_list(arguments: Sequence[str]) -> str:
    """Return the first list of the arguments that has blanks, as it should be typed; "" without one."""
    for number, flag in enumerate(arguments):
        words = list(takewhile(lambda word: not word.startswith("-"), arguments[number + 1 :]))
        if flag in LISTS and len(words) > 1:
            return f"{flag} {','.join(word.strip(',') for word in words)}"
    return ""
