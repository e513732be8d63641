"""`procap bench SUITE`: the experiments of the paper, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli_help import examples
from benchmarks.flags import Doing, Many, Output, Parallel, Place, Suited, flat


def add(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(
        name="base-to-novel",
        **examples(
            "procap bench base-to-novel --quick",
            "procap bench base-to-novel --world mini --methods maple,procap --seeds 1,2,3",
            "procap bench base-to-novel --data /shared/shards --results /shared/results --on ray",
            "procap bench base-to-novel --world paper --dry-run",
        ),
    )(base_to_novel)


@flat
def base_to_novel(
    suited: Suited,
    many: Many,
    place: Place,
    parallel: Parallel,
    doing: Doing,
    output: Output,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="evaluate on the first N images only; results are marked")
    ] = None,
) -> int:
    """Train on base classes, test on base and novel ones, and print the table.

    What has finished is never repeated, what was interrupted goes on: stop it anywhere and type it again.
    """
    from benchmarks.commands_suite import suite

    return suite("base-to-novel", suited, many, place, parallel, doing, output, limit)
