"""Define the flags that commands share as fields of dataclasses: the flag `--lr` is the field `lr` of `RecipeFlags`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from benchmarks.cli.completion import complete_datasets, complete_methods, complete_runs
from benchmarks.console.output import json_alone, quote
from procap.errors import UsageError
from shards.urls import is_url

if TYPE_CHECKING:
    from cluster.launcher import Launcher

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
Completion = Callable[[str], list[str]]
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def examples(*lines: str) -> dict[str, Any]:
    """Make the typer settings of a command whose help ends in example lines."""
    return {"epilog": "\b\nexamples:\n" + "\n".join(f"  {line}" for line in lines), "context_settings": HELP_NAMES}


def flag(metavar: str, text: str, *names: str, min: float | None = None, complete: Completion | None = None) -> Any:
    """Define a flag that takes a value; `text` is its help, `complete` what the shell completes it with."""
    return typer.Option(*names, metavar=metavar, help=text, min=min, autocompletion=complete)


def run_argument(text: str, metavar: str = "RUN") -> Any:
    """Define an argument that names runs; `text` is its help."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete_runs)


def switch(name: str, text: str, *short: str) -> Any:
    """Define a flag without a value; `text` is its help."""
    return typer.Option(name, *short, help=text)


# The types of flags that several commands have, alone or in a group below.
Sampling = Annotated[str, flag("balanced|decay:RATIO|natural|natural-any", "images per class [default: balanced]")]
RecipeChoice = Annotated[
    str, flag("published|procap", "each method's own, or ProCAP's [default: published; in suites: the profile's]")
]
MethodOptions = Annotated[
    list[str] | None, flag("KEY=VALUE", "method option; METHOD.KEY=VALUE sets it for one method; repeatable")
]
Unlabelled = Annotated[
    str, flag("few-shot|base|all", "images that methods without labels learn from: --option unlabelled=... of each")
]
Epochs = Annotated[int | None, flag("N", "epochs [default: the recipe's]")]
Data = Annotated[str, flag("FOLDER|URL", "packed data sets [default: $PROCAP_DATA, else data in the cache]")]
Results = Annotated[str, flag("FOLDER|URL", "folder of runs and their results")]
Device = Annotated[str, flag("NAME", "auto, cpu, cuda or cuda:N")]
Tracking = Annotated[str, flag("off|URI", "MLflow store [default: $MLFLOW_TRACKING_URI, else mlflow.db in results]")]
Limit = Annotated[int | None, flag("N", "evaluate on the first N images; results are marked", min=1)]
Workers = Annotated[int | None, flag("N", "processes [default: one per core]", min=1)]
Reference = Annotated[
    str, flag("METHOD", "last row, with which suites compare the others [default: the only plug-in, else procap]")
]
DryRun = Annotated[bool, switch("--dry-run", "print the plan, write nothing")]


@dataclass(frozen=True)
class ChoiceFlags:
    """Flags that choose methods, data sets and seeds; all combinations are runs."""

    heading: ClassVar[str] = "Selection"
    methods: Annotated[
        str,
        flag(
            "A,B",
            "names, or all, table1, adapters, local, prompts, probabilistic, test-time, unlabelled "
            "[default: probe, for your data with mini; in suites: the suite's]",
            "--methods",
            "--method",
            complete=complete_methods,
        ),
    ] = ""
    datasets: Annotated[
        str,
        flag(
            "A,B",
            "names, or all (those that need no files), paper (the paper's)",
            "--datasets",
            "--dataset",
            complete=complete_datasets,
        ),
    ] = ""
    seeds: Annotated[str, flag("1,2,3", "random seeds, also 1-3 [default: 1; in suites: the suite's]")] = ""
    shots: Annotated[str, flag("N|full", "training images per class [default: 16]")] = ""
    backbone: Annotated[
        str, flag("NAME", "CLIP, see `procap ls backbones` [default: mini; in suites: the profile's]")
    ] = ""
    pretrained: Annotated[str, flag("TAG|FILE", "weights [default: the backbone's own]")] = ""
    precision: Annotated[
        str, flag("fp32|bf16|fp16", "precision of training and evaluation [default: fp32; in suites: the profile's]")
    ] = ""


