"""`procap ui`: a real MLflow server over the results, for this machine alone, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, unquote

import psutil
import pytest
import tracked_runs

from benchmarks.ui import COMPARED, check_port, choose, compare_page
from procap.errors import UserError
from runner.config import Workplace
from runner.track import pending, sync_all, tracker_for
from runner.track_outbox import Delivery

ROOT = Path(__file__).parent.parent
SENT = {f"base/shapes/{name}/seed1-0": Delivery(experiment_id="7", run_id=name) for name in ("coop", "maple", "procap")}


def free_port() -> int:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_a_port_in_use_is_named_with_one_that_may_be_free() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 .* --port {port + 1}"):
            check_port(port)
    check_port(free_port())


def test_runs_are_chosen_by_any_part_of_their_path() -> None:
    assert [delivery.run_id for delivery in choose(SENT, [])] == ["coop", "maple", "procap"]
    assert [delivery.run_id for delivery in choose(SENT, ["/coop/", "procap"])] == ["coop", "procap"]
    for sent, runs, message in ((SENT, ["cocoop"], "no run matches cocoop"), ({}, [], "there is no run to show")):
        with pytest.raises(UserError, match=message):
            choose(sent, runs)


def test_the_comparison_names_the_chosen_runs_and_has_a_limit() -> None:
    address = compare_page("http://127.0.0.1:5000", choose(SENT, ["coop", "maple"]))
    assert address is not None and address.startswith("http://127.0.0.1:5000/#/compare-runs?")
    asked = parse_qs(address.partition("?")[2])
    assert json.loads(asked["runs"][0]) == ["coop", "maple"] and json.loads(asked["experiments"][0]) == ["7"]
    assert compare_page("", choose(SENT, ["coop"])) is None
    assert compare_page("", [SENT["base/shapes/coop/seed1-0"]] * (COMPARED + 1)) is None


def finished(results: Path, seed: int) -> None:
    folder = tracked_runs.begin(results, seed)
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)


def ask(address: str, document: dict) -> dict:
    body = json.dumps(document).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`ui` in a process of its own over two runs that were not sent before, and what it printed."""
    for seed in (1, 2):
        finished(tmp_path, seed)
    code = "import sys, pathlib, benchmarks.ui as b; b.ui(pathlib.Path(sys.argv[1]), None, int(sys.argv[2]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(free_port())],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    patience = time.monotonic() + 240
    while len(lines) < 2 and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.1)
    assert len(lines) == 2
    yield process, lines
    if process.poll() is None:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_server_shows_the_runs_to_this_machine_alone_and_stops_whole(
    page: tuple[subprocess.Popen[str], list[str]], how: signal.Signals, tmp_path: Path
) -> None:
    process, lines = page
    address = re.findall(r"http://[^/]*", lines[0])[0]
    assert address.startswith("http://127.0.0.1:")
    runs = json.loads(unquote(re.findall(r"runs=([^&]*)", lines[1])[0]))
    found = ask(f"{address}/api/2.0/mlflow/runs/search", {"experiment_ids": ["1"]})["runs"]
    assert sorted(run["info"]["run_id"] for run in found) == sorted(runs) and len(runs) == 2
    children = psutil.Process(process.pid).children(recursive=True)
    port = int(address.rpartition(":")[2])
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some if one.family == socket.AF_INET]
    for other in (other for other in addresses if not other.startswith("127.")):
        with closing(socket.socket()) as visitor:
            visitor.settimeout(5)
            assert visitor.connect_ex((other, port)) != 0, f"answers on {other} as well"
    process.send_signal(how)
    assert process.wait(30) == 0
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone and not alive
    assert pending(tmp_path) == []


@pytest.mark.slow
def test_a_run_reaches_a_server_and_one_that_goes_away_is_made_up_for(
    page: tuple[subprocess.Popen[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process, lines = page
    address = re.findall(r"http://[^/]*", lines[0])[0]
    results = tmp_path / "others"
    place = Workplace(data=tmp_path, results=results, tracking_uri=address)
    first, second = (tracked_runs.begin(results, seed) for seed in (3, 4))
    tracked_runs.finish(first)
    tracker_for(first, place).close()
    assert pending(results, address) == [] and capsys.readouterr() == ("", "")
    process.terminate()
    process.wait(30)
    tracked_runs.finish(second)
    began = time.monotonic()
    tracker_for(second, place).close()
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err.count("\n") == 1
    assert [missing.epochs for missing in pending(results, address)] == [5]
    # The server's database is a store in itself: there the first run is known although it came through the server.
    summary = sync_all(results, f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert summary.sent and summary.failed == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (4,)
