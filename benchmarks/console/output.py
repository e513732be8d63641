"""Print results to stdout, progress and notes to stderr; with --json, the JSON alone to stdout."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from shards.credentials import mask, mask_urls
from shards.urls import redact

JSON_STREAM: ContextVar[TextIO | None] = ContextVar("JSON_STREAM", default=None)
"""Where `show_json` prints; None without --json."""
VERBOSE: ContextVar[bool] = ContextVar("VERBOSE", default=False)
"""Whether `note_trace` prints: with --verbose."""
SOME_FAILED = 3
"""Exit code of a command in which some runs failed and others succeeded."""

# Control characters without tab and newline, and Unicode's for lines and the direction of text.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Numbers and words with a sign are none.
FORMULA = re.compile(r"[=@]|\+(?![\d.])|-[^\W\d_]|[+-].*[|(!=]")


class OutputStream:
    """Stdout or stderr of a command: `masks` credentials, and escapes characters that the terminal cannot print."""

    def __init__(self, stream: TextIO, masks: Callable[[str], str] = mask) -> None:
        self._stream, self._mask = stream, masks

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # An ASCII terminal would raise UnicodeEncodeError for ± and ↑, after all runs are done.
        self._stream.write(self._mask(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Print through `OutputStream` in the block; nothing where a stream is closed."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(OutputStream(sys.stdout or nowhere, mask_urls)),
        redirect_stderr(OutputStream(sys.stderr or nowhere, mask)),
    ):
        yield


@contextmanager
def json_alone() -> Iterator[None]:
    """Print to stderr in the block what else goes to stdout, so that a program can read the JSON from there."""
    token = JSON_STREAM.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        JSON_STREAM.reset(token)


def is_first_rank() -> bool:
    """Whether this process prints: rank 0, or a process without a launcher."""
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def is_distributed() -> bool:
    """Whether a launcher started this process in a group of several."""
    # Container platforms set RANK as well, launchers alone LOCAL_RANK.
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def write_error_file(message: str) -> None:
    """Write the reason of a failure to the file that torchrun prints when a process fails."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The layout of torchelastic's own error files; it shows the message of the earliest timestamp.
        facts = {"message": mask(message), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": facts}), encoding="utf-8")


def note(line: str) -> None:
    """Print a message to stderr that is not a result."""
    if is_first_rank():
        print(escape_control(line), file=sys.stderr, flush=True)


def note_trace(trace: str) -> None:
    """Print the traceback of an error, with --verbose."""
    if trace and VERBOSE.get():
        print(escape_control(trace), file=sys.stderr, flush=True)


def note_failures(done: int, failed: Mapping[str, str]) -> int:
    """Print each reason of failures once; returns 0 without failures, 3 if `done` other runs succeeded, else 1."""
    if not failed:
        return 0
    note(f"procap: {done} done, {len(failed)} failed:")
    names: dict[str, list[str]] = {}
    for name, reason in failed.items():
        # A reason begins with the path of its run; without it, equal reasons of many runs are one line.
        names.setdefault(reason.removeprefix(name).lstrip(" :"), []).append(name)
    for reason, (name, *others) in names.items():
        note(f"  {f'{len(others) + 1}, such as ' if others else ''}{name}: {reason}")
    return SOME_FAILED if done else 1


def note_unreadable(unreadable: Mapping[str, object]) -> int:
    """Print which runs are left out, and return the exit code."""
    for path, why in unreadable.items():
        note(f"procap: {path} is left out: {why}")
    return 1 if unreadable else 0


def show(text: str) -> None:
    """Print a result."""
    if is_first_rank():
        print(escape_control(text), flush=True)


def escape_control(text: str) -> str:
    """Escape characters that control a terminal: texts in files of results can come from outside."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Join the lines of `text`, and escape characters that would control a terminal."""
    return escape_control(" ".join(text.split()))


def show_json(document: Any) -> None:
    """Print `document` as one line of JSON, with --json."""
    if (stream := JSON_STREAM.get()) and is_first_rank():
        print(to_json(document), file=stream, flush=True)


def to_json(document: Any) -> str:
    """Convert to one line of strict JSON, in which names keep their letters."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def csv_text(rows: Iterable[Iterable[str]]) -> str:
    """Format rows as CSV; an apostrophe in front keeps spreadsheets from computing cells that begin like formulas."""
    text = io.StringIO()
    cells = (["'" * bool(FORMULA.match(cell)) + cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def columns(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a plain table with aligned columns; numbers to the right. The last column is not padded."""
    lines = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    aligns = [str.rjust if right else str.ljust for right in numeric]
    return "\n".join(
        "  ".join(align(cell, width) for align, cell, width in zip(aligns, line, widths, strict=True)).rstrip()
        for line in lines
    )


def quote(word: object) -> str:
    """Quote a path or another word for a shell; a URL without what may be secret in it."""
    return shlex.quote(redact(str(word)))


def plural(count: int, noun: str) -> str:
    """Format a count: `1 run`, `3 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
