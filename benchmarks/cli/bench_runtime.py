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
)
from benchmarks.cli.selection import runtime_config
from benchmarks.console.output import show, show_json
from benchmarks.runtime.settings import EPOCHS, METHODS, make_settings
from runner.environment import library_defaults, resolve_device


@dataclass(frozen=True)
class MeasureFlags:
    """Flags that choose what is measured."""

    methods: MethodNames = METHODS
    datasets: Annotated[str, flag("A,B", "photographs-102: made-up images, as many as in 16-shot Flowers102")] = ""
    classes: SuiteClasses = ""
    backbone: Backbone = ""
    pretrained: Weights = ""
    precision: Annotated[str, flag("fp32,bf16,fp16", "comma-separated list [default: fp32]")] = ""
    option: MethodOptions = None
    epochs: Annotated[int, flag("N", "epochs of each training", min=1)] = EPOCHS


@command(
    "procap bench runtime",
    "procap bench runtime --backbone ViT-B/16 --pretrained random --epochs 1",
    "procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --precision fp32,bf16",
)
def bench_runtime(measured: MeasureFlags, runtime_flags: RuntimeFlags, output: OutputFlags) -> int:
    """Time training and inference of every method, as public code does it and as this program does.

    The table shows seconds of training, images per second, memory and accuracy next to the paper's. Nothing else should
    run on the machine.
    """
    from benchmarks.runtime.benchmark import measure, write

    library_defaults()
    device = resolve_device(runtime_flags.device)
    runtime = runtime_config(runtime_flags)
    settings = make_settings(runtime, device, **asdict(measured))
    report = measure(settings, runtime, device)
    show(write(report, settings, runtime))
    if output.json:
        show_json(report)
    return 0
