"""The command that `procap submit` sends: read here as the cluster will read it, so that mistakes are found at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cluster.submit import MEND, only_here, secret_part
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
    "data": ("data",),
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
    path, context = _parse(words)
    told, texts = _told(path, context)
    _check_places(path, told, environment)
    files = _named_files([*words[len(path) :], *texts], told.params)
    return SentCommand(words, path, files, alone=told.params.get("on") != "ray")


def _parse(words: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The names of the command, and typer's context of its parameters; nothing is run."""
    import typer

    from benchmarks.cli.app import app

    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while hasattr(command, "commands"):
        said = " ".join(["procap", *path])
        if len(path) == len(words) or words[len(path)].startswith("-"):
            raise UsageError(f"which command is to be sent? `procap submit -- {' '.join([*path, 'COMMAND'])} ...`")
        name = words[len(path)]
        # A group that looks its commands up needs no context for it.
        found = command.get_command(None, name)
        if found is None:
            raise unknown_name(f"command of {said}", name, command.list_commands(None))
        if not path and name in STAYING:
            raise UsageError(f"procap {name} cannot be sent: {STAYING[name]}")
        path.append(name)
        command = found
    return tuple(path), command.make_context(" ".join(["procap", *path]), list(words[len(path) :]))


@dataclass(frozen=True)
class Told:
    """What a command is told, by its own words or by a file that they name. given: what is no default."""

    params: dict[str, Any]
    given: set[str]
    flags: dict[str, str]


def _told(path: tuple[str, ...], context: Any) -> tuple[Told, list[str]]:
    """With what the file of a sweep says, and the texts in that file. Raises UsageError for secrets in it."""
    from benchmarks.cli.flags import typed_names

    params, given = dict(context.params), typed_names(context)
    texts: list[str] = []
    file = params.get("file")
    # An absolute one may be there alone.
    if path == ("sweep",) and file is not None and Path(file).is_file():
        from benchmarks.sweeps.file import Asked, read_yaml, with_file

        merged = with_file(Asked.of(params), Path(file), given)
        for group in merged.groups:
            said = {one.name: getattr(group, one.name) for one in fields(group)}
            given |= {name for name, value in said.items() if value != params[name]}
            params |= said
        texts = list(_texts(read_yaml(Path(file))))
        if secret := next(filter(None, map(secret_part, texts)), ""):
            raise UsageError(f"{secret} in {file} would be readable on the cluster; {MEND}")
    return Told(params, given, {each.name: each.opts[0] for each in context.command.params}), texts


def _texts(document: Any) -> Iterator[str]:
    if isinstance(document, Mapping):
        yield from _texts(list(document.values()))
    elif isinstance(document, list):
        for each in document:
            yield from _texts(each)
    elif isinstance(document, str):
        yield document


def _check_places(path: tuple[str, ...], told: Told, environment: dict[str, str]) -> None:
    needed = NEEDED.get(path[0], ())
    flags = told.flags
    for name in PLACES:
        if name not in told.params:
            continue
        value = told.params[name]
        given = name in told.given and value not in (None, "")
        if given and (why := only_here(_as_typed(value))):
            raise UsageError(f"{flags[name]} {value} would be sent, but {why}: {WOULD_WORK}")
        covered = name == "data" and "PROCAP_DATA" in environment
        if name in needed and not given and not covered:
            raise UsageError(f"{flags[name]} is missing: without it each node takes a folder of its own; {WOULD_WORK}")
    tracking = str(told.params.get("tracking") or "")
    if tracking.startswith("sqlite:///") and not tracking.startswith("sqlite:////"):
        raise UsageError(
            f"--tracking {tracking} would be sent, but it is relative to a folder of this machine: off, "
            "http://SERVER or sqlite:////FILE would work"
        )


def _named_files(words: Sequence[str], params: Mapping[str, Any]) -> tuple[str, ...]:
    """Files below the current folder that words name, whole or in lists behind `=`; they travel along."""
    found: list[str] = []
    for word in words:
        for text in dict.fromkeys((word, *word.partition("=")[2].split(","))):
            if text and not os.path.isabs(text) and Path(text).is_file():
                found.append(text)
    for name, value in params.items():
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
