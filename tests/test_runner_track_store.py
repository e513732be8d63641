"""MLflow stores: names, unreachable ones, moved results, collections as parent runs, a server for a group."""

import json
import math
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from made_results import put_halves
from tracked_runs import begin, evaluated, go_on

from benchmarks.cli import main
from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.run_collection import Collection, read_collection, write_collection
from runner.session import Session
from runner.tracking.content import read_contents
from runner.tracking.exporter import CollectionTracker
from runner.tracking.store import PARENT_TAG, TrackingStore, sync


def test_a_server_that_never_answers_is_named_and_asked_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        exporter = Session(RuntimeConfig(results=tmp_path, tracking_uri=address)).exporter
        for _ in range(2):
            exporter.post(evaluated(tmp_path, 1))
            exporter.flush()
        assert main(["track", "sync", "--results", str(tmp_path), "--tracking", address]) == 1
    exported, synced = capsys.readouterr().err.splitlines()
    assert exported.startswith(f"tracking: cannot open {address}: ") and "procap track sync" in exported
    assert synced.startswith(f"procap: error: cannot open {address}: ")


RUN = "maple · shapes · base · 16 shots"


def place(store: TrackingStore) -> RuntimeConfig:
    return RuntimeConfig(data=store.results, results=store.results, tracking_uri=store.uri)


def all_runs(store: TrackingStore) -> list:
    return list(store.client.search_runs([store.experiment_id]))


def family(store: TrackingStore) -> dict[str, list[str]]:
    """The names of the runs below each parent, by the parent's name."""
    runs = all_runs(store)
    names = {run.info.run_id: run.info.run_name for run in runs}
    below: dict[str, list[str]] = {}
    for run in runs:
        if parent := run.data.tags.get(PARENT_TAG):
            below.setdefault(names[parent], []).append(run.info.run_name)
    return {name: sorted(children) for name, children in below.items()}


def test_a_suite_is_a_parent_run_with_its_runs_below(store):
    runs = [evaluated(store.results, seed) for seed in (1, 2)]
    exporter, settings = Session(place(store)).exporter, {"shots": 16, "world": "s3://a:b@mini"}
    tracker = CollectionTracker(exporter, Collection(kind="suite", name="base-to-novel", settings=settings))
    tracker.update(runs)
    tracker.close("finished", metrics={"hm/maple": 60.0})
    exporter.flush()
    assert family(store) == {"suite · base-to-novel": [f"{RUN} · seed 1", f"{RUN} · seed 2"]}
    (parent,) = [run for run in all_runs(store) if run.data.tags.get("suite") == "base-to-novel"]
    assert parent.info.status == "FINISHED" and parent.info.end_time >= parent.info.start_time
    expected = {"accuracy/maple": 60.0, "fps/maple": 300.0, "train_seconds/maple": 10.5}
    assert parent.data.metrics == pytest.approx(expected)
    assert parent.data.tags["settings.shots"] == "16" and parent.data.tags["settings.world"] == "s3://mini"
    found = store.client.search_runs([store.experiment_id], "tags.`suite.base-to-novel` = 'yes'")
    assert [run.data.metrics["accuracy"] for run in found] == [pytest.approx(60.0)] * 2
    *_, row = parent.data.tags["mlflow.note.content"].splitlines()
    assert row == "| MaPLe | 60.00 | 300 | 10.5 |"
    assert not sync(store, print)


def test_metrics_of_methods_that_a_suite_has_no_longer_are_empty(store):
    collection = Collection(kind="suite", name="base-to-novel", runs=(evaluated(store.results, 1),))
    for metrics, empty in (({"hm/maple": 60.0, "hm/coop": 50.0}, False), ({"hm/maple": 61.0}, True)):
        write_collection(store.results, collection.model_copy(update={"metrics": metrics}))
        assert sync(store, print)
        [parent] = store.client.search_runs([store.experiment_id], "tags.suite = 'base-to-novel'")
        assert parent.data.metrics["accuracy/maple"] == metrics["hm/maple"]
        assert math.isnan(parent.data.metrics["accuracy/coop"]) == empty
        assert not sync(store, print), "nothing is sent twice"
    # Of a command that is repeated and has not ended; and of the user's own.
    store.client.log_metric(parent.info.run_id, "mine", 1.0)
    write_collection(store.results, collection)
    assert sync(store, print)
    kept = store.client.get_run(parent.info.run_id).data.metrics
    assert kept["accuracy/maple"] == 61.0 and kept["mine"] == 1.0


