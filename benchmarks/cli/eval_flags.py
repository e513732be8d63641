"""`procap eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import ModeFlags, OutputFlags, RecipeFlags, RuntimeFlags, SelectionFlags, flat
from benchmarks.console.help import PLAIN, examples

app = typer.Typer(**PLAIN)


@app.command(
    name="eval",
    **examples(
        "procap eval results/base/shapes/maple/mini/16shot/seed1-3fa29c10",
        "procap eval --methods maple --datasets shapes --targets shapes-sketch,digits:all",
        "procap eval --methods zeroshot --datasets tiles --limit 50",
    ),
)
@flat
def evaluate(
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    doing: ModeFlags,
    output: OutputFlags,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="run folders, instead of names")] = None,
    targets: Annotated[
        str,
        typer.Option(
            metavar="SET[:CLASSES[:SPLIT]]",
            help="where to test, comma list [default: base and novel classes of the run's own data set]",
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="the first N images only; the result is marked")
    ] = None,
    no_feature_cache: Annotated[
        bool, typer.Option("--no-feature-cache", help="neither read nor keep image features")
    ] = False,
) -> int:
    """Evaluate trained runs on any target.

    Methods that put no prompts into the image tower share its features of a test split, kept in the folder features of
    the cache (2 KB an image at width 512; delete it at will). An evaluation that found them there gives the
    same accuracy but reports no speed; --force computes them again.
    """
    from benchmarks.cli.train_eval import evaluate as run

    return run(runs or [], targets, limit, selection, training, place, doing, output, cached=not no_feature_cache)
