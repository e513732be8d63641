"""`procap bench runtime`: time training and inference of every method, and compare with the paper's table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from benchmarks.cli.flags import (
    Backbone,
    MethodNames,
    MethodOptions,
    OutputFlags,
    RuntimeFlags,
    SuiteClasses,
    Weights,
    command,
    flag,
    switch,
)
from benchmarks.cli.selection import runtime_config
from benchmarks.console.output import show, show_json
from benchmarks.runtime.settings import METHODS, SCALING, make_settings
from runner.environment import library_defaults, resolve_device

TARGET_MISSED = 4
BUDGET_TEXT = (
    "measure what fits, extrapolate and limit the rest, and mark it; 0: no limit [default: 150 for mini and 900 else "
    "on a CPU, no limit on a GPU]"
)


@dataclass(frozen=True)
class MeasureFlags:
    """Flags that choose what is measured."""

    methods: MethodNames = METHODS
    datasets: Annotated[str, flag("A,B", "photographs-102: made-up images, as many as in 16-shot Flowers102")] = ""
    classes: SuiteClasses = ""
    backbone: Backbone = ""
    pretrained: Weights = ""
    precision: Annotated[str, flag("fp32,bf16,fp16", "some of them [default: fp32]")] = ""
    option: MethodOptions = None
    budget: Annotated[float | None, flag("SECONDS", BUDGET_TEXT)] = None
    scaling: Annotated[str, flag("CLASSESxBATCHES|off", f"sizes, as in {SCALING}, the default with mini")] = ""
    check: Annotated[bool, switch("--check", "compare with the speed targets; chooses full size on a GPU")] = False


@command(
    "procap bench runtime",
    "procap bench runtime --backbone ViT-B/16 --pretrained random --budget 600",
    "procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --precision fp32,bf16",
    "procap bench runtime --check",
)
def bench_runtime(measured: MeasureFlags, runtime_flags: RuntimeFlags, output: OutputFlags) -> int:
    """Time training and inference of every method, as public code does it and as this program does.

    Seconds of ten epochs, images per second, memory, operations against the peak of this device, and accuracy, beside
    the paper's table. Nothing else should run on the machine. Exit code 1 if a part of the measurement failed, 4 if
    --check finds a target that is not met.
    """
    from benchmarks.runtime.benchmark import measure, write
    from benchmarks.runtime.speed_targets import NOT_MET, format_targets, list_targets

    library_defaults()
    device = resolve_device(runtime_flags.device)
    runtime = runtime_config(runtime_flags)
    settings = make_settings(runtime, device, **asdict(measured))
    report = measure(settings, runtime, device, check=measured.check)
    show(write(report, settings, runtime))
    targets = list_targets(report) if measured.check else []
    if measured.check:
        show("\n" + format_targets(targets))
    if output.json:
        show_json(report)
    if report["failed"]:
        return 1
    return TARGET_MISSED if any(target.state == NOT_MET for target in targets) else 0