@dataclass(frozen=True)
class SelectionFlags(ChoiceFlags):
    """Flags that select runs."""

    classes: Annotated[str, flag("base|all|dev-base|dev-novel", "classes to train on [default: base]")] = ""
    sampling: Sampling = ""


@dataclass(frozen=True)
class FilterFlags(SelectionFlags):
    """Flags that select among existing runs; without them every run is selected."""

    heading: ClassVar[str] = "Filters (default: every run)"


@dataclass(frozen=True)
class RecipeFlags:
    """Flags that change the recipe and the method's options."""

    heading: ClassVar[str] = "Recipe"
    recipe: RecipeChoice = ""
    epochs: Epochs = None
    batch_size: Annotated[
        int | None, flag("N", "global batch, over all processes", "--batch-size", "--global-batch-size")
    ] = None
    lr: Annotated[float | None, flag("RATE", "peak learning rate [default: the recipe's]")] = None
    option: MethodOptions = None
    unlabelled: Unlabelled = ""
    recipe_field: Annotated[list[str] | None, flag("KEY=VALUE", "recipe field: weight_decay=1e-3; repeatable")] = None


@dataclass(frozen=True)
class StorageFlags:
    """Flags for folders, the device and the store; none of them changes a result."""

    heading: ClassVar[str] = "Execution"
    data: Data = ""
    results: Results = "results"
    device: Device = "auto"
    tracking: Tracking = ""
    download: Annotated[bool, switch("--download", "download weights of CLIP that are not on this machine")] = False


@dataclass(frozen=True)
class RuntimeFlags(StorageFlags):
    """Flags for folders, devices and speed; none of them changes a result."""

    heading: ClassVar[str] = "Execution"
    no_cache: Annotated[bool, switch("--no-cache", "stream shards of a URL, except for few-shot training")] = False
    workers: Annotated[
        int | None, flag("N", "threads that decode images [default: 0 on a CPU, up to 12 with a GPU]", min=0)
    ] = None
    deterministic: Annotated[bool, switch("--deterministic", "deterministic algorithms of torch and cuBLAS")] = False
    accelerate: Annotated[
        str, flag("auto|off|LIST", "graphs,images,compile,fused; auto: what `procap check device` chose")
    ] = "auto"
    timeout: Annotated[float, flag("SECONDS", "timeout of collective operations", min=1)] = 300.0


@dataclass(frozen=True)
class EngineFlags(RuntimeFlags):
    """Flags of a command that trains: also the engine for several processes; none of them changes a result."""

    heading: ClassVar[str] = "Execution"
    engine: Annotated[str, flag("ddp|deepspeed", "engine for data-parallel training")] = "ddp"
    zero_stage: Annotated[int | None, flag("1|2", "DeepSpeed ZeRO stage [default: 1]")] = None

    def for_evaluation(self) -> RuntimeFlags:
        """Return the flags that an evaluation has as well."""
        return RuntimeFlags(**{field.name: getattr(self, field.name) for field in fields(RuntimeFlags)})


@dataclass(frozen=True)
class EvalFlags:
    """Flags that choose how runs are evaluated; results under different ones are kept in different files."""

    heading: ClassVar[str] = "Evaluation"
    limit: Limit = None
    eval_precision: Annotated[
        str, flag("fp32|bf16|fp16", "precision of the evaluation [default: that of the training]")
    ] = ""
    eval_resize: Annotated[
        str, flag("crop|squash", "crop of the centre, or all of it squashed [default: the backbone's]")
    ] = ""
    samples: Annotated[int, flag("N", "average N samples of Gaussian tokens; 0 takes their means")] = 0
    temperature: Annotated[str, flag("shots", "divide logits by a number fitted on held-out few-shot images")] = ""


@dataclass(frozen=True)
class SuiteFlags(EvalFlags, ChoiceFlags):
    """Flags that choose a part of a suite; suite, profile and the method's recipe set the rest, such as `lr`."""

    heading: ClassVar[str] = "Recipe"
    profile: Annotated[str, flag("mini|paper", "generated data or the paper's [default: paper if packed]")] = ""
    recipe: RecipeChoice = ""
    option: MethodOptions = None
    unlabelled: Unlabelled = ""
    quick: Annotated[bool, switch("--quick", "smoke test with short schedules")] = False
    epochs: Epochs = None
    reference: Reference = ""


