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
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

from benchmarks.cli.ui_view import SHOWN, condition, save_view, view_state
from benchmarks.console.output import note, plural, show
from procap.errors import UsageError, UserError, unknown_name
from runner.collection import Collection, read_collections
from runner.stop_signals import sigterm_as_interrupt
from runner.tracking.outbox import Delivery
from runner.tracking.store import Destination, first_line, open_store, quiet_libraries
from runner.tracking.tracker import deliveries, sync_all

HOST = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 10.0
# The page draws one line and one column per run: more than this is no comparison any more.
COMPARED = 40


@dataclass(frozen=True)
class Wanted:
    """Which runs are to be compared. runs: parts of their paths below the results; every field narrows further."""

    runs: Sequence[str] = ()
    suite: str = ""
    sweep: str = ""
    methods: Sequence[str] = ()
    datasets: Sequence[str] = ()

    @property
    def title(self) -> str:
        collection = f"suite {self.suite}" if self.suite else f"sweep {self.sweep}" if self.sweep else ""
        parts = [collection, ", ".join(self.methods), ", ".join(self.datasets), ", ".join(self.runs)]
        return " · ".join(part for part in parts if part) or "all runs"


@dataclass(frozen=True)
class Chosen:
    """The runs to compare, and the search that finds them in MLflow."""

    deliveries: list[Delivery]
    where: str


def ui(
    results: Path, uri: str | None = None, port: int = 5000, open_browser: bool = False, wanted: Wanted | None = None
) -> None:
    """Show the runs of `results` in MLflow until Ctrl-C or SIGTERM, sending first what the store has not got yet.

    A store with a server of its own is only pointed at; for any other one, a server is started on 127.0.0.1.
    wanted: the runs to compare; default all.
    Raises UserError when the port is taken, when there is nothing to show, when the server does not come up, UsageError
    for a name that no run has.
    """
    wanted = wanted or Wanted()
    destination = Destination.choose(results, uri)
    # Found out before the sending, which takes longer.
    if not destination.is_server:
        check_port(port)
    collection = find_collection(results, wanted)
    summary = sync_all(results, uri)
    for run, why in summary.failed:
        note(f"not shown: {run}: {why}")
    chosen = choose(deliveries(results, uri), wanted, collection)
    view = save(destination, wanted, chosen)
    if destination.is_server:
        _announce(destination.address, chosen, view, open_browser)
        return
    with server(destination, port) as process:
        _announce(f"http://{HOST}:{port}", chosen, view, open_browser)
        note("Ctrl-C stops it")
        try:
            process.wait()
        except KeyboardInterrupt:
            return
        raise UserError("the MLflow server ended by itself; start it again")


def find_collection(results: Path, wanted: Wanted) -> Collection | None:
    """The suite or sweep that is wanted, None for none. Raises UsageError for one that was never begun here."""
    if wanted.suite and wanted.sweep:
        raise UsageError("--suite and --sweep name one collection of runs each: give one of them")
    kind, name = ("suite", wanted.suite) if wanted.suite else ("sweep", wanted.sweep)
    if not name:
        return None
    known = {one.name: one for one in read_collections(results) if one.kind == kind}
    if not known:
        maker = f"procap bench {name}" if kind == "suite" else "procap sweep"
        raise UsageError(f"there is no {kind} in {results} yet; `{maker}` makes one")
    if name not in known:
        raise unknown_name(kind, name, known)
    return known[name]


def choose(sent: dict[str, Delivery], wanted: Wanted, collection: Collection | None = None) -> Chosen:
    """Those of the runs in `sent` that are wanted.

    Raises UsageError for a method or data set that none of them has, UserError when there is nothing to show.
    """
    members = set(collection.runs) if collection else set(sent)
    found = {name: delivery for name, delivery in sent.items() if name in members}
    terms = [f"tags.`{collection.tag}` = 'yes'"] if collection else ["tags.method IS NOT NULL"]
    # As in RunConfig.path.
    for tag, place, names in (("method", 2, wanted.methods), ("dataset", 1, wanted.datasets)):
        known = sorted({name.split("/")[place] for name in found})
        for name in names:
            if name not in known:
                raise unknown_name(f"{tag} among these runs", name, known)
        if names:
            terms += condition(names, known, tag)
            found = {name: delivery for name, delivery in found.items() if name.split("/")[place] in names}
    if wanted.runs:
        found = {name: delivery for name, delivery in found.items() if any(part in name for part in wanted.runs)}
    if not found:
        what = f"no run matches {', '.join(wanted.runs)}" if wanted.runs and sent else "there is no run to show"
        raise UserError(f"{what}; `procap ls runs` names them, `procap train` or `procap demo` makes some")
    chosen = list(found.values())
    if wanted.runs and len(chosen) <= COMPARED:
        terms = [f"attributes.run_id IN ({', '.join(repr(delivery.run_id) for delivery in chosen)})"]
    return Chosen(chosen, " AND ".join(terms))


def charts_page(address: str, chosen: Chosen, view: str | None = None) -> str:
    """The address of the charts of the `chosen` runs, as the saved `view` has them or as MLflow would."""
    page = f"{address}/#/experiments/{chosen.deliveries[0].experiment_id}/runs?compareRunsMode=CHART"
    # With a search of its own in the address the page takes no view.
    return f"{page}&viewStateShareKey={view}" if view else f"{page}&searchFilter={quote(chosen.where)}"


def compare_page(address: str, chosen: Chosen) -> str | None:
    """The address that sets the `chosen` runs side by side; None when they are one or too many."""
    if not 2 <= len(chosen.deliveries) <= COMPARED:
        return None
    experiments = sorted({delivery.experiment_id for delivery in chosen.deliveries})
    runs, where = (quote(json.dumps(ids)) for ids in ([one.run_id for one in chosen.deliveries], experiments))
    return f"{address}/#/compare-runs?runs={runs}&experiments={where}"


def save(destination: Destination, wanted: Wanted, chosen: Chosen) -> str | None:
    """Save a view of the `chosen` runs in the store and give its key; None, and a line why, where that fails."""
    try:
        store = open_store(destination)
        with quiet_libraries():
            some = store.client.search_runs([store.experiment_id], chosen.where, max_results=COMPARED)
            return save_view(store, wanted.title, view_state(chosen.where, some))
    except Exception as error:
        note(f"the view could not be saved, MLflow shows its own charts: {first_line(error)}")
        return None


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
    command += ["--artifacts-destination", str(folder / "mlartifacts")]
    # Whoever is on this machine reads command lines, and the URI of a database holds a password.
    store = {"MLFLOW_BACKEND_STORE_URI": destination.uri}
    # Without jobs it is two processes instead of ten; the rest keeps it from talking to anybody else.
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with tempfile.TemporaryFile() as log, sigterm_as_interrupt():
        process = subprocess.Popen(
            command, env={**os.environ, **quiet, **store}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_up(process, f"http://{HOST}:{port}", log)
            yield process
        finally:
            _stop(process)


def _announce(address: str, chosen: Chosen, view: str | None, open_browser: bool) -> None:
    charts, side_by_side = charts_page(address, chosen, view), compare_page(address, chosen)
    count = len(chosen.deliveries)
    show(f"MLflow, {plural(count, 'run')}: {charts}")
    if side_by_side:
        show(f"{count} runs side by side: {side_by_side}")
    elif count > SHOWN:
        note(f"the page loads {SHOWN} runs at a time, the best ones first; --methods and --datasets choose fewer")
    if open_browser and not webbrowser.open(charts):
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
