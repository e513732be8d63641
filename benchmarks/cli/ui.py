"""`procap ui`: start MLflow's UI on this machine, with a link to the runs of a suite or sweep."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from benchmarks.cli.flags import Results, Tracking, command, flag
from benchmarks.console.output import note, show, show_json
from benchmarks.results.frame import open_results
from procap.errors import UserError, check_names
from runner.results import read_document
from runner.run_collection import read_collections
from runner.run_folders import TRACKING_FILE
from runner.tracking.content import COLUMNS, method_rows, read_contents
from runner.tracking.store import TrackingRecord, TrackingStore, sync

PAGES = "workflowType=machine_learning"
"""MLflow's pages for trainings; its default are those for language models."""
PAGE = "methods.html"
PAGE_STYLE = "<style>table {font: 13px sans-serif} th, td {padding: 1px 12px; text-align: right}</style>"
HOST = "127.0.0.1"
COMPARED = 20
"""The newest runs that the link to MLflow's comparison names."""


@command("procap ui --results demo/results", "procap ui --suite base-to-novel", "procap ui --port 5001")
def ui(
    suite: Annotated[str, flag("NAME", "show runs of this suite or sweep")] = "",
    results: Results = "results",
    tracking: Tracking = "",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="port on 127.0.0.1")] = 5000,
) -> int:
    """Upload missing results to MLflow, print links to the runs and the report, and serve MLflow on this machine.

    Ctrl-C stops the server. With a tracking server, only the links are printed.
    """
    root = open_results(results)
    search = "params.method LIKE '%'"
    if suite:
        collections = {record.name: record for record in read_collections(root)}
        check_names("suite", [suite], collections)
        search = f"tags.`{collections[suite].kind}.{suite}` = 'yes' AND {search}"
    store = TrackingStore.choose(root, tracking or None)
    is_server = store.uri.startswith(("http://", "https://"))
    if not is_server:
        _check_free(port)
    sync(store, lambda path, error: note(f"not shown: {path}: {error}"))
    address = store.address.rstrip("/") if is_server else f"http://{HOST}:{port}"
    # On this page MLflow shows accuracy, images/s and seconds of the runs in adjacent rows.
    runs = store.client.search_runs([store.experiment_id], search, max_results=COMPARED)
    compared, experiments = json.dumps([run.info.run_id for run in runs]), json.dumps([store.experiment_id])
    listed = {"searchFilter": search, "orderByKey": "metrics.`accuracy`", "orderByAsc": "false"}
    report = root / "-".join(filter(None, ["report", suite])) / "index.html"
    command = f"procap report {suite} --results {shlex.quote(results)}".replace("  ", " ")
    links = {}
    if suite:
        path = collections[suite].path
        if record := read_document(root / path / TRACKING_FILE, TrackingRecord):
            # In MLflow, methods that only an earlier command compared have metrics without a value.
            metrics = read_contents(root, lambda *_: None, [path])[path].metrics
            page = _log_page(store, record.run_id, method_rows(metrics))
            links["table"] = f"{address}/#/experiments/{store.experiment_id}/runs/{record.run_id}{page}?{PAGES}"
    links |= {
        "side by side": f"{address}/#/compare-runs?runs={quote(compared)}&experiments={quote(experiments)}&{PAGES}",
        "all runs": f"{address}/#/experiments/{store.experiment_id}/runs?{urlencode(listed, quote_via=quote)}&{PAGES}",
        "report": report.absolute().as_uri() if report.exists() else command,
    }
    show("\n".join(f"{name}: {link}" for name, link in links.items()))
    show_json(links)
    if is_server:
        return 0
    note("starting MLflow; Ctrl-C stops it")
    # Not as arguments: the URI of the store may contain a password, and other users can read command lines.
    os.environ |= {"MLFLOW_BACKEND_STORE_URI": store.uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    # Otherwise the start prints a deprecation warning of MLflow's own code and the lines of uvicorn's logger.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    arguments = ["--host", HOST, "--port", str(port), "--uvicorn-opts", "--log-level=warning"]
    # Requests under another name come from pages of other sites whose names resolve to this machine.
    arguments += ["--allowed-hosts", f"{HOST}:{port},localhost:{port}", "--cors-allowed-origins", address]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", "--workers", "1", *arguments])


def _log_page(store: TrackingStore, run_id: str, rows: list[tuple[str, ...]]) -> str:
    """Log the table of a collection's methods as an artifact and return its address below the run's.

    MLflow shows the same table in the run's description, but cut and below the list of runs.
    Returns "" where the files of the store cannot be written from this machine.
    """
    import pandas as pd

    try:
        table = pd.DataFrame(rows, columns=list(COLUMNS)).to_html(index=False, border=0)
        store.client.log_text(run_id, PAGE_STYLE + table, PAGE)
    except Exception:
        return ""
    return f"/artifacts/{PAGE}"


def _check_free(port: int) -> None:
    """Raise UserError for a port on which MLflow could not listen: its links would lead to another program."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port {port} of {HOST} cannot be used ({error.strerror}): name another --port") from None
