"""`procap submit`: run a command on a Ray cluster, follow its log, return its exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.flags import command
from benchmarks.console.output import VERBOSE, note, show, show_json
from cluster.ray_cluster import set_auth_mode
from procap.errors import UsageError, UserError
from runner.provenance import SOURCE_VARIABLE, source_state
from runner.stop_signals import Interrupted

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

TREE = Path(__file__).resolve().parents[2]
RUNTIME_ENV = TREE / "cluster" / "runtime_env.yaml"
MANAGER_LINE = re.compile(r"^.*\tINFO job_manager\.py.*\n", re.MULTILINE)


# Flags behind the first word belong to the command that is sent.
@command(
    "procap submit -- bench base-to-novel --launcher ray --data /shared/data --results /shared/results",
    "procap submit --address http://head:8265 --no-wait -- sweep --param lr=0.01,0.02 --results s3://lab/results",
    allow_interspersed_args=False,
)
def submit(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="the command to run, without `procap`")],
    address: Annotated[
        str, typer.Option(metavar="URL", help="URL of the Ray dashboard [default: $RAY_API_SERVER_ADDRESS, else auto]")
    ] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="print the job ID and exit")] = False,
) -> int:
    """Run a command on a Ray cluster: upload this working tree, follow the log, return the exit code.

    Data and results are not uploaded: use absolute paths that all nodes see, or URLs. Ctrl-C leaves the job running;
    `ray job list`, `ray job logs -f ID` and `ray job stop ID` manage jobs.
    """
    import yaml

    if not RUNTIME_ENV.is_file():
        raise UsageError("procap submit uploads a source tree, and this procap is installed without one: use `ray job`")
    set_auth_mode()
    from ray.job_submission import JobSubmissionClient

    for handler in () if VERBOSE.get() else logging.getLogger("ray").handlers:
        # Loggers below "ray" have their own level.
        handler.setLevel(logging.ERROR)
    environment = yaml.safe_load(RUNTIME_ENV.read_text(encoding="utf-8")) | {"working_dir": str(TREE)}
    # The uploaded tree has no git history, and results record the commit.
    environment["env_vars"][SOURCE_VARIABLE] = json.dumps(source_state(TREE))
    # With `exec` the job gets the signals and the exit code of the command, not those of a shell.
    entrypoint = f"exec python -m benchmarks.cli {shlex.join(words)}"
    try:
        client = JobSubmissionClient(address or None)
        job = client.submit_job(entrypoint=entrypoint, runtime_env=environment)
        note(f"job {job} runs on {client.get_address()}")
        code = 0 if no_wait else _follow(client, job)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "the job keeps running: see `ray job list` and `ray job stop ID`") from None
    except (RuntimeError, ValueError) as error:
        raise UserError(f"Ray did not run the job: {error}") from error
    show_json({"job": job, "exit_code": None if no_wait else code})
    if no_wait:
        show(job)
    return code


def _follow(client: JobSubmissionClient, job: str) -> int:
    """Print the log of a job until it ends; returns its exit code, 128 + N after signal N."""

    async def print_log() -> None:
        async for text in client.tail_job_logs(job):
            print(text if VERBOSE.get() else MANAGER_LINE.sub("", text), end="", flush=True)

    asyncio.run(print_log())
    # The log can end before Ray has recorded the end of the job.
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(1)
    status, code = details.status.value, details.driver_exit_code
    note(f"job {job}: {status.lower()} {'' if code is not None or status == 'SUCCEEDED' else details.message}".strip())
    if code is None:
        return {"SUCCEEDED": 0, "STOPPED": 128 + signal.SIGTERM}.get(status, 1)
    # A negative code is the signal that ended the process, as in Python's subprocess.
    return 128 - code if code < 0 else code
