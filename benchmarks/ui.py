"""`procap ui`: MLflow's own pages over the results, on this machine alone, opened at the comparison of the runs."""

from __future__ import annotations

import json
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
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import quote

from benchmarks.output import note, show
from procap.errors import UserError
from runner.track import deliveries, sync_all
from runner.track_outbox import Delivery
from runner.track_store import Destination

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 10.0
# The page draws one line and one column per run: more than this is no comparison any more.
COMPARED = 40


def ui(
    results: Path, uri: str | None = None, port: int = 5000, open_browser: bool = False, runs: Sequence[str] = ()
) -> None:
    """Show the runs of `results` in MLflow until Ctrl-C or SIGTERM, sending first what the store has not got yet.

    A store with a server of its own is only pointed at; for any other one, a server is started on 127.0.0.1.
    runs: the runs to compare, by their path below `results` or any part of it; default all.
    Raises UserError when the port is taken, when there is nothing to show, when the server does not come up.
    """
    destination = Destination.choose(results, uri)
    # Found out before the sending, which takes longer.
    if not destination.is_server:
        check_port(port)
    summary = sync_all(results, uri)
    for run, why in summary.failed:
        note(f"not shown: {run}: {why}")
    chosen = choose(deliveries(results, uri), runs)
    if destination.is_server:
        _announce(destination.address, chosen, open_browser)
        return
    with server(destination, port) as process:
        _announce(f"http://{HOST}:{port}", chosen, open_browser)
        note("Ctrl-C stops it")
        try:
            process.wait()
        except KeyboardInterrupt:
            return
        raise UserError("the MLflow server ended by itself; start it again")


def choose(sent: dict[str, Delivery], runs: Sequence[str]) -> list[Delivery]:
    """The runs of `sent` whose path contains one of `runs` (all when empty). Raises UserError when there is none."""
    chosen = [delivery for name, delivery in sent.items() if not runs or any(part in name for part in runs)]
    if not chosen:
        what = f"no run matches {', '.join(runs)}" if runs and sent else "there is no run to show"
        raise UserError(f"{what}; `procap ls runs` names them, `procap train` or `procap demo` makes some")
    return chosen


def charts_page(address: str, chosen: Sequence[Delivery]) -> str:
    """The address of the charts of every run in the experiment: accuracy, speed, losses."""
    return f"{address}/#/experiments/{chosen[0].experiment_id}/runs?compareRunsMode=CHART"


def compare_page(address: str, chosen: Sequence[Delivery]) -> str | None:
    """The address that sets the `chosen` runs side by side; None when they are one or too many."""
    if not 2 <= len(chosen) <= COMPARED:
        return None
    experiments = sorted({delivery.experiment_id for delivery in chosen})
    runs, where = (quote(json.dumps(ids)) for ids in ([delivery.run_id for delivery in chosen], experiments))
    return f"{address}/#/compare-runs?runs={runs}&experiments={where}"


def check_port(port: int) -> None:
    """Raise UserError when something listens on `port` already."""
    with closing(socket.socket()) as visitor:
        answered = visitor.connect_ex((HOST, port)) == 0
    with closing(socket.socket()) as probe:
        # As the server will bind: a port that a stopped server has just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            why = "another program listens there" if answered else ""
        except OSError as error:
            why = error.strerror or str(error)
    if why:
        raise UserError(f"port {port} on {HOST} cannot be used: {why}; try --port {port % 65535 + 1}")


@contextmanager
def server(destination: Destination, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run `mlflow server` on 127.0.0.1 and give it once it answers; all its processes end with the block."""
    folder = destination.file.parent if destination.file else destination.results
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", destination.uri, "--artifacts-destination", str(folder / "mlartifacts")]
    # Without jobs it is two processes instead of ten; the rest keeps it from talking to anybody else.
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with tempfile.TemporaryFile() as log, _sigterm_as_interrupt():
        process = subprocess.Popen(
            command, env={**os.environ, **quiet}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_up(process, f"http://{HOST}:{port}", log)
            yield process
        finally:
            _stop(process)


def _announce(address: str, chosen: Sequence[Delivery], open_browser: bool) -> None:
    charts, side_by_side = charts_page(address, chosen), compare_page(address, chosen)
    show(f"MLflow: {charts}")
    if side_by_side:
        show(f"{len(chosen)} runs side by side: {side_by_side}")
    if open_browser and not webbrowser.open(side_by_side or charts):
        note("no browser to open; follow the address above")


def _wait_until_up(process: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    # A proxy of the environment is for other machines.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    patience = time.monotonic() + START_SECONDS
    while time.monotonic() < patience:
        if process.poll() is not None:
            break
        try:
            with direct.open(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    log.seek(0)
    said = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    raise UserError(f"the MLflow server did not start: {said[-1][:300] if said else 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
