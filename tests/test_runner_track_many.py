"""Many processes send to the default store at once, which none of them finds made: nothing is lost or doubled."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import tracked_runs

from runner.collection import Collection, write_collection
from runner.results import RunFolder
from runner.tracking.record import read_record
from runner.tracking.tracker import pending, sync_all

ROOT = Path(__file__).parent.parent

# Forked after the imports, which are dearer than the work.
TOGETHER = """
import os, sys
from pathlib import Path
import mlflow.store.tracking.sqlalchemy_store, mlflow.tracking
from runner.config import Workplace
from runner.results import RunFolder
from runner.tracking.tracker import tracker_for

results, processes, runs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
go, start = os.pipe()
children = []
for number in range(processes):
    child = os.fork()
    if child == 0:
        os.close(start)
        os.read(go, 1)
        for run in runs[number::processes]:
            tracker_for(RunFolder(Path(run)), Workplace(data=results, results=results)).close()
        sys.exit(0)
    children.append(child)
os.close(start)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0] * processes, codes
"""


def made(results: Path, seed: int) -> RunFolder:
    folder = tracked_runs.begin(results, seed)
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 40 + seed)
    tracked_runs.evaluate(folder, "novel", 20 + seed)
    return folder


def expected_points(folder: RunFolder) -> int:
    record = read_record(folder)
    assert record is not None
    final = {point.key for points in record.points.values() for point in points}
    return len(final) + sum(len(points) for points in record.epoch_points(after=-1))


def count(database: sqlite3.Connection, what: str) -> int:
    return database.execute(f"SELECT count(*) FROM {what}").fetchone()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "each"), [(4, 1), (16, 2)])
def test_processes_sending_at_once_lose_nothing(processes: int, each: int, tmp_path: Path) -> None:
    folders = [made(tmp_path, seed) for seed in range(1, processes * each + 1)]
    outside = ("MLFLOW_", "PYTEST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, str(tmp_path), str(processes), *(str(folder.path) for folder in folders)],
        env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert pending(tmp_path) == [], done.stderr
    points = sum(map(expected_points, folders))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert count(database, "runs WHERE status = 'FINISHED' AND lifecycle_stage = 'active'") == len(folders)
        assert count(database, "metrics") == points
        assert count(database, "(SELECT DISTINCT run_uuid, key, step FROM metrics)") == points
        keys = "(SELECT DISTINCT value FROM tags WHERE key = 'procap.key')"
        assert count(database, keys) == len(folders)
    names = ("config.json", "train.json", "checkpoint.safetensors", "eval/shapes-base-test.json")
    for name in names:
        assert len(list((tmp_path / "mlartifacts").glob(f"**/{name}"))) == len(folders), f"{name} is missing somewhere"
    # What a driver adds afterwards touches no run twice either.
    write_collection(
        tmp_path,
        Collection(kind="suite", name="all", runs=tuple(str(one.path.relative_to(tmp_path)) for one in folders[:3])),
    )
    assert len(sync_all(tmp_path).sent) == 4
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert count(database, "tags WHERE key = 'mlflow.parentRunId'") == 3
        assert count(database, "metrics") == points + 1
