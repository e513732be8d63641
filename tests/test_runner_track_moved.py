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
from runner.collection import Collection, write_collection
from runner.results import find_runs
from runner.tracking.export import sync
from runner.tracking.store import Destination, open_store


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs and their suite, sent."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    results = tmp_path / "my #1 results"
    runs = [made(results, seed) for seed in (1, 2)]
    write_collection(results, Collection(kind="suite", name="both", runs=tuple(runs), status="finished"))
    assert len(sync(results).sent) == 3
    # As in the next process: MLflow remembers for this one where each run has its files, and a copied run has its id.
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._artifact_repos_cache", OrderedDict())
    return results


def made(results: Path, seed: int) -> str:
    folder = tracked_runs.begin(results, seed)
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    return folder.path.relative_to(results).as_posix()


def locations(results: Path) -> list[str]:
    """Every artifact URI that the store of `results` has recorded."""
    with closing(sqlite3.connect(results / "mlflow.db")) as database:
        asked = "SELECT artifact_location FROM experiments UNION ALL SELECT artifact_uri FROM runs"
        return [place for (place,) in database.execute(asked)]


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_moved_results_are_sent_once_and_leave_the_old_place_alone(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "results"
    new.parent.mkdir()
    shutil.move(old, new)
    old.write_text("no folder can be made here")
    made(new, 3)
    summary = sync(new)
    assert summary.failed == [] and sync(new).sent == []
    assert old.read_text() == "no folder can be made here"
    here = (new / "mlartifacts").as_uri()
    assert len(locations(new)) == 6 and all(f"{place}/".startswith(f"{here}/") for place in locations(new))
    store = open_store(Destination.choose(new))
    runs = list(store.client.search_runs([store.experiment_id], "tags.method = 'maple'"))
    folders = find_runs(new)
    assert sorted(run.data.tags["folder"] for run in runs) == sorted(str(folder.path) for folder in folders)
    for run in runs:
        losses = Counter(metric.step for metric in store.client.get_metric_history(run.info.run_id, "loss"))
        assert losses == dict.fromkeys(range(5), 1)
        kept = new / "mlartifacts" / run.info.run_id / "artifacts" / "train.json"
        assert kept.read_bytes() == (Path(run.data.tags["folder"]) / "train.json").read_bytes()
    pages = prepare(new, Destination.choose(new), RunFilter(suite="both"))
    assert set(pages.run_ids) == {run.info.run_id for run in runs if run.data.tags["seed"] in "12"} and pages.view


def test_copied_results_keep_their_files_to_themselves(old: Path, tmp_path: Path) -> None:
    before, copy = content(old), tmp_path / "my #1 results copied"
    shutil.copytree(old, copy)
    made(copy, 3)
    assert sync(copy).failed == []
    assert content(old) == before
    assert len(list((copy / "mlartifacts").glob("*/artifacts/train.json"))) == 3
    # A third experiment, made by another program, has a folder of its own whose name begins like the old one.
    beside = f"{(copy / 'mlartifacts').as_uri()}-of-others"
    open_store(Destination.choose(copy)).client.create_experiment("theirs", beside)
    again = tmp_path / "again"
    shutil.copytree(copy, again)
    open_store(Destination.choose(again))
    assert beside in locations(again) and (again / "mlartifacts").as_uri() in locations(again)


def test_a_folder_by_another_name_and_files_kept_elsewhere_on_purpose_stay(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(old)
    with closing(sqlite3.connect(old / "mlflow.db")) as database:
        # As on a machine where the same folder is mounted at another place.
        database.execute("UPDATE experiments SET artifact_location = ?", [(link / "mlartifacts").as_uri()])
        database.commit()
    open_store(Destination.choose(old))
    assert (link / "mlartifacts").as_uri() in locations(old)
    for location in (f"{tmp_path.as_uri()}/files", "s3://bucket/mlartifacts"):
        with closing(sqlite3.connect(old / "mlflow.db")) as database:
            database.execute("UPDATE experiments SET artifact_location = ?", [location])
            database.commit()
        open_store(Destination.choose(old))
        assert location in locations(old)