@dataclass(frozen=True)
class SweepFlags:
    """Flags that define a sweep: what it searches, how, and how long."""

    heading: ClassVar[str] = "Search"
    name: Annotated[str, flag("NAME", "an existing sweep is resumed [default: made from what is searched]")] = ""
    param: Annotated[
        list[str] | None, flag("FIELD=DOMAIN", "n_ctx=2,4; lr=loguniform(1e-5,1e-2); depth=randint(1,10); repeatable")
    ] = None
    search: Annotated[str, flag("grid|random|tpe", "search algorithm [default: grid of lists, else random]")] = ""
    search_seed: Annotated[int | None, flag("N", "seed of the random choices [default: 0]")] = None
    trials: Annotated[int | None, flag("N", "configurations in all, each with all seeds")] = None
    hours: Annotated[float | None, flag("H", "time limit; repeat the command to resume")] = None
    metric: Annotated[str, flag("val|held-out", "accuracy on val, or HM of dev-base and dev-novel [default: val]")] = ""
    scheduler: Annotated[str, flag("none|asha", "asha stops configurations that fall behind [default: none]")] = ""
    grace_period: Annotated[int | None, flag("N", "asha: epochs before the first stop [default: 1]")] = None
    reduction_factor: Annotated[int | None, flag("N", "asha: one in N configurations continues [default: 3]")] = None


@dataclass(frozen=True)
class LaunchFlags:
    """Flags that choose where runs are executed and their resources; none of them changes a result."""

    heading: ClassVar[str] = "Execution"
    launcher: Annotated[str, flag("local|ray", "this machine, or the nodes of a Ray cluster")] = "local"
    address: Annotated[str, flag("HOST:PORT", "Ray cluster [default: $RAY_ADDRESS, else this machine's]")] = ""
    processes: Annotated[int, flag("N", "processes per run", min=1)] = 1
    cpus: Annotated[float | None, flag("N", "CPU cores per process [default: 1; Ray GPUs: a share]")] = None
    gpus: Annotated[float | None, flag("N", "GPUs per process; 0.5: two share a GPU [default: 1 if any]")] = None
    max_concurrent: Annotated[int | None, flag("N", "runs at once [default: as many as fit]", min=1)] = None
    autoscale: Annotated[bool, switch("--autoscale", "let Ray's autoscaler add nodes")] = False

    def to_launcher(self) -> Launcher:
        """Return the launcher given by the flags. Raises UsageError for flags that contradict each other."""
        from cluster.launcher import Launcher

        values = asdict(self)
        return Launcher(kind=values.pop("launcher"), **values)


@dataclass(frozen=True)
class ModeFlags:
    """Flags that stop a command early or repeat finished work."""

    heading: ClassVar[str] = "Output"
    dry_run: DryRun = False
    force: Annotated[bool, switch("--force", "repeat finished work")] = False


@dataclass(frozen=True)
class OutputFlags:
    """Flags that choose the output format."""

    heading: ClassVar[str] = "Output"
    json: Annotated[bool, switch("--json", "print one line of JSON to stdout, the rest to stderr")] = False
    verbose: Annotated[bool, switch("--verbose", "show the traceback of an error", "-v")] = False


KEYS: Mapping[str, tuple[str, ...]] = {"recipe_field": ("epochs", "batch_size", "lr"), "option": ("unlabelled",)}
"""Flags of KEY=VALUE, each with the keys that are flags as well."""


