"""Define the flags that commands share: each field of a dataclass is a flag, and `flat` adds them to a command."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from procap.errors import UsageError

if TYPE_CHECKING:
    from cluster.launcher import Launcher

# The types of flags that several commands have, alone or in a group below.
MethodNames = Annotated[str, typer.Option(metavar="A,B", help="methods, see `procap ls methods`")]
DatasetNames = Annotated[str, typer.Option(metavar="A,B", help="data sets to train on, see `procap ls datasets`")]
Seeds = Annotated[str, typer.Option(metavar="1,2,3", help="one run for each seed")]
Shots = Annotated[str, typer.Option(metavar="16", help="training images per class, a list in suites; full takes all")]
Backbone = Annotated[str, typer.Option(metavar="NAME", help="CLIP, see `procap ls backbones`")]
Weights = Annotated[str, typer.Option(metavar="TAG|FILE", help="weights of the backbone")]
Precision = Annotated[str, typer.Option(metavar="fp32|bf16", help="arithmetic of training and evaluation")]
Recipe = Annotated[str, typer.Option(metavar="published|procap", help="each method's published recipe, or ProCAP's")]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="instead of the recipe's")]
Data = Annotated[
    str, typer.Option(metavar="FOLDER|URL", help="packed data sets [default: $PROCAP_DATA, else data in the cache]")
]
Results = Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")]
Tracking = Annotated[
    str, typer.Option(metavar="off|URI", help="MLflow store [default: $MLFLOW_TRACKING_URI, else mlflow.db in results]")
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="evaluate on the first N images only; results are marked")]
Workers = Annotated[int | None, typer.Option(metavar="N", min=1, help="processes [default: one per core]")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")]


@dataclass(frozen=True)
class SelectionFlags:
    """Flags that select runs: every method on every data set with every seed."""

    methods: MethodNames = ""
    datasets: DatasetNames = ""
    seeds: Seeds = ""
    shots: Shots = ""
    classes: Annotated[str, typer.Option(metavar="base|all|dev-base", help="the classes to train on")] = ""
    backbone: Backbone = ""
    pretrained: Weights = ""
    precision: Precision = ""


@dataclass(frozen=True)
class RecipeFlags:
    """Flags that change the recipe and the method's options."""

    recipe: Recipe = ""
    epochs: Epochs = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", "--global-batch-size", metavar="N", help="images per step, of all processes together"
        ),
    ] = None
    lr: Annotated[float | None, typer.Option(metavar="RATE", help="peak learning rate")] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="an option of the method, repeatable; see `procap ls methods --json`"),
    ] = None
    recipe_field: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="any other field of the recipe, such as weight_decay=1e-3, repeatable"),
    ] = None
    few_shot_samples: Annotated[
        str, typer.Option(metavar="DIGEST|FILE", help="train on these images, see `procap data few-shot --import`")
    ] = ""


@dataclass(frozen=True)
class RuntimeFlags:
    """Flags for folders, devices and speed; none of them changes a result."""

    data: Data = ""
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", help="evaluate, or train on all images (not few-shot), without storing shards of a URL"
        ),
    ] = False
    results: Results = "results"
    device: Device = "auto"
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="threads that decode images; 0: in turn [default: 0, beside a GPU up to 12]"),
    ] = None
    accelerate: Annotated[
        str,
        typer.Option(metavar="auto|off|LIST", help="compile,graphs,images: what makes a GPU fast; auto: all"),
    ] = "auto"
    tracking: Tracking = ""
    log_checkpoints: Annotated[
        bool, typer.Option("--log-checkpoints", help="copy checkpoints into MLflow's artifact store")
    ] = False
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="longest wait of a process for the others, under torchrun")
    ] = 300.0


@dataclass(frozen=True)
class EngineFlags:
    """Flags that choose the engine for several processes started by torchrun; none of them changes a result."""

    engine: Annotated[str, typer.Option(metavar="ddp|deepspeed", help="what averages gradients over processes")] = "ddp"
    zero_stage: Annotated[
        int | None, typer.Option(metavar="0|1|2", help="DeepSpeed: share the optimizer's state from stage 1 on")
    ] = None
    deepspeed_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="DeepSpeed: JSON merged into what the run asks for")
    ] = None


@dataclass(frozen=True)
class SuiteFlags:
    """Flags that choose a part of a suite; the rest is decided by the suite and its profile."""

    profile: Annotated[
        str,
        typer.Option(metavar="mini|paper", help="generated data or the paper's [default: paper if --data is given]"),
    ] = ""
    methods: MethodNames = ""
    datasets: DatasetNames = ""
    seeds: Seeds = ""
    shots: Shots = ""
    recipe: Recipe = ""
    quick: Annotated[bool, typer.Option("--quick", help="short schedules: does everything run here?")] = False
    epochs: Epochs = None
    backbone: Backbone = ""
    pretrained: Weights = ""
    precision: Precision = ""


