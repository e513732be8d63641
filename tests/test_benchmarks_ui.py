"""`procap ui`: a real MLflow server over the results, for this machine alone, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, unquote

import psutil
import pytest
import tracked_runs
from child_process import start_process

from benchmarks.cli.ui import RunFilter, check_port, find_collection, select
from benchmarks.report.links import COMPARED, compare_page
from benchmarks.studies.chaos.ports import free_port
from procap.errors import UsageError, UserError
from runner.run_collection import Collection, write_collection
from runner.tracking.export import sync
from runner.tracking.store import TrackingStore

ROOT = Path(__file__).parent.parent
PATHS = [f"base/shapes/{name}/mini/16shot/seed1-0" for name in ("coop", "maple", "procap")]


def test_a_port_in_use_is_named_with_one_that_may_be_free() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} on 127\.0\.0\.1 .* --port {port + 1}"):
            check_port(port)
    check_port(free_port())


def methods(wanted: RunFilter, collection: Collection | None = None) -> list[str]:
    return [path.split("/")[2] for path in select(PATHS, wanted, collection)[0]]


def test_runs_are_selected_by_any_part_of_their_path() -> None:
    assert methods(RunFilter()) == ["coop", "maple", "procap"]
    assert methods(RunFilter(runs=["/coop/", "procap"])) == ["coop", "procap"]
    for paths, runs, message in ((PATHS, ["cocoop"], "no run matches cocoop"), ([], [], "there is no run to show")):
        with pytest.raises(UserError, match=message):
            select(paths, RunFilter(runs=runs))


def test_a_suite_methods_and_data_sets_narrow_the_runs_and_the_search() -> None:
    suite = Collection(kind="suite", name="base-to-novel", runs=tuple(PATHS)[:2])
    assert methods(RunFilter(suite="base-to-novel"), suite) == ["coop", "maple"]
    found, where = select(PATHS, RunFilter(methods=["maple"], datasets=["shapes"]), suite)
    assert found == [PATHS[1]]
    assert where == "tags.`suite.base-to-novel` = 'yes' AND tags.method = 'maple' AND tags.dataset = 'shapes'"
    # MLflow's search has no OR: several are found by leaving out the others.
    _, where = select(PATHS, RunFilter(methods=["coop", "maple"]))
    assert where == "tags.method IS NOT NULL AND tags.method != 'procap'"
    with pytest.raises(UsageError, match="unknown method among these runs 'mapple': did you mean maple"):
        select(PATHS, RunFilter(methods=["mapple"]), suite)


def test_an_unknown_suite_or_sweep_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no sweep in .* yet"):
        find_collection(tmp_path, RunFilter(sweep="rates"))
    write_collection(tmp_path, Collection(kind="suite", name="base-to-novel"))
    with pytest.raises(UsageError, match="unknown suite 'base-to-old': did you mean base-to-novel"):
        find_collection(tmp_path, RunFilter(suite="base-to-old"))
    with pytest.raises(UsageError, match="give one of them"):
        find_collection(tmp_path, RunFilter(suite="base-to-novel", sweep="rates"))


def test_the_comparison_names_its_runs_and_has_a_limit() -> None:
    address = compare_page("http://127.0.0.1:5000", "7", ["a", "b"])
    assert address is not None and address.startswith("http://127.0.0.1:5000/#/compare-runs?")
    query = parse_qs(address.partition("?")[2])
    assert json.loads(query["runs"][0]) == ["a", "b"] and json.loads(query["experiments"][0]) == ["7"]
    assert compare_page("", "7", ["a"]) is None and compare_page("", "7", ["a"] * (COMPARED + 1)) is None


def finished(results: Path, seed: int) -> None:
    folder = tracked_runs.begin(results, seed)
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)


def ask(address: str, document: dict) -> dict:
    body = json.dumps(document).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return json.load(answer)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`ui` in a process of its own over two runs that were not sent before, and what it printed."""
    for seed in (1, 2):
        finished(tmp_path, seed)
    # Ctrl-C counts also where the tests run in the background of a shell, which ignores it.
    code = "import signal, sys; from benchmarks.cli import main;"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += "sys.exit(main(['ui', '--results', sys.argv[1], '--port', sys.argv[2]]))"
    command = [sys.executable, "-c", code, str(tmp_path), str(free_port())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with start_process(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        patience = time.monotonic() + 600
        while len(lines) < 2 and process.poll() is None and time.monotonic() < patience:
            time.sleep(0.1)
        assert len(lines) == 2
        yield process, lines


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
    words = [word for child in children for word in child.cmdline()]
    assert "--artifacts-destination" in words and not any("sqlite:" in word for word in words), "it may hold a password"
    port = int(address.rpartition(":")[2])
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some if one.family == socket.AF_INET]
    for other in (other for other in addresses if not other.startswith("127.")):
        with closing(socket.socket()) as visitor:
            visitor.settimeout(5)
            assert visitor.connect_ex((other, port)) != 0, f"answers on {other} as well"
    for host in ("evil.example", f"192.168.1.5:{port}", f"127.0.0.1:{port + 1}"):
        foreign = urllib.request.Request(
            f"{address}/api/2.0/mlflow/experiments/get?experiment_id=1", headers={"Host": host}
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(foreign, timeout=120)
    process.send_signal(how)
    assert process.wait(120) == 0
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert gone and not alive
    assert not sync(TrackingStore.choose(tmp_path)).sent
