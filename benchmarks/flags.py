"""The flags that commands share: a field of a dataclass here is one flag, and `flat` gives a command all of them."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def cache_home() -> Path:
    """`$PROCAP_HOME`, else `$XDG_CACHE_HOME/procap`, else `~/.cache/procap`."""
    if home := os.environ.get("PROCAP_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "procap"


def data_home() -> Path:
    """Where packed data sets are looked for when `--data` is not given: `$PROCAP_DATA`, else `data` in the cache."""
    given = os.environ.get("PROCAP_DATA")
    return Path(given).expanduser() if given else cache_home() / "data"


@dataclass(frozen=True)
class Selection:
    """Which runs are meant: every method on every data set with every seed."""

    methods: Annotated[str, typer.Option(metavar="A,B", help="methods, see `procap ls methods`")] = ""
    datasets: Annotated[str, typer.Option(metavar="A,B", help="data sets to train on, see `procap ls datasets`")] = ""
    seeds: Annotated[str, typer.Option(metavar="1,2,3", help="one run per seed; table: those seeds only")] = ""
    shots: Annotated[str, typer.Option(metavar="16", help="training images per class; full takes all")] = ""
    classes: Annotated[str, typer.Option(metavar="base|all", help="the classes to train on")] = ""
    backbone: Annotated[str, typer.Option(metavar="NAME", help="CLIP, see `procap ls backbones`")] = ""
    pretrained: Annotated[str, typer.Option(metavar="TAG|FILE", help="weights of the backbone")] = ""
    precision: Annotated[str, typer.Option(metavar="fp32|bf16", help="arithmetic of training and evaluation")] = ""


@dataclass(frozen=True)
class Training:
    """What a run's recipe and method may be told to do differently."""

    recipe: Annotated[str, typer.Option(metavar="own|procap", help="the method's published recipe, or ProCAP's")] = ""
    epochs: Annotated[int | None, typer.Option(metavar="N", help="instead of the recipe's")] = None
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="images per optimizer step")] = None
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="peak learning rate")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="an option of the method, repeatable; see `procap ls methods --json`"),
    ] = None


@dataclass(frozen=True)
class Place:
    """Where things are and how the work is done; nothing here changes a result."""

    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="packed data sets [default: $PROCAP_DATA, else data in the cache]"),
    ] = None
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="runs and their results")] = Path("results")
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")] = "auto"
    workers: Annotated[int, typer.Option(metavar="N", help="processes that decode images; 0 decodes in this one")] = 0
    tracking: Annotated[
        str,
        typer.Option(metavar="off|URI", help="MLflow store [default: $MLFLOW_TRACKING_URI, else mlflow.db in results]"),
    ] = ""

    def data_root(self) -> Path:
        return (self.data or data_home()).expanduser()


@dataclass(frozen=True)
class Doing:
    """How far a command goes when there is work to do."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")] = False
    force: Annotated[bool, typer.Option("--force", help="repeat what is already there")] = False


@dataclass(frozen=True)
class Output:
    """How a command speaks."""

    json: Annotated[bool, typer.Option("--json", help="end with one line of JSON on stdout")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback of an error")] = False


def flat(command: Callable[..., int]) -> Callable[..., int]:
    """`command` with every field of its dataclass parameters as a keyword parameter of its own, as typer reads them."""
    hints = get_type_hints(command, include_extras=True)
    plain: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            plain[name] = parameter.replace(annotation=kind)
            continue
        assert isinstance(kind, type)
        inner = get_type_hints(kind, include_extras=True)
        groups[name] = (kind, [field.name for field in fields(kind)])
        for field in fields(kind):
            plain[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=inner[field.name]
            )

    @functools.wraps(command)
    def called(**values: Any) -> int:
        built = {name: kind(**{key: values.pop(key) for key in keys}) for name, (kind, keys) in groups.items()}
        return command(**built, **values)

    ordered = sorted(plain.values(), key=lambda parameter: parameter.kind)
    called.__signature__ = inspect.Signature(ordered, return_annotation=int)  # type: ignore[attr-defined]
    called.__annotations__ = {name: parameter.annotation for name, parameter in plain.items()} | {"return": int}
    # typer follows __wrapped__ to the original annotations, which still hold the dataclasses.
    del called.__wrapped__
    return called


def command_line(*groups: Any) -> str:
    """The flags of `groups` that were given, as a person would type them."""
    words: list[str] = []
    for group in groups:
        for field in fields(group):
            value = getattr(group, field.name)
            if value == field.default:
                continue
            flag = f"--{field.name.replace('_', '-')}"
            for item in value if isinstance(value, list) else [value]:
                words += [flag] if item is True else [flag, shlex.quote(str(item))]
    return " ".join(words)


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