@dataclass(frozen=True)
class SweepFlags:
    """Flags that define a sweep: what it searches, how, and how long."""

    name: Annotated[
        str, typer.Option(metavar="NAME", help="a sweep of the same name is resumed [default: the file's]")
    ] = ""
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=DOMAIN",
            help="n_ctx=2,4,8; lr=loguniform(1e-5,1e-2); weight_decay=uniform(0,0.1); depth=randint(1,10): 1 to 9; "
            "dropout=quniform(0,0.5,0.1); repeatable",
        ),
    ] = None
    search: Annotated[
        str, typer.Option(metavar="grid|random|tpe", help="search algorithm [default: grid of lists, else random]")
    ] = ""
    search_seed: Annotated[int | None, typer.Option(metavar="N", help="of the random choices [default: 0]")] = None
    trials: Annotated[int | None, typer.Option(metavar="N", help="configurations in all, each with all seeds")] = None
    hours: Annotated[float | None, typer.Option(metavar="H", help="time limit; repeat the command to go on")] = None
    metric: Annotated[
        str,
        typer.Option(
            metavar="val|held-out",
            help="accuracy on val images, or HM over two halves of the base classes [default: val]",
        ),
    ] = ""
    direction: Annotated[str, typer.Option(metavar="max|min", help="of the metric [default: max]")] = ""
    scheduler: Annotated[
        str, typer.Option(metavar="none|asha", help="asha stops configurations that fall behind [default: none]")
    ] = ""
    grace_period: Annotated[
        int | None, typer.Option(metavar="N", help="asha: epochs before the first stop [default: 1]")
    ] = None
    reduction_factor: Annotated[
        int | None, typer.Option(metavar="N", help="asha: one of so many continues [default: 3]")
    ] = None


@dataclass(frozen=True)
class LaunchFlags:
    """Flags that choose where runs are executed and their resources; none of them changes a result."""

    launcher: Annotated[str, typer.Option(metavar="local|ray", help="this machine, or the nodes of a Ray cluster")] = (
        "local"
    )
    address: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="of the cluster [default: $RAY_ADDRESS, else the one of this machine]"),
    ] = ""
    processes: Annotated[
        int,
        typer.Option(metavar="N", help="train each run together, placed as one group, over several nodes or on one"),
    ] = 1
    cpus: Annotated[
        float | None, typer.Option(metavar="N", help="of each process [default: its GPU's part of the node, else 1]")
    ] = None
    gpus: Annotated[
        float | None,
        typer.Option(metavar="N", help="of each process; 0.5: two share a GPU [default: 1, if there are any]"),
    ] = None
    max_concurrent: Annotated[
        int | None, typer.Option(metavar="N", help="runs [default: as many as cores, memory or nodes have room for]")
    ] = None
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="ask for more nodes than there are: they come when they are asked for")
    ] = False

    def checked(self) -> Launcher:
        """Return the launcher given by the flags. Raises UsageError for flags that contradict each other."""
        from cluster.launcher import Launcher

        values = asdict(self)
        return Launcher(kind=values.pop("launcher"), **values)


@dataclass(frozen=True)
class PackFlags:
    """Flags that choose what is packed from raw files, and changes to it; each change makes another data set."""

    raw: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="folder of the raw data sets, as CoOp has it [default: $PROCAP_RAW]"),
    ] = None
    random_split: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="split at random instead: packed as NAME-splitSEED")
    ] = None
    subset: Annotated[bool, typer.Option("--subset", help="only the images that are there: packed as NAME-subset")] = (
        False
    )
    resize: Annotated[
        int | None, typer.Option(metavar="N", help="shorter side of N pixels at most: packed as NAME-Npx")
    ] = None
    shards: Annotated[
        str, typer.Option("--from", metavar="FOLDER|URL", help="pack the test split of public clip-benchmark shards")
    ] = ""

    @property
    def changes(self) -> bool:
        """Whether the flags change the published data set."""
        return self.random_split is not None or self.subset or self.resize is not None

    def raw_root(self) -> Path | None:
        """Return the folder of raw data sets, None if the flag is not given. Raises UsageError if it is no folder."""
        text = self.raw or os.environ.get("PROCAP_RAW")
        root = Path(text).expanduser() if text else None
        if root and not root.is_dir():
            flag = "--raw" if self.raw else "$PROCAP_RAW ="
            raise UsageError(
                f"{flag} {root} is {'a file' if root.exists() else 'not there'}; name the folder of raw data"
            )
        return root


@dataclass(frozen=True)
class ModeFlags:
    """Flags that stop a command early or repeat finished work."""

    dry_run: DryRun = False
    force: Annotated[bool, typer.Option("--force", help="forget what is already there and do it again")] = False


@dataclass(frozen=True)
class OutputFlags:
    """Flags that choose the output format."""

    json: Annotated[bool, typer.Option("--json", help="end with one line of JSON on stdout")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback of an error")] = False


def flat(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with every field of its dataclass parameters as a separate keyword parameter, as typer needs."""
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
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=inner[field.name]
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


def typed_names(context: Any) -> set[str]:
    """Return the parameters that were typed, even with their default value. context: typer's."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def command_line(*groups: Any) -> str:
    """Return the given flags of `groups` as they would be typed."""
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
