"""Results with their own MLflow store that are copied or moved: nothing is read from or written to the old folder."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter, OrderedDict
from contextlib import closing
from pathlib import Path

import pytest
import tracked_runs

from benchmarks.cli.ui import RunFilter, prepare
from runner.run_collection import Collection, write_collection
from runner.run_folders import find_runs
from runner.tracking.export import sync
from runner.tracking.store import TrackingStore


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported results of two runs and their suite; leave them as they are."""
    results = tmp_path_factory.mktemp("original") / "my #1 results"
    runs = [tracked_runs.evaluated(results, seed) for seed in (1, 2)]
    write_collection(results, Collection(kind="suite", name="both", runs=tuple(runs), status="finished"))
    assert len(sync(TrackingStore.choose(results)).sent) == 3
    return results


def forget_artifact_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make MLflow look again where each run has its files, as in a new process; a copied run has the same id."""
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._artifact_repos_cache", OrderedDict())


@pytest.fixture
def copy(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_artifact_folders(monkeypatch)
    return Path(shutil.copytree(original, tmp_path / "my #1 results copied"))


def locations(results: Path) -> list[str]:
    """Every artifact URI that the store of `results` has recorded."""
    with closing(sqlite3.connect(results / "mlflow.db")) as database:
        query = "SELECT artifact_location FROM experiments UNION ALL SELECT artifact_uri FROM runs"
        return [uri for (uri,) in database.execute(query)]


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_and_then_a_moved_copy_export_each_run_once_into_their_own_folder(
    original: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(original)
    tracked_runs.evaluated(copy, 3)
    assert sync(TrackingStore.choose(copy)).failed == []
    assert content(original) == before
    assert len(list((copy / "mlartifacts").glob("*/artifacts/train.json"))) == 3
    moved = tmp_path / "new" / "results"
    moved.parent.mkdir()
    shutil.move(copy, moved)
    forget_artifact_folders(monkeypatch)
    copy.write_text("no folder can be made here")
    assert sync(TrackingStore.choose(moved)).failed == [] and sync(TrackingStore.choose(moved)).sent == []
    folder = (moved / "mlartifacts").as_uri()
    assert len(locations(moved)) == 6 and all(f"{uri}/".startswith(f"{folder}/") for uri in locations(moved))
    store = TrackingStore.choose(moved)
    runs = list(store.search("tags.method = 'maple'"))
    assert sorted(run.data.tags["folder"] for run in runs) == sorted(str(run.path) for run in find_runs(moved))
    for run in runs:
        losses = Counter(metric.step for metric in store.client.get_metric_history(run.info.run_id, "loss"))
        assert losses == dict.fromkeys(range(5), 1)
        attached = moved / "mlartifacts" / run.info.run_id / "artifacts" / "train.json"
        assert attached.read_bytes() == (Path(run.data.tags["folder"]) / "train.json").read_bytes()
    selected = prepare(moved, store, RunFilter(suite="both"))
    assert set(selected.run_ids) == {run.info.run_id for run in runs if run.data.tags["seed"] in "12"}


def test_artifacts_that_are_elsewhere_on_purpose_stay(copy: Path, tmp_path: Path) -> None:
    # Another program's experiment has a folder whose name begins like the one that moved.
    beside = f"{(copy / 'mlartifacts').as_uri()}-of-others"
    TrackingStore.choose(copy).open().client.create_experiment("theirs", beside)
    again = Path(shutil.copytree(copy, tmp_path / "again"))
    TrackingStore.choose(again).open()
    assert beside in locations(again) and (again / "mlartifacts").as_uri() in locations(again)
    for location in (f"{tmp_path.as_uri()}/files", "s3://bucket/mlartifacts"):
        with closing(sqlite3.connect(copy / "mlflow.db")) as database, database:
            database.execute("UPDATE experiments SET artifact_location = ?", [location])
        TrackingStore.choose(copy).open()
        assert location in locations(copy)