class HeadedCommand(TyperCommand):
    """A command whose help lists its flags under headings. headings: those of the flags by their names."""

    headings: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.default_map:
            self._merge_keys(ctx, ctx.default_map)
        return rest

    def _merge_keys(self, ctx: Any, file: Mapping[str, Any]) -> None:
        """Give flags of KEY=VALUE the keys of a file of flags as well, without those that are typed."""
        defaults = {parameter.name: parameter.default for parameter in self.get_params(ctx)}
        typed = {name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE"}
        for name in KEYS.keys() & ctx.params.keys():
            words = [*ctx.params[name]] if name in typed else []
            keys = {word.partition("=")[0].strip() for word in words}
            ctx.params.update({flag: defaults[flag] for flag in keys.intersection(KEYS[name]) - typed})
            keys |= typed.intersection(KEYS[name])
            of_file = {word: word.partition("=")[0].strip() for word in file.get(name, ())}
            # A typed KEY also replaces METHOD.KEY.
            kept = [word for word, key in of_file.items() if keys.isdisjoint((key, key.rpartition(".")[2]))]
            ctx.params[name] = kept + words

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else self.headings.get(str(parameter.name), "Options")
            if record := parameter.get_help_record(ctx):
                # The defaults are those of a training.
                text = record[1].partition(" [default")[0] if heading == FilterFlags.heading else record[1]
                # typer adds the Python type to the name of an argument.
                sections.setdefault(heading, []).append((str(parameter.metavar) if is_argument else record[0], text))
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def command(
    *lines: str, help: str | None = None, **settings: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a command whose help ends in example lines; `.app` of the function is what typer executes.

    help: instead of the docstring. settings: of click's context.
    """
    texts = examples(*lines)
    texts["context_settings"] = texts["context_settings"] | settings

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        run = flatten_flag_groups(function)
        run.app = typer.Typer(**PLAIN)  # type: ignore[attr-defined]
        headed = type("Headed", (HeadedCommand,), {"headings": run.headings})  # type: ignore[attr-defined]
        return run.app.command(help=help, cls=headed, **texts)(run)  # type: ignore[attr-defined]

    return decorate


def flatten_flag_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with a parameter for each field of its dataclasses: typer makes `--lr` from `RecipeFlags.lr`.

    Every command has the flags of `OutputFlags`, which the functions of `console.output` obey.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    flags = {
        name: parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in groups
    }
    headings: dict[str, str] = {}
    for group in (*groups.values(), OutputFlags):
        types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            flags[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            # The heading of the dataclass that defines the field: subclasses have different ones.
            bases = (base for base in group.__mro__ if field.name in vars(base).get("__annotations__", ()))
            owner = FilterFlags if group is FilterFlags else next(bases)
            headings[field.name] = getattr(owner, "heading", "Options")

    @functools.wraps(command)
    def run(**values: Any) -> int:
        for name, value in values.items():
            is_argument = isinstance(flags[name].annotation.__metadata__[0], ArgumentInfo)
            items = [
                expand_local(item, may_be_on_hub=is_argument) if isinstance(item, Path) else item
                for item in (value if isinstance(value, list) else [value])
            ]
            values[name] = items if isinstance(value, list) else items[0]
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        # The program looks for --verbose by itself: errors of other flags have tracebacks too.
        del values["verbose"]
        with json_alone() if values.pop("json") else nullcontext():
            return command(**built, **values)

    run.__signature__ = inspect.Signature(list(flags.values()), return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in flags.items()} | {"return": int}
    run.headings = headings  # type: ignore[attr-defined]
    # typer follows __wrapped__ to the original annotations, which still hold the dataclasses.
    del run.__wrapped__
    return run


def expand_local(path: Path, *, may_be_on_hub: bool) -> Path:
    """Expand ~. Raises UsageError for a URL, which pathlib takes for a folder here; hf:// may name a run."""
    url = str(path).replace(":/", "://", 1)
    if is_url(url) and not (may_be_on_hub and url.startswith("hf:")):
        raise UsageError(f"{url} is a URL: name a file or folder of this machine")
    return path.expanduser()


def given_values(*groups: Any) -> dict[str, Any]:
    """Return the values of `groups` that are not the default, by the names of their flags without dashes in front."""
    values = {field.name: getattr(group, field.name) for group in groups for field in fields(group)}
    defaults = {field.name: field.default for group in groups for field in fields(group)}
    return {name.replace("_", "-"): value for name, value in values.items() if value != defaults[name]}


def command_line(*groups: Any) -> str:
    """Return the given flags of `groups` as they would be typed, without what may be secret in URLs."""
    words: list[str] = []
    for name, value in given_values(*groups).items():
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if item is True else [f"--{name}", quote(item)]
    return " ".join(words)


def given_options(option: list[str] | None, unlabelled: str) -> list[str]:
    """Return the options of methods as `--option` takes them, after that of `--unlabelled`, which is of all methods."""
    return [*([f"unlabelled={unlabelled}"] if unlabelled else []), *(option or ())]


def assignments(values: Mapping[str, Any]) -> list[str] | None:
    """Write options as `--option` takes them; None without any."""
    from procap.recipe import format_value

    return [f"{name}={format_value(value)}" for name, value in values.items()] or None
