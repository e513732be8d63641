"""`procap demo`: the suite base-to-novel on a few data sets, offline, in about two minutes on two CPU cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import flags
from benchmarks.cli.run_suites import bench

SUITE = "base-to-novel"
METHODS = ("zeroshot", "coop", "maple", "procap")
DATASETS = ("shapes", "textures", "petals", "digits")
QUICK_DATASETS = ("digits",)


@flags.command("procap demo", "procap demo --out /tmp/demo", "procap demo --quick --json")
def demo(
    out: Annotated[Path, flags.flag("FOLDER", "folder of data and results")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="one small data set and two epochs: does it run?")] = False,
    device: flags.Device = "auto",
    tracking: flags.Tracking = "",
    limit: flags.Limit = None,
    dry_run: flags.DryRun = False,
) -> int:
    """Run a small benchmark end to end, offline, on a CPU.

    CoOp, MaPLe and ProCAP are trained on base classes. They and zero-shot CLIP are tested on base and novel classes.
    Interrupt the demo at any time; the same command resumes it.
    """
    methods, datasets = ",".join(METHODS), ",".join(QUICK_DATASETS if quick else DATASETS)
    suite = flags.SuiteFlags(profile="mini", methods=methods, datasets=datasets, seeds="1", quick=quick, limit=limit)
    runtime = flags.EngineFlags(str(out / "data"), str(out / "results"), device=device, tracking=tracking)
    mode = flags.ModeFlags(dry_run=dry_run)
    return bench(SUITE, suite, flags.LaunchFlags(), runtime, mode)
