"""`procap submit`: run a command on a Ray cluster, follow its log, end with its exit code."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.flags import OutputFlags, command
from benchmarks.console.output import note, show, show_json
from benchmarks.suites import ALL, load_suite
from benchmarks.suites.planning import find_suite
from procap.errors import UsageError, UserError
from procap.methods import method_class
from procap.methods.plugins import find_plugins
from runner.stop_signals import Interrupted, sigterm_as_interrupt

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


# Flags behind the first word belong to the command that is sent.
@command(
    "procap submit -- bench base-to-novel --launcher ray --data /shared/data --results /shared/results",
    "procap submit --address http://head:8265 --no-wait -- sweep space.yaml --results s3://lab/results",
    "procap submit --env NCCL_DEBUG=INFO --dry-run -- table --results /shared/results",
    allow_interspersed_args=False,
)
def submit(
    output: OutputFlags,
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="the command to run, without `procap`")],
    address: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="the dashboard [default: $RAY_API_SERVER_ADDRESS, else $RAY_ADDRESS, else http://127.0.0.1:8265]",
        ),
    ] = "",
    name: Annotated[str, typer.Option(metavar="ID", help="of the job [default: chosen by Ray]")] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="print the job's ID and exit")] = False,
    installed: Annotated[
        bool, typer.Option("--installed", help="run what is installed on the cluster instead of this working tree")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE]", help="environment variable of the job, repeatable; no secrets"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the request and what would be sent")] = False,
) -> int:
    """Run a command on a Ray cluster, follow its log, and end with its exit code.

    Ray packs the working tree, the command's own files, and the packages of installed plug-ins. Data and results are
    not sent: name them by an absolute path that all nodes see, or a URL. Ctrl-C leaves the job running; `ray job list`,
    `ray job logs -f ID` and `ray job stop ID` do the rest.
    """
    from cluster.address import dashboard_url
    from cluster.submit import check_command, collect_sources, connect, job_environment, make_request, translate_errors
    from runner.run_collection import SUITE_FILE_VARIABLE
    from shards.remote import warn_of_stall

    words = words[1:] if words[0] == "procap" else words
    if words[:1] in ([], ["submit"]):
        raise UsageError("name the command to run on the cluster, as in `procap submit -- sweep space.yaml`")
    tree = Path(__file__).resolve().parents[2]
    if not installed and not (tree / "pyproject.toml").is_file():
        raise UsageError("this program is installed, not run from a source tree that could be sent: add --installed")
    methods = _find_suite_files(words)
    check_command(words)
    given = {part for word in words for part in re.split("[,=]", word)}
    # Refuse a plug-in that cannot be loaded, as the command would here.
    for name in sorted((given if given & {"--methods", "--method"} else given | methods) & find_plugins().keys()):
        method_class(name)
    environment, source, url = job_environment(env or ()), None if installed else tree, dashboard_url(address)
    suite = next((word for word in words[1:2] if words[0] == "bench" and word.endswith(".py")), "")
    if suite and Path(suite).is_file():
        # Results record the file under its name here, where tables are made.
        environment[SUITE_FILE_VARIABLE] = str(Path(suite).resolve())
    with collect_sources(words, source) as sources:
        request = make_request(
            sources.command, name=name, environment=environment, working_dir=sources.folder, tree=source
        )
        if dry_run:
            sent: dict[str, Any] = {"tree": str(source) if source else None, "files": sources.files}
            sent |= {"methods": sources.methods, "suites": sources.suites}
            show(json.dumps({"address": url, **request, "sent": sent}, indent=None if output.json else 2))
            return 0
        client = connect(url)
        with warn_of_stall(url), translate_errors(url):
            job = client.submit_job(**request)
    plug_ins = sorted({*sources.methods, *sources.suites})
    more = f" with the plug-ins {', '.join(plug_ins)}" if plug_ins else ""
    sent_line = f"job {job} sent to {url}{more}"
    if not no_wait:
        return _follow(client, job, url, sent_line, output)
    note(sent_line)
    show_json({"job": job}) if output.json else show(job)
    return 0


def _find_suite_files(words: list[str]) -> set[str]:
    """Replace the names of recorded suites by their files; returns the methods of the suite that `bench` runs.

    Raises UsageError for a suite that `bench` does not know.
    """
    name = next((word for word in words[1:2] if not word.startswith("-")), "")
    if words[0] == "bench" and name not in ("", ALL):
        return {*load_suite(name).methods}
    if words[0] in ("table", "report"):
        flags = dict(itertools.pairwise(word for given in words for word in given.split("=", 1)))
        for place, name in enumerate(itertools.takewhile(lambda word: not word.startswith("-"), words[1:]), 1):
            # Sweeps and other tables have names too, and results at a URL are not read.
            with suppress(UserError):
                words[place] = find_suite(name, Path(flags.get("--results", "results"))).typed or name
    return set()


def _follow(client: JobSubmissionClient, job: str, url: str, sent_line: str, output: OutputFlags) -> int:
    """Print the job's log until it ends; a signal ends this command, and not the job."""
    from cluster.submit import exit_code, follow, translate_errors

    # With --json stdout is reserved for the JSON line at the end.
    stream = sys.stderr if output.json else sys.stdout
    try:
        with translate_errors(url), sigterm_as_interrupt() as terminated:
            note(sent_line)
            details = follow(client, job, lambda text: print(text, end="", file=stream, flush=True))
    except KeyboardInterrupt:
        flag = f"--address {shlex.quote(url)}"
        running = f"job {job} keeps running: `ray job logs -f {flag} {job}`, `ray job stop {flag} {job}`"
        raise Interrupted(terminated[0] if terminated else signal.SIGINT, running) from None
    code = exit_code(details)
    reason = f": {details.message}" if details.driver_exit_code is None and code and details.message else ""
    note(f"job {job}: {details.status.value.lower()}, exit code {code}{' '.join(reason.split())[:500]}")
    if output.json:
        show_json({"job": job, "status": details.status.value, "exit_code": code})
    return code
