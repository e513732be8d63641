"""Runs are exported to MLflow completely and once; an unreachable store costs one line and no data."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tracked_runs
from made_results import put_run, put_score
from rank_processes import run_ranks

from benchmarks.cli import main
from procap.errors import UserError
from runner.checkpoint import TrainState
from runner.config import EvalSettings, RuntimeConfig, Target
from runner.planning import plan_run
from runner.results import PerClass, ValidationCount, ValidationHistory, write_json
from runner.run_collection import Collection, write_collection
from runner.run_folders import RunFolder
from runner.session import Session
from runner.tracking import exporter as exporter_module
from runner.tracking.content import run_content
from runner.tracking.store import PARENT_TAG, TrackingStore, sync
from runner.train import train_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return tracked_runs.begin(tmp_path)


@pytest.fixture
def export(store):
    return partial(sync, store, print)


def runs_of(store: TrackingStore, folder: RunFolder) -> list:
    where = f"tags.folder = '{folder.path.resolve()}'"
    return store.client.search_runs([store.experiment_id], where, order_by=["attributes.start_time ASC"])


def points(store: TrackingStore, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in store.client.get_metric_history(run_id, key))


def finished(folder: RunFolder) -> RunFolder:
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    tracked_runs.evaluate(folder, "novel", 40)
    return folder


def assert_no_duplicates(store: TrackingStore, run_id: str) -> None:
    for key in store.client.get_run(run_id).data.metrics:
        steps = Counter(step for step, _ in points(store, run_id, key))
        assert max(steps.values()) == 1, f"{key} was logged twice"


def test_a_finished_run_arrives_whole(store, folder, export):
    finished(folder)
    assert export()
    (run,) = runs_of(store, folder)
    assert run.info.run_name == "maple · shapes · base · 16 shots · seed 1" and run.info.status == "FINISHED"
    assert {"method": "maple", "recipe.lr": "0.0035", "options.depth": "9"}.items() <= run.data.params.items()
    assert run.data.tags["device"] == "cpu"
    losses = points(store, run.info.run_id, "training/loss")
    assert losses == [(epoch, pytest.approx(2.5 / (epoch + 1))) for epoch in range(5)]
    assert points(store, run.info.run_id, "training/loss_kl")[4] == (4, 0.1)
    metrics = run.data.metrics
    expected = {"accuracy": 60.0, "accuracy/base": 75.0, "accuracy/novel": 50.0, "fps": 300.0, "train_seconds": 10.5}
    assert sorted(metrics)[:5] == [*expected]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    inputs = {entry.dataset.name: entry.dataset.digest for entry in run.inputs.dataset_inputs}
    assert inputs["shapes"] == folder.read_training().manifest_digest and "shapes:novel:test" in inputs


def test_a_run_that_is_evaluated_on_many_data_sets_has_at_most_15_metrics(store, folder, export, monkeypatch):
    terms = {"ce": 2.0, "nce": 0.5, "kl": 0.25, "l2": 0.125}
    rows = [log.model_copy(update={"terms": terms}) for log in tracked_runs.rows(5)]
    monkeypatch.setattr(tracked_runs, "rows", lambda epochs, attempt: rows)
    finished(folder)
    result = folder.read_evaluations()[0]
    for number in range(12):
        target, correct = Target(f"set{number}", "all"), 40 + 2 * number
        counts = PerClass(correct=[correct], total=[80])
        changes = {"target": str(target), "correct": correct, "per_class": counts, "calibration": None}
        copy = result.model_copy(update=changes)
        write_json(folder.result_file(target, copy.settings), copy)
    export()
    (run,) = runs_of(store, folder)
    metrics = {name: value for name, value in run.data.metrics.items() if not name.startswith("system/")}
    assert len(metrics) <= 15 and {"accuracy", "accuracy/novel", "fps", "training/loss_l2"} <= metrics.keys()
    assert metrics["accuracy/transfer"] == pytest.approx(100 * 51 / 80)


def test_a_run_exported_while_it_trains_is_one_run_without_duplicates(store, folder, export):
    assert not export(), "there is no epoch yet"
    # A killed training repeats epochs, in a different time; the third one is exported by another process.
    of_another_process = partial(sync, replace(store), print)
    for epochs, attempt in ((1, 0.0), (2, 0.0), (3, 0.0), (4, 0.5)):
        tracked_runs.go_on(folder, epochs, attempt)
        assert (of_another_process if epochs == 3 else export)() and runs_of(store, folder)[0].info.status == "RUNNING"
    tracked_runs.finish(folder, attempt=0.5)
    assert export()
    tracked_runs.evaluate(folder, "base", 60)
    assert export() and not export()
    (run,) = runs_of(store, folder)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in points(store, run.info.run_id, "training/loss")] == [0, 1, 2, 3, 4]
    assert_no_duplicates(store, run.info.run_id)


def train_until_sigterm(data: str, results: str, checkpoint: str, uri: str) -> None:
    """Train with an export after every epoch; the process gets SIGTERM in the second epoch of its first start."""
    exporter_module.INTERVAL_SECONDS = 0.0
    count, marker = TrainState.count, Path(results) / "stopped"

    def count_and_stop(state: TrainState, *step: object) -> None:
        count(state, *step)
        if len(state.epochs) == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    TrainState.count = count_and_stop  # type: ignore[method-assign]
    # The learned offsets of procap give several loss terms.
    options = {"n_ctx": 2, "depth": 3, "heads": 1, "head_width": 8, "nce_width": 8}
    more = {"options": options, "backbone": checkpoint, "overrides": {"epochs": 3, "batch_size": 5}}
    runtime = RuntimeConfig(Path(data), Path(results), device="cpu", tracking_uri=uri, quiet=True)
    session = Session(runtime)
    try:
        train_run(session.get_run(plan_run(method="procap", dataset="digits", shots=2, **more)))
    finally:
        session.exporter.flush()


def test_a_run_that_sigterm_interrupts_and_a_repetition_finishes_is_one_run(
    store, few_digits, short_checkpoint, tmp_path, monkeypatch
):
    arguments = str(few_digits), str(tmp_path / "results"), str(short_checkpoint), store.uri
    [end] = run_ranks(1, train_until_sigterm, *arguments, environ={"MLFLOW_EXPERIMENT_NAME": store.experiment})
    assert end.code == 143, end.err
    monkeypatch.setattr(exporter_module, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(TrainState, "count", TrainState.count)
    train_until_sigterm(*arguments)
    [run] = store.client.search_runs([store.experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["train_seconds"] > 0
    assert [step for step, _ in points(store, run.info.run_id, "training/loss")] == [0, 1, 2]


def test_validation_accuracy_is_a_curve_under_its_own_name(store, folder, export):
    counts: list[ValidationCount] = []
    for epoch in (0, 1):
        tracked_runs.go_on(folder, epoch + 1)
        counts += [
            ValidationCount(epoch=epoch, target=f"shapes:{classes}:val", correct=correct, total=10)
            for classes, correct in (("dev-base", 5 + epoch), ("dev-novel", 3))
        ]
        write_json(folder.validation_file, ValidationHistory(config_hash=folder.path.name[-8:], counts=counts))
        export()
    (run,) = runs_of(store, folder)
    curve = points(store, run.info.run_id, "validation/accuracy")
    assert curve == [(0, pytest.approx(37.5)), (1, pytest.approx(40.0))]
    assert "accuracy" not in run.data.metrics, "validation must not look like a test"


def test_an_accuracy_of_base_classes_alone_is_no_accuracy_beside_harmonic_means(store, folder, export):
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    export()
    (run,) = runs_of(store, folder)
    assert run.data.metrics["accuracy/base"] == 75.0 and "accuracy" not in run.data.metrics


def test_the_accuracy_of_a_run_on_all_classes_is_that_on_all(tmp_path):
    config = put_run(tmp_path, "coop", "shapes", classes="all")
    for classes, correct in (("all", 90), ("base", 50), ("novel", 50)):
        put_score(tmp_path, config, f"shapes:{classes}", correct, 100)
    assert run_content(RunFolder(tmp_path / config.path)).metrics["accuracy"] == 90.0


def test_a_new_result_replaces_the_old_one_and_parts_and_other_settings_do_not_count(store, folder, export):
    finished(folder)
    export()
    tracked_runs.evaluate(folder, "novel", 60, written="2099-02-01T00:00:00Z")
    assert export() and not export()
    (run,) = runs_of(store, folder)
    assert run.data.metrics["accuracy/novel"] == run.data.metrics["accuracy"] == 75.0
    tracked_runs.evaluate(folder, "novel", 9, total=10, written="2099-02-02T00:00:00Z")
    result = folder.read_evaluations()[0]
    result = result.model_copy(update={"settings": EvalSettings(precision="fp32", resize="squash", samples=8)})
    write_json(folder.result_file(Target("shapes", "base"), result.settings), result)
    assert not export() and runs_of(store, folder)[0].data.metrics["accuracy/novel"] == 75.0


@pytest.mark.parametrize("call", ["create_run", "log_batch", "log_batch after", "set_terminated"])
def test_an_export_that_was_killed_is_completed_by_the_next_one(call, store, folder, export, tmp_path):
    finished(folder)
    path = folder.path.relative_to(tmp_path).as_posix()
    write_collection(tmp_path, Collection(kind="suite", name="killed", runs=(path,), status="finished"))
    child = os.fork()
    if child == 0:
        try:
            name, _, after = call.partition(" ")
            owner = type(store.client)
            real = getattr(owner, name)

            def killed(*values: object, **named: object) -> None:
                if after:
                    real(*values, **named)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(owner, name, killed)
            export()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert export() and not export()
    (run,) = runs_of(store, folder)
    parent = store.client.get_run(run.data.tags[PARENT_TAG])
    assert parent.info.run_name == "suite · killed" and {parent.info.status, run.info.status} == {"FINISHED"}
    assert run.data.metrics["accuracy"] == pytest.approx(60.0)
    for exported in (parent, run):
        assert_no_duplicates(store, exported.info.run_id)


def test_sync_continues_after_a_broken_run(store, tmp_path, capsys):
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in (1, 2, 3)]
    good, broken, _ = (folder.path.relative_to(tmp_path).as_posix() for folder in folders)
    sync(store, print, only=[good])
    whole = folders[1].train_file.read_bytes()
    folders[1].train_file.write_bytes(whole[:100])
    command = ["track", "sync", "--results", str(tmp_path), "--tracking", store.uri]
    assert main(command) == 3
    printed = capsys.readouterr()
    assert "1 run and 0 collections sent" in printed.out
    assert f"failed: {broken}: " in printed.err and "train.json" in printed.err
    folders[1].train_file.write_bytes(whole)
    assert main(command) == 0 and "1 run and 0 collections sent" in capsys.readouterr().out
    assert all(len(runs_of(store, folder)) == 1 for folder in folders)


def test_a_dead_server_costs_one_line_and_no_time(store, tmp_path, capsys):
    results = tmp_path / "my results"
    with closing(socket.socket()) as bound:
        # As long as it is bound nothing else listens there.
        bound.bind(("127.0.0.1", 0))
        dead = f"http://reader:secret@127.0.0.1:{bound.getsockname()[1]}"
        exporter = Session(RuntimeConfig(data=tmp_path, results=results, tracking_uri=dead)).exporter
        for seed in (1, 2, 3):
            run = finished(tracked_runs.begin(results, seed))
            exporter.post(run.path.relative_to(results).as_posix())
            exporter.flush()
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "cannot open http://127.0.0.1:" in printed.err and f"procap track sync --results '{results}'" in printed.err
    assert "secret" not in printed.err and len(sync(TrackingStore.choose(results, store.uri), print)) == 3


def test_system_metrics_are_logged_while_a_run_trains(store, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.setattr(exporter_module, "INTERVAL_SECONDS", 0.0)
    exporter = Session(RuntimeConfig(results=tmp_path, tracking_uri=store.uri)).exporter
    path = folder.path.relative_to(tmp_path).as_posix()
    tracked_runs.go_on(folder, 1)
    exporter.post_epoch(path)
    (run,) = runs_of(store, folder)
    while not (history := points(store, run.info.run_id, "system/cpu_utilization_percentage")):
        time.sleep(0.1)
    finished(folder)
    exporter.post_end(path)
    assert history and runs_of(store, folder)[0].info.status == "FINISHED"
    assert not any(thread.name == "SystemMetricsMonitor" and thread.is_alive() for thread in threading.enumerate())


def test_the_environment_names_store_and_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@example.org/mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ablation")
    chosen = TrackingStore.choose(tmp_path)
    assert (chosen.uri, chosen.experiment) == ("https://me:secret@example.org/mlflow", "ablation")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nfs://host")
    with pytest.raises(UserError, match="cannot open nfs://host: "):
        assert TrackingStore.choose(tmp_path).experiment_id


def export_and_exit(results: Path, folders: list[RunFolder], start: int) -> None:
    """What each of several processes does as soon as the pipe `start` is closed."""
    try:
        store = TrackingStore.choose(results)
        os.read(start, 1)
        sync(store, print, only=[folder.path.relative_to(results).as_posix() for folder in folders])
        os._exit(0)
    finally:
        os._exit(1)


def test_processes_exporting_at_once_lose_and_double_nothing(tmp_path, store, monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    # On a busy machine one process can need longer than usual to make the tables of a store.
    monkeypatch.setattr("runner.tracking.store.LOCK_SECONDS", -1.0)
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in range(1, 5)]
    start, go = os.pipe()
    children = []
    for number in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(go)
            # Each exports all runs of the other one as well.
            export_and_exit(tmp_path, folders[::-1] if number else folders, start)
    os.close(go)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    created = TrackingStore.choose(tmp_path)
    assert len(created.client.search_runs([created.experiment_id])) == len(folders)
    for folder in folders:
        (run,) = runs_of(created, folder)
        assert run.info.status == "FINISHED"
        assert_no_duplicates(created, run.info.run_id)
