"""`procap train`."""

from __future__ import annotations

import typer

from benchmarks.cli.flags import EngineFlags, ModeFlags, OutputFlags, RecipeFlags, RuntimeFlags, SelectionFlags, flat
from benchmarks.console.help import PLAIN, examples

app = typer.Typer(**PLAIN)


@app.command(
    **examples(
        "procap train --methods maple --datasets shapes",
        "procap train --methods coop,procap --datasets shapes,digits --seeds 1,2,3 --epochs 10",
        "procap train --methods procap --datasets petals --option infonce=false --dry-run",
        "torchrun --standalone --nproc-per-node 4 --no-python procap train --methods procap --datasets petals",
    )
)
@flat
def train(
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    parallel: EngineFlags,
    doing: ModeFlags,
    output: OutputFlags,
) -> int:
    """Train methods on data sets. Finished runs are kept, interrupted ones go on where they stopped.

    Started by torchrun, all processes train each run together, with the numbers of one process.
    """
    from benchmarks.cli.train_eval import train as run

    return run(selection, training, place, parallel, doing, output)
