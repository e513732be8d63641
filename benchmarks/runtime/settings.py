"""Define the flags of the runtime benchmark and convert them to settings for a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.console.parse import parse_integers, parse_methods, split_names
from procap.errors import UsageError
from runner.acceleration import Acceleration
from runner.environment import num_decoders

if TYPE_CHECKING:
    import torch

    from benchmarks.results.variant import SuiteOptions
    from runner.config import RunConfig, RuntimeConfig

SHOTS, SEED = 16, 1
METHOD_OPTIONS: dict[str, dict[str, Any]] = {"maple": {"n_ctx": 4}}
"""Options of methods: the paper's MaPLe-style has as many tokens as ProCAP, and ProCAP's recipe."""
SCALING = "10,50,200x4,32"
CHECK_SCALING = "102,10,500x32"
"""Sizes of the check on a GPU: the table's own number of classes, and one batch."""
QUICK_BUDGET, SMALL_BUDGET, FULL_BUDGET, CHECK_BUDGET = 60.0, 150.0, 900.0, 420.0
"""Seconds: of the suite with --quick, of mini and of another backbone on a CPU, and of the check on a GPU."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    accelerations: those of fast mode; reference mode has none. steps: training steps to measure, the rest is
    extrapolated and marked; None trains to the end. budget: seconds of measuring after which training is extrapolated
    and evaluation limited; None: no limit. scaling: numbers of classes and batches.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    modes: tuple[str, ...]
    precisions: tuple[str, ...]
    backbone: str
    pretrained: str | None
    epochs: int
    steps: int | None
    repeats: int
    batch: int
    test_batch: int
    workers: int
    accelerations: Acceleration
    budget: float | None
    scaling: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Flags:
    """The flags of `procap bench runtime`; lists are comma lists."""

    methods: Annotated[str, typer.Option(metavar="A,B", help="methods to compare")] = "zeroshot,maple,procap"
    datasets: Annotated[
        str,
        typer.Option(metavar="A,B", help="data sets; photographs-102: made-up images, as many as 16-shot Flowers102"),
    ] = ""
    modes: Annotated[str, typer.Option(metavar="A,B", help="reference works as public code does")] = "reference,fast"
    precision: Annotated[str, typer.Option(metavar="fp32,bf16", help="one or both [default: fp32]")] = ""
    backbone: Annotated[str, typer.Option(metavar="NAME", help="CLIP [default: mini]")] = ""
    pretrained: Annotated[str, typer.Option(metavar="TAG|FILE", help="weights of the backbone")] = ""
    random: Annotated[bool, typer.Option("--random", help="random weights; no accuracy is shown then")] = False
    epochs: Annotated[int, typer.Option(metavar="N", help="of every training")] = 10
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="measure N training steps and extrapolate, which the table says")
    ] = None
    repeats: Annotated[int, typer.Option(metavar="N", help="rounds of evaluation and of every size")] = 5
    batch: Annotated[int, typer.Option(metavar="N", help="images per training step")] = 32
    test_batch: Annotated[int, typer.Option(metavar="N", help="images per evaluated batch")] = 100
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="measure what fits, extrapolate and limit the rest, and mark it; 0: no limit "
            "[default: 150 for mini and 900 else on a CPU, no limit on a GPU]",
        ),
    ] = None
    scaling: Annotated[
        str, typer.Option(metavar="CLASSESxBATCHES|off", help=f"sizes, as in {SCALING}, the default with mini")
    ] = ""
    check: Annotated[
        bool, typer.Option("--check", help="compare with the speed targets; chooses full size on a GPU")
    ] = False


def flags_of_options(options: SuiteOptions) -> Flags:
    """Convert options of the suite `runtime` to flags; its table has no sizes."""
    profile = options.profile
    return Flags(
        methods=",".join(options.methods),
        datasets=",".join(options.datasets),
        precision=options.precision or profile.precision,
        backbone=options.backbone or profile.backbone,
        pretrained=(options.pretrained if options.backbone else profile.pretrained) or "",
        budget=QUICK_BUDGET if options.quick else None,
        scaling="off",
    )


def make_settings(flags: Flags, runtime: RuntimeConfig, device: torch.device) -> Settings:
    """Make the settings for the flags on `device`. Raises UsageError for impossible ones."""
    from procap.weights.loading import canonical_name

    on_gpu = device.type == "cuda"
    check_on_gpu = flags.check and on_gpu
    full = check_on_gpu and not flags.backbone
    if flags.random and flags.pretrained:
        raise UsageError("--random and --pretrained both name weights: give one of them")
    for name in ("epochs", "repeats", "batch", "test_batch", "steps"):
        if (value := getattr(flags, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    if flags.budget is not None and not 0 <= flags.budget < math.inf:
        raise UsageError(f"--budget {flags.budget:g}: a number of seconds is needed, 0 for no limit")
    backbone, pretrained = canonical_name(
        flags.backbone or ("ViT-B-16" if full else "mini"),
        "random" if flags.random or full else flags.pretrained or None,
    )
    small = backbone == "mini"
    budget = flags.budget
    if budget is None and not on_gpu:
        budget = SMALL_BUDGET if small else FULL_BUDGET
    elif budget is None and flags.check:
        budget = CHECK_BUDGET
    sizes = CHECK_SCALING if check_on_gpu else SCALING if on_gpu or small else "off"
    return Settings(
        methods=tuple(parse_methods(flags.methods)),
        datasets=tuple(split_names(flags.datasets) or (["digits", "tiles"] if small else ["photographs-102"])),
        modes=_parse_choices("modes", flags.modes, ("reference", "fast")),
        precisions=_parse_choices("precision", flags.precision or ("bf16" if full else "fp32"), ("fp32", "bf16")),
        backbone=backbone,
        pretrained=pretrained,
        epochs=flags.epochs,
        steps=flags.steps,
        repeats=flags.repeats,
        batch=flags.batch,
        test_batch=flags.test_batch,
        workers=num_decoders(runtime.workers, device),
        accelerations=Acceleration.of(runtime.accelerate, device),
        budget=budget or None,
        scaling=_parse_scaling(flags.scaling or sizes),
    )


def _parse_choices(flag: str, text: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    names = split_names(text)
    for name in names:
        if name not in choices:
            raise UsageError(f"--{flag} {name}: known are {', '.join(choices)}")
    return tuple(names)


def _parse_scaling(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if text == "off":
        return (), ()
    classes, _, batches = text.partition("x")
    sizes = tuple(tuple(parse_integers(part, "--scaling", SCALING)) for part in (classes, batches or "32"))
    if not all(part and min(part) for part in sizes):
        raise UsageError(f"--scaling {text}: classes and images of 1 or more are needed, as in {SCALING}, or off")
    return sizes[0], sizes[1]


def run_config(
    method: str, precision: str, settings: Settings, *, dataset: str = "shapes", data: Path | None = None,
    batch: int | None = None,
) -> RunConfig:  # fmt: skip
    """Configure a run with ProCAP's recipe for the data set, so that only the methods differ.

    data: the folder of packed sets that the catalogue does not list. batch: images of a batch.
    """
    from runner.config import plan_run

    return plan_run(
        method=method,
        dataset=dataset,
        classes="all",
        shots=SHOTS,
        seed=SEED,
        backbone=settings.backbone,
        pretrained=settings.pretrained,
        precision=precision,
        recipe="procap",
        overrides={
            "epochs": settings.epochs,
            "batch_size": batch or settings.batch,
            "test_batch_size": batch or settings.test_batch,
        },
        options=METHOD_OPTIONS.get(method, {}),
        data=data,
    )
