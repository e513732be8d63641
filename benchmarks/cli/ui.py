"""`procap ui`: start MLflow's UI on this machine and open the comparison of the selected runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from benchmarks.cli.flags import OpenBrowser, OutputFlags, Results, Tracking, command, flag
from benchmarks.console.output import note, plural, show
from benchmarks.console.parse import split_names
from benchmarks.report.links import charts_page, compare_page
from benchmarks.results.frame import open_results
from procap.errors import UsageError, UserError, check_names
from runner.environment import library_defaults
from runner.run_collection import read_collections
from runner.stop_signals import sigterm_as_interrupt
from runner.tracking.export import sync
from runner.tracking.store import TrackingStore
from shards.catalogue import find_or_none

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 3.0


@dataclass(frozen=True)
class SelectedRuns:
    """Runs in MLflow: their ids, and the search that finds them."""

    run_ids: Sequence[str]
    where: str


@command(
    "procap ui --results demo/results",
    "procap ui --suite base-to-novel --methods maple,procap",
    "procap ui --sweep rates --open",
    "procap ui --port 5001",
)
def ui(
    output: OutputFlags,
    suite: Annotated[str, flag("NAME", "compare runs of this suite")] = "",
    sweep: Annotated[str, flag("NAME", "compare runs of this sweep")] = "",
    methods: Annotated[str, flag("A,B", "compare runs of these methods")] = "",
    datasets: Annotated[str, flag("A,B", "compare runs on these data sets")] = "",
    results: Results = "results",
    tracking: Tracking = "",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="port on 127.0.0.1")] = 5000,
    open_browser: OpenBrowser = False,
) -> int:
    """Look at the runs in MLflow, on this machine only: its charts, and the runs side by side.

    Results that the store lacks are exported first. Ctrl-C stops the server; a store that is a server is only linked.
    """
    library_defaults()
    root = open_results(results)
    store = TrackingStore.choose(root, tracking or None)
    if not store.is_server:
        check_port(port)
        note("starting MLflow ...")
    selected = select_runs(
        root, store, suite=suite, sweep=sweep, methods=split_names(methods), datasets=split_names(datasets)
    )
    address = store.address.rstrip("/") if store.is_server else f"http://{HOST}:{port}"
    with nullcontext() if store.is_server else server(store, port) as process:
        charts = charts_page(address, store.experiment_id, selected.where)
        side_by_side = compare_page(address, store.experiment_id, selected.run_ids)
        show(f"MLflow, {plural(len(selected.run_ids), 'run')}: {charts}")
        if side_by_side:
            show(f"{len(selected.run_ids)} runs side by side, with parallel coordinates: {side_by_side}")
        if open_browser and not webbrowser.open(side_by_side or charts):
            note("no browser to open; follow the address above")
        if process is None:
            return 0
        note("Ctrl-C stops it")
        try:
            process.wait()
        except KeyboardInterrupt:
            return 0
        raise UserError("the MLflow server ended by itself; start it again")


def select_runs(
    results: Path,
    store: TrackingStore,
    *,
    suite: str = "",
    sweep: str = "",
    methods: Sequence[str] = (),
    datasets: Sequence[str] = (),
) -> SelectedRuns:
    """Export missing results, and select runs. Raises UsageError for a suite or sweep that was never started here."""
    if suite and sweep:
        raise UsageError("--suite and --sweep name one collection of runs each: give one of them")
    terms, kind, name = ["tags.method IS NOT NULL"], "suite" if suite else "sweep", suite or sweep
    if name:
        check_names(kind, [name], [one.name for one in read_collections(results) if one.kind == kind])
        terms = [f"tags.`{kind}.{name}` = 'yes'"]
    summary = sync(store.open())
    for run, reason in summary.failed:
        note(f"not shown: {run}: {reason}")
    found = list(store.search(terms[0]))
    full = [found_set.name if (found_set := find_or_none(name)) else name for name in datasets]
    for tag, names in (("method", methods), ("dataset", full)):
        values = sorted({run.data.tags[tag] for run in found})
        check_names(f"{tag} among these runs", names, values)
        if names:
            # MLflow's search has no OR.
            terms += [f"tags.{tag} != '{other}'" for other in values if other not in names]
            found = [run for run in found if run.data.tags[tag] in names]
    if not found:
        raise UserError("there is no run to show; `procap train` or `procap demo` makes some")
    return SelectedRuns([run.info.run_id for run in found], " AND ".join(terms))


def check_port(port: int) -> None:
    """Raise UserError when `port` cannot be bound or something listens there."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"port {port} on {HOST} cannot be used: {reason}; try --port {port % 65535 + 1}") from error


@contextmanager
def server(store: TrackingStore, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `mlflow server` on 127.0.0.1 and yield once it answers; all its processes end with the block."""
    folder = store.file.parent if store.file else store.results
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", (folder / "mlartifacts").resolve().as_uri()]
    # Requests under another name come from pages of other sites, whose names resolve to this machine.
    command += ["--allowed-hosts", f"{HOST}:{port},localhost:{port}", "--cors-allowed-origins", f"http://{HOST}:{port}"]
    environment = {
        **os.environ,
        # Pass the URI in the environment: it may contain a password, and other users can read command lines.
        "MLFLOW_BACKEND_STORE_URI": store.uri,
        # Without job execution the server has two processes instead of ten. Telemetry is off.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "false",
    }
    with tempfile.TemporaryFile() as log, sigterm_as_interrupt():
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_up(process, f"http://{HOST}:{port}", log)
            yield process
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS)
                    break


def _wait_until_up(process: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    # Ignore proxies from the environment for requests to this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    raise UserError(f"the MLflow server did not start: {lines[-1][:300] if lines else 'it printed nothing'}")
