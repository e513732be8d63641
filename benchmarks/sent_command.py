"""The command that `procap submit` sends: read here as the cluster will read it, so that mistakes are found at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.submit import only_here
from procap.errors import UsageError, unknown_name

STAYING = {
    "submit": "it sends commands itself",
    "jobs": "it asks the cluster from here: run it without `submit --`",
    "ui": "it shows pages on the machine it runs on: run it here, with --results where the results are",
}
PLACES = ("data", "results", "out", "raw", "shards", "reference")
"""Parameters that name a folder, a URL, or a file to be written."""

NEEDED = {
    "train": ("data", "results"),
    "eval": ("data", "results"),
    "sweep": ("data", "results"),
    "bench": ("data", "results"),
    "table": ("results",),
    "report": ("results",),
    "track": ("results",),
    "demo": ("out",),
}
"""What a command must be told, as what it else takes is a folder of one machine."""

WOULD_WORK = "give an absolute path that all nodes see, or a URL (s3://, gs://, file://)"


@dataclass(frozen=True)
class SentCommand:
    """A command of `procap` that parses, and the files of this machine that it names."""

    words: tuple[str, ...]
    path: tuple[str, ...]
    files: tuple[str, ...]
    alone: bool
    """Whether the node that starts it does all the work."""


def read_command(words: Sequence[str], environment: dict[str, str]) -> SentCommand:
    """The command in `words`; `environment` is what the job will find set.

    Raises UsageError for what procap would not accept, cannot do elsewhere, or would do with places of this machine.
    """
    words = tuple(words[1:] if list(words[:1]) == ["procap"] else words)
    path, parsed = _parse(words)
    _check_places(path, parsed, environment)
    files = _named_files(words[len(path) :], parsed)
    return SentCommand(words, path, files, alone=parsed.params.get("on") != "ray")


def _parse(words: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The names of the command, and typer's context of its parameters; nothing is run."""
    import typer

    from benchmarks.cli import app

    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while hasattr(command, "commands"):
        said = " ".join(["procap", *path])
        if len(path) == len(words) or words[len(path)].startswith("-"):
            raise UsageError(f"which command is to be sent? `procap submit -- {' '.join([*path, 'COMMAND'])} ...`")
        name = words[len(path)]
        if name not in command.commands:
            raise unknown_name(f"command of {said}", name, command.commands)
        if not path and name in STAYING:
            raise UsageError(f"procap {name} cannot be sent: {STAYING[name]}")
        path.append(name)
        command = command.commands[name]
    return tuple(path), command.make_context(" ".join(["procap", *path]), list(words[len(path) :]))


def _check_places(path: tuple[str, ...], parsed: Any, environment: dict[str, str]) -> None:
    needed = NEEDED.get(path[0], ())
    flags = {each.name: each.opts[0] for each in parsed.command.params}
    for name in PLACES:
        if name not in parsed.params:
            continue
        value = parsed.params[name]
        given = parsed.get_parameter_source(name).name != "DEFAULT" and value not in (None, "")
        if given and (why := only_here(_as_typed(value))):
            raise UsageError(f"{flags[name]} {value} would be sent, but {why}: {WOULD_WORK}")
        covered = name == "data" and "PROCAP_DATA" in environment
        if name in needed and not given and not covered:
            raise UsageError(f"{flags[name]} is missing: without it each node takes a folder of its own; {WOULD_WORK}")
    tracking = str(parsed.params.get("tracking") or "")
    if tracking.startswith("sqlite:///") and not tracking.startswith("sqlite:////"):
        raise UsageError(
            f"--tracking {tracking} would be sent, but it is relative to a folder of this machine: off, "
            "http://SERVER or sqlite:////FILE would work"
        )


def _named_files(words: Sequence[str], parsed: Any) -> tuple[str, ...]:
    """Files below the current folder that the command names, as whole words or behind `=`; they travel along."""
    found: list[str] = []
    for word in words:
        for text in {word, word.partition("=")[2]}:
            if text and not os.path.isabs(text) and Path(text).is_file():
                found.append(text)
    for name, value in parsed.params.items():
        if name in PLACES:
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            if not (isinstance(each, Path) or (name == "runs" and each)) or Path(each).is_absolute():
                continue
            if Path(each).is_dir():
                raise UsageError(
                    f"{each} is a folder of this machine, which stays here: name runs as they are below --results"
                )
            if name != "runs" and not Path(each).exists():
                raise UsageError(
                    f"{each} is not here to be sent along: name a file below this folder, or an absolute one"
                )
    return tuple(dict.fromkeys(found))


def _as_typed(value: Any) -> str:
    """A place as it was typed: a path that began as a URL has lost a slash."""
    text = str(value)
    head, colon, rest = text.partition(":/")
    if not colon or len(head) < 2 or "/" in head or isinstance(value, str):
        return text
    return f"{head}://{'/' * (head == 'file')}{rest.lstrip('/')}"
