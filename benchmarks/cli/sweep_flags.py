"""`procap sweep`: hyperparameters and seeds, searched with Ray Tune."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import (
    EngineFlags,
    LaunchFlags,
    OutputFlags,
    RecipeFlags,
    RuntimeFlags,
    SelectionFlags,
    SweepFlags,
    flat,
    typed_names,
)
from benchmarks.console.help import PLAIN, examples

app = typer.Typer(**PLAIN)


@dataclass(frozen=True)
class SweepSelection(SelectionFlags):
    """As other commands have it, but for classes: held-out ones are a matter of the metric."""

    classes: Annotated[
        str,
        typer.Option(metavar="base|all", help="the classes to train on; --metric held-out takes a half of base"),
    ] = ""


@app.command(
    **examples(
        "procap sweep lr.yaml",
        "procap sweep --methods procap --datasets digits --vary lr=1e-4,1e-3 --vary depth=3,9 --seeds 1,2,3",
        "procap sweep --methods coop --datasets shapes --vary 'lr=log(1e-4,1)' --search tpe --trials 9 --stop asha",
        "procap sweep lr.yaml --launcher ray --address cluster:6379 --hours 4",
        "procap sweep lr.yaml --dry-run",
    )
)
@flat
def sweep(
    context: typer.Context,
    searched: SweepFlags,
    selection: SweepSelection,
    training: RecipeFlags,
    many: LaunchFlags,
    place: RuntimeFlags,
    parallel: EngineFlags,
    output: OutputFlags,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="YAML with the flags below as keys, but for --dry-run, --json and -v; a typed flag counts more",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")] = False,
) -> int:
    """Search fields of a run for the best figure on validation images, averaged over seeds and data sets.

    Test images are never looked at. Every run is an ordinary one: what is finished is never repeated, whoever did it.
    Stop the sweep anywhere and type it again: it goes on.
    """
    from benchmarks.cli.sweep import sweep as run
    from benchmarks.sweeps.file import Asked, with_file

    asked = Asked(searched, selection, training, many, place, parallel)
    return run(with_file(asked, file, typed_names(context)), dry_run, output)
