"""`procap bench SUITE`: the experiments of the paper, by name, and those of a user's own file.

The suites are looked up when they are asked for, so that no other command waits for their modules.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks.cli.flags import EngineFlags, LaunchFlags, ModeFlags, OutputFlags, RuntimeFlags, SuiteFlags, flat
from benchmarks.console.help import PLAIN, examples


class SuiteGroup(TyperGroup):
    """The group of `procap bench`, which knows suites by name or file beside the commands that are written out."""

    def list_commands(self, ctx: Any) -> list[str]:
        from benchmarks.suites import ALL, suite_paths

        return [ALL, *dict.fromkeys([*suite_paths(), *super().list_commands(ctx)])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from benchmarks.suites import ALL, suite_paths

        if (written_out := super().get_command(ctx, cmd_name)) is not None:
            return written_out
        if cmd_name == ALL or cmd_name in suite_paths() or cmd_name.endswith(".py"):
            return command(cmd_name)
        return None


def command(name: str) -> Any:
    """The command of one suite, or of all; its help is what the suite's file says."""
    from benchmarks.suites import ALL, suite_named, suite_text

    if name == ALL:
        text, lines = (
            EVERYTHING,
            ["--profile mini --quick", "--data DATA --results RESULTS --launcher ray", "--dry-run"],
        )
    else:
        suite_named(name)
        text, lines = (
            suite_text(name),
            ["--quick", "--profile mini --dry-run", "--data DATA --results RESULTS --launcher ray"],
        )

    @flat
    def run(
        suited: SuiteFlags,
        many: LaunchFlags,
        place: RuntimeFlags,
        parallel: EngineFlags,
        doing: ModeFlags,
        output: OutputFlags,
        limit: Annotated[
            int | None, typer.Option(metavar="N", help="evaluate on the first N images only; results are marked")
        ] = None,
        price: Annotated[
            float | None,
            typer.Option(metavar="AMOUNT", min=0, help="of an hour of a GPU or machine: --dry-run says what it costs"),
        ] = None,
    ) -> int:
        from benchmarks.cli.bench import bench

        return bench(name, suited, many, place, parallel, doing, output, limit, price)

    alone = typer.Typer(**PLAIN)
    help_text = f"{text.strip()}\n\n{AGAIN}"
    alone.command(name=name, help=help_text, **examples(*[f"procap bench {name} {line}" for line in lines]))(run)
    return typer.main.get_command(alone)


EVERYTHING = """Every suite of the paper, in one go, and the report.

A run that several suites share is done once. With --datasets those suites keep their own that have a list of their own.
"""
AGAIN = "What has finished is never repeated, what was interrupted goes on: stop it anywhere and type it again."