def test_a_description_that_a_user_has_written_is_kept(store):
    run = evaluated(store.results, 1)
    collection = Collection(kind="suite", name="base-to-novel", runs=(run,))
    write_collection(store.results, collection)
    sync(store, print)
    [parent] = store.client.search_runs([store.experiment_id], "tags.suite = 'base-to-novel'")
    store.client.set_tag(parent.info.run_id, "mlflow.note.content", "for the paper")
    write_collection(store.results, collection.model_copy(update={"metrics": {"hm/maple": 61.0}}))
    sync(store, print)
    parent = store.client.get_run(parent.info.run_id)
    assert parent.data.tags["mlflow.note.content"] == "for the paper" and parent.data.metrics["accuracy/maple"] == 61.0


def test_a_run_of_two_collections_is_there_once_and_carries_both_tags(store, monkeypatch):
    monkeypatch.setattr("runner.tracking.store.RUNS_PER_REQUEST", 1)
    results = store.results
    shared, alone = evaluated(results, 1), evaluated(results, 2)
    best = {"best/val": 61.5}
    write_collection(results, Collection(kind="sweep", name="rates", runs=(shared, alone), started=2, metrics=best))
    write_collection(results, Collection(kind="suite", name="stability", runs=(shared,), started=1))
    for _ in range(2):
        sent = sync(TrackingStore.choose(results, store.uri), print)
    assert not sent and len(all_runs(store)) == 4
    assert family(store) == {"suite · stability": [f"{RUN} · seed 1"], "sweep · rates": [f"{RUN} · seed 2"]}
    both_tags = "tags.`suite.stability` = 'yes' AND tags.`sweep.rates` = 'yes'"
    both = store.client.search_runs([store.experiment_id], both_tags)
    assert [run.data.params["seed"] for run in both] == ["1"]
    (parent,) = [run for run in all_runs(store) if run.data.tags.get("sweep") == "rates"]
    assert parent.data.metrics["best/val"] == 61.5


def test_a_run_exported_before_is_nested_below_its_parent_without_duplicates(store):
    run = evaluated(store.results, 1)
    assert [*sync(store, print)] == [run]
    (before,) = all_runs(store)
    write_collection(store.results, Collection(kind="suite", name="late", runs=(run,)))
    assert [*sync(store, print)] == ["collections/suite/late", run]
    assert family(store) == {"suite · late": [before.info.run_name]} and len(all_runs(store)) == 2
    for key in before.data.metrics:
        steps = Counter(metric.step for metric in store.client.get_metric_history(before.info.run_id, key))
        assert max(steps.values()) == 1
    assert not sync(store, print, only=[run])
    assert family(store) == {"suite · late": [before.info.run_name]}


def test_a_run_that_was_deleted_in_mlflow_does_not_return_and_stops_no_other(store):
    folder = begin(store.results)
    go_on(folder, 1)
    (deleted,) = sync(store, print).values()
    store.client.delete_run(deleted)
    go_on(folder, 2)
    other = evaluated(store.results, 2)
    assert [*sync(store, print)] == [other] and [run.info.run_name for run in all_runs(store)] == [f"{RUN} · seed 2"]


def test_results_whose_url_is_away_are_exported_all_the_same(store, tmp_path, caplog):
    (tmp_path / "a file").touch()
    at = replace(place(store), results_url=f"local://{tmp_path}/a file/remote")
    run = evaluated(at.results, 1)
    exporter = Session(at).exporter
    tracker = CollectionTracker(exporter, Collection(kind="suite", name="alone"))
    tracker.update([run])
    tracker.close("finished")
    exporter.flush()
    assert f"what is new is only in {at.results}" in caplog.text
    assert family(store) == {"suite · alone": [f"{RUN} · seed 1"]}


