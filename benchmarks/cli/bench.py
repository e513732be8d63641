"""Define `procap bench` with a command for each suite; `run_suites.bench` is what they do."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from benchmarks.cli import flags
from benchmarks.cli.config_file import ConfigFlags
from benchmarks.cli.run_suites import bench
from benchmarks.suites import ALL, SUITES, load_suite, suite_help

ALL_TEXT = """Every suite of the paper, in one go, and the report.

A run that several suites share is done once. With --datasets all suites train on the named sets alone; those that
cannot run on a user's own set are left out.
"""
RESUME_TEXT = (
    "Finished runs are never repeated and interrupted ones are resumed: stop the command at any time and repeat it."
)


class SuiteGroup(TyperGroup):
    """List the commands of `procap bench`: one for each suite, by name or file, and `all`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [ALL, *SUITES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return suite_command(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            titles = [(name, load_suite(name).title) for name in SUITES]
            formatter.write_dl([(ALL, "every suite of the paper, and the report"), *titles])


app = typer.Typer(
    help="Run the experiments of the paper, by name, or a suite of your own, by file.\n\n"
    "`procap bench SUITE --help` lists the options, also with a file as SUITE.",
    cls=SuiteGroup,
    **flags.PLAIN,
)


@app.callback(
    **flags.examples(
        "procap bench all --profile mini --quick", "procap bench base-to-novel --help", "procap bench my_suite.py"
    )
)
def group() -> None:
    pass


def suite_command(name: str) -> Any:
    """Make the command of one suite, or of all; its help is the docstring of the suite's file."""
    lines = ["--profile mini --quick", "--data DATA --results RESULTS --launcher ray", "--config bench.yaml --dry-run"]
    text = ALL_TEXT if name == ALL else suite_help(name)

    @flags.command(*(f"procap bench {name} {line}" for line in lines), help=f"{text.strip()}\n\n{RESUME_TEXT}")
    def run(
        file: ConfigFlags,
        suite: flags.SuiteFlags,
        launch: flags.LaunchFlags,
        runtime: flags.EngineFlags,
        mode: flags.ModeFlags,
    ) -> int:
        file.save(suite, launch, runtime)
        return bench(name, suite, launch, runtime, mode)

    return typer.main.get_command(run.app)  # type: ignore[attr-defined]
