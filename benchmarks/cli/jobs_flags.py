"""`procap submit` and `procap jobs`: commands sent to a Ray cluster, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks.cli.flags import Output, flat
from benchmarks.console.help import PLAIN, examples
from procap.errors import UsageError

ADDRESS = typer.Option(
    metavar="URL",
    help="the cluster's dashboard [default: $RAY_API_SERVER_ADDRESS, else $RAY_ADDRESS, else http://127.0.0.1:8265]",
)
jobs_app = typer.Typer(help="List, follow and stop what was sent to a cluster.", **PLAIN)


def refuse_undivided(words: Sequence[str]) -> None:
    """Raise UsageError where the command to send is not set apart: its flags would be taken for those of submit."""
    if words[:1] == ["submit"] and "--" not in words and not {"-h", "--help"} & set(words):
        raise UsageError("put -- before the command that is sent: procap submit [OPTIONS] -- bench base-to-novel ...")


def add(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command(
        **examples(
            "procap submit -- bench base-to-novel --on ray --data /shared/data --results /shared/results",
            "procap submit --address http://head:8265 --no-wait -- sweep space.yaml --data s3://lab/data "
            "--results s3://lab/results",
            "procap submit --env NCCL_DEBUG=INFO --dry-run -- table --results /shared/results",
        )
    )(submit)
    jobs_app.callback(
        invoke_without_command=True,
        **examples("procap jobs", "procap jobs follow NAME", "procap jobs stop NAME --address http://head:8265"),
    )(jobs)
    jobs_app.command(**examples("procap jobs follow bench-1", "procap jobs follow bench-1 --json"))(follow)
    jobs_app.command(**examples("procap jobs stop bench-1"))(stop)
    app.add_typer(jobs_app, name="jobs")


@flat
def submit(
    output: Output,
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="any command of procap that works unattended")
    ],
    address: Annotated[str, ADDRESS] = "",
    name: Annotated[str, typer.Option(metavar="ID", help="of the job [default: made of command and time]")] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="print the id and leave")] = False,
    installed: Annotated[
        bool, typer.Option("--installed", help="run what is installed on the cluster instead of this working tree")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE]", help="a variable the job gets, repeatable; readable by all, so no secrets"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be sent, send nothing")] = False,
) -> int:
    """Run a command of procap on a Ray cluster, follow its log, and end with its exit code.

    The working tree travels along, and files that the command names; data and results do not: name them as all nodes
    see them, by an absolute path or a URL. Ctrl-C leaves the job running. Exit code 143: the job was stopped.
    """
    from benchmarks.cli.jobs import Sending
    from benchmarks.cli.jobs import submit as run

    flags = Sending(address, name, not no_wait, installed, tuple(env or ()), dry_run)
    return run(words, flags, output)


@flat
def jobs(context: typer.Context, output: Output, address: Annotated[str, ADDRESS] = "") -> int:
    """List what was sent to a cluster, the oldest first; follow or stop one of the jobs."""
    if context.invoked_subcommand is not None:
        context.obj = address
        return 0
    from benchmarks.cli.jobs import jobs as run

    return run(address, output)


@flat
def follow(
    context: typer.Context,
    output: Output,
    name: Annotated[str, typer.Argument(metavar="ID", help="see `procap jobs`")],
    address: Annotated[str, ADDRESS] = "",
) -> int:
    """Show a job's log from its beginning, follow it, and end with the exit code of the job."""
    from benchmarks.cli.jobs import follow as run

    return run(name, address or context.obj or "", output)


@flat
def stop(
    context: typer.Context,
    output: Output,
    name: Annotated[str, typer.Argument(metavar="ID", help="see `procap jobs`")],
    address: Annotated[str, ADDRESS] = "",
) -> int:
    """Ask a job to stop. The same command goes on later; its runs on nodes lose the seconds since their last state."""
    from benchmarks.cli.jobs import stop as run

    return run(name, address or context.obj or "", output)