def test_a_results_folder_that_cannot_be_written_is_reported_and_stops_nothing(store, capsys):
    (store.results / "collections").write_text("a file where a folder must be")
    tracker = CollectionTracker(Session(place(store)).exporter, Collection(kind="suite", name="blocked"))
    tracker.update(["base/shapes/maple/mini/16shot/seed1-0"])
    tracker.close("finished")
    assert "Not a directory" in capsys.readouterr().err


def test_a_database_may_lie_in_a_folder_of_any_name(tmp_path, monkeypatch):
    from sqlalchemy import make_url

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    odd = tmp_path / "100% #1?"
    store = TrackingStore.choose(odd)
    assert not store.exists and store.uri.startswith("sqlite:///")
    assert make_url(store.uri).database == str(odd / "mlflow.db")


def test_a_database_that_cannot_be_opened_is_tried_once(tmp_path, monkeypatch):
    tries: list[float] = []
    monkeypatch.setattr("time.sleep", tries.append)
    with pytest.raises(UserError, match="cannot open sqlite"):
        _ = TrackingStore.choose(tmp_path, "sqlite:////proc/x.db").experiment_id
    assert not tries


def test_the_experiment_may_be_named_by_its_number(store, monkeypatch):
    expected = store.experiment_id
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", expected)
    assert TrackingStore.choose(store.results, store.uri).experiment_id == expected
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "987654")
    with pytest.raises(UserError, match="987654"):
        _ = TrackingStore.choose(store.results, store.uri).experiment_id


def test_exports_to_two_experiments_in_turn_make_one_run_in_each(store, monkeypatch):
    run = evaluated(store.results, 1)
    sent = []
    for name in ("first", "second", "first", "second", "third", "first"):
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name)
        chosen = TrackingStore.choose(store.results, store.uri)
        sent.append(bool(sync(chosen, print)))
        [exported] = chosen.client.search_runs([chosen.experiment_id])
        assert json.loads((store.results / run / "tracking.json").read_text())["run_id"] == exported.info.run_id
    assert sent == [True, True, False, False, True, False]


def test_two_commands_of_a_suite_keep_the_runs_of_each_other(tmp_path):
    def execute(first: int) -> None:
        tracker = CollectionTracker(Session(at).exporter, Collection(kind="suite", name="shared"))
        for seed in range(first, first + 8):
            tracker.update([f"base/shapes/maple/mini/16shot/seed{seed}-0"])

    at = RuntimeConfig(results=tmp_path, tracking_uri="off")
    with ThreadPoolExecutor() as pool:
        list(pool.map(execute, (0, 10, 20)))
    collection = read_collection(tmp_path / "collections" / "suite" / "shared")
    assert collection and len(collection.runs) == 24


def test_with_tracking_off_the_collection_is_kept_for_later(tmp_path):
    run = evaluated(tmp_path, 1)
    at = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off")
    tracker = CollectionTracker(Session(at).exporter, Collection(kind="suite", name="quiet"))
    tracker.update([run])
    tracker.close("finished")
    written = json.loads((tmp_path / "collections/suite/quiet/collection.json").read_text())
    assert written["runs"] == [run] and written["status"] == "finished" and written["schema"] == 1
    assert not (tmp_path / "mlflow.db").exists()


def test_a_broken_file_is_not_answered_with_training_again(tmp_path):
    (tmp_path / "collection.json").write_text("{")
    with pytest.raises(UserError, match=r"collection\.json cannot be read .*type the command again, its runs are kept"):
        read_collection(tmp_path)


def test_a_method_that_trains_nothing_has_no_training_seconds(tmp_path):
    put_halves(tmp_path, "zeroshot", "digits", (40, 100), (60, 100))
    put_halves(tmp_path, "coop", "digits", (40, 100), (60, 100))
    contents = read_contents(tmp_path, pytest.fail).values()
    assert {each.params["method"]: each.metrics.get("train_seconds") for each in contents} == {
        "zeroshot": None, "coop": 12.5,
    }  # fmt: skip
