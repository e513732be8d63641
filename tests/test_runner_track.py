"""Runs are exported to MLflow completely and once; an unreachable store costs one line and no data."""

import os
import signal
import socket
import time
from collections import Counter
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import tracked_runs

from benchmarks.cli import main
from runner.config import EvalSettings, RuntimeConfig, Target
from runner.planning import plan_run
from runner.remote_results import RemoteResults
from runner.results import ValidationCount, ValidationHistory, write_json
from runner.run_collection import Collection, write_collection
from runner.run_folders import RunFolder, find_runs
from runner.tracking import background
from runner.tracking.background import BackgroundExporter, exporter_for
from runner.tracking.content import read_content
from runner.tracking.export import PARENT_TAG, sync
from runner.tracking.store import TrackingStore


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return tracked_runs.begin(tmp_path)


@pytest.fixture
def export(store):
    return partial(sync, store)


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


def evaluate_otherwise(folder: RunFolder) -> None:
    """Repeat the evaluation on base classes under other settings."""
    result = folder.read_evaluation(folder.eval_files()[0])
    assert result
    result = result.model_copy(update={"settings": EvalSettings(precision="fp32", resize="squash", samples=8)})
    write_json(folder.eval_file(Target("shapes", "base"), result.settings), result)


def assert_no_duplicates(store: TrackingStore, run_id: str) -> None:
    for key in store.client.get_run(run_id).data.metrics:
        steps = Counter(step for step, _ in points(store, run_id, key))
        assert max(steps.values()) == 1, f"{key} was logged twice"


@pytest.mark.parametrize(("changes", "named"), [
    ({"overrides": {"lr": 0.03}, "shots": 1}, "1 shot · seed 1 · lr 0.03"),
    ({"options": {"depth": 3}}, "16 shots · seed 1 · depth 3"),
    ({"recipe": "procap", "options": {"n_ctx": 4}}, "16 shots · seed 1 · procap recipe"),
    ({"overrides": {"epochs": 3, "lr": 1, "momentum": 0, "batch_size": 2, "flip": False}}, "seed 1 · custom recipe"),
])  # fmt: skip
def test_the_name_of_a_run_says_what_differs_from_the_published_one(tmp_path, changes, named):
    config = plan_run(method="maple", dataset="shapes", **changes)
    write_json(RunFolder(tmp_path / config.path).config_file, config)
    tracked_runs.go_on(RunFolder(tmp_path / config.path), 1)
    found = read_content(tmp_path / config.path)
    assert found and found.name().endswith(named)


def test_a_finished_run_arrives_whole(store, folder, export):
    finished(folder)
    assert export().sent
    (run,) = runs_of(store, folder)
    assert run.info.run_name == "maple · shapes · base · 16 shots · seed 1" and run.info.status == "FINISHED"
    assert run.data.params["recipe.lr"] == "0.0035" and run.data.params["options.depth"] == "9"
    expected = {"method": "maple", "dataset": "shapes", "seed": "1", "device": "cpu"}
    assert expected.items() <= run.data.tags.items()
    assert run.data.tags["config_hash"] == folder.path.name.rpartition("-")[2]
    assert run.data.tags["commit"].endswith("+changes")
    assert points(store, run.info.run_id, "loss") == [(epoch, pytest.approx(2.5 / (epoch + 1))) for epoch in range(5)]
    assert points(store, run.info.run_id, "loss/kl")[4] == (4, 0.1)
    metrics = run.data.metrics
    assert metrics["base"] == metrics["accuracy/shapes-base-test"] == 75.0 and metrics["novel"] == 50.0
    assert metrics["hm"] == pytest.approx(60.0)
    calibration = {"macro_accuracy": 75.0, "nll": 1.25, "brier": 0.5, "ece": 25.0}
    assert {name: metrics[f"{name}/shapes-base-test"] for name in calibration} == calibration
    assert run.data.tags["manifest_digest"] == "ab" * 32
    assert metrics["fps"] == pytest.approx(300.0) and (metrics["epochs"], metrics["gpus"]) == (5.0, 0.0)
    assert metrics["fps/shapes-novel-test"] == 300.0 and metrics["train_images_per_second"] == 98.5
    assert metrics["train_images_per_second_model"] == 120.0
    assert metrics["system/cpu_percent"] == 150.0 and metrics["system/peak_memory_megabytes"] == 512.0
    where = Path(run.info.artifact_uri.removeprefix("file://"))
    assert where.is_relative_to(store.file.parent / "mlartifacts")
    for name in ("config.json", "train.json", "eval/shapes-base-test.json", "eval/shapes-novel-test.json"):
        assert (where / name).read_bytes() == (folder.path / name).read_bytes()
    assert not (where / "checkpoint.safetensors").exists()
    assert find_runs(store.file.parent) == [], "the attached copies were taken for runs"


def test_checkpoints_are_copied_only_where_that_is_asked_for(store, folder, export):
    finished(folder)
    export()
    assert export(log_checkpoints=True).sent and not export(log_checkpoints=True).sent and not export().sent
    (run,) = runs_of(store, folder)
    copy = Path(run.info.artifact_uri.removeprefix("file://")) / "checkpoint.safetensors"
    assert copy.read_bytes() == folder.checkpoint_file.read_bytes()
    assert_no_duplicates(store, run.info.run_id)


def test_a_run_exported_while_it_trains_is_one_run_without_duplicates(store, folder, export):
    assert not export().sent, "there is no epoch yet"
    for epochs in (1, 3):
        tracked_runs.go_on(folder, epochs)
        assert export().sent and runs_of(store, folder)[0].info.status == "RUNNING"
    tracked_runs.finish(folder)
    assert export().sent
    tracked_runs.evaluate(folder, "base", 60)
    assert export().sent and not export().sent
    (run,) = runs_of(store, folder)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in points(store, run.info.run_id, "loss")] == [0, 1, 2, 3, 4]
    assert_no_duplicates(store, run.info.run_id)


def test_validation_accuracy_is_a_curve_under_names_of_its_own(store, folder, export):
    counts: list[ValidationCount] = []
    for epoch in (0, 1):
        tracked_runs.go_on(folder, epoch + 1)
        counts += [
            ValidationCount(epoch=epoch, target=f"shapes:{classes}:val", correct=correct + epoch, total=10)
            for classes, correct in (("dev-base", 5), ("dev-novel", 3))
        ]
        write_json(folder.validation_file, ValidationHistory(config_hash=folder.path.name[-8:], counts=counts))
        export()
    (run,) = runs_of(store, folder)
    assert points(store, run.info.run_id, "val_dev-base") == [(0, 50.0), (1, 60.0)]
    assert run.data.metrics["val_hm"] == pytest.approx(48.0)
    assert not {"hm", "base", "novel", "fps"} & run.data.metrics.keys(), "validation must not look like a test"


def test_a_training_from_the_beginning_is_a_new_run_and_ends_an_unfinished_one(store, folder, export):
    finished(folder)
    export()
    folder.train_file.unlink()
    for attempt in (0.125, 0.25):
        tracked_runs.go_on(folder, 2, attempt=attempt)
        export()
    tracked_runs.finish(folder, attempt=0.25)
    export()
    runs = runs_of(store, folder)
    assert [run.info.status for run in runs if "train_seconds" not in run.data.metrics] == ["KILLED"]
    old, new = sorted((run for run in runs if run.info.status == "FINISHED"), key=lambda run: run.info.end_time)
    assert (old.data.metrics["train_seconds"], new.data.metrics["train_seconds"]) == (10.5, 10.75)
    assert len(points(store, old.info.run_id, "loss")) == len(points(store, new.info.run_id, "loss")) == 5


def test_a_changed_result_replaces_the_old_one(store, folder, export):
    finished(folder)
    export()
    tracked_runs.evaluate(folder, "novel", 60)
    assert export().sent and not export().sent
    (run,) = runs_of(store, folder)
    assert run.data.metrics["novel"] == 75.0 and run.data.metrics["hm"] == pytest.approx(75.0)
    assert points(store, run.info.run_id, "novel") == [(0, 50.0), (1, 75.0)]
    assert len(points(store, run.info.run_id, "base")) == 1


def test_an_evaluation_of_a_part_has_a_metric_of_its_own(store, folder, export):
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    tracked_runs.evaluate(folder, "novel", 9, total=10)
    evaluate_otherwise(folder)
    export()
    metrics = runs_of(store, folder)[0].data.metrics
    assert metrics["accuracy/shapes-base-test fp32 squash 8 samples"] == 75.0
    assert metrics["accuracy/shapes-novel-test-first-10"] == 90.0
    assert not {"novel", "hm", "accuracy/shapes-novel-test"} & metrics.keys()


CALLS = ("create_run", "log_batch", "log_batch after", "log_artifact", "set_terminated", "set_tag")


@pytest.mark.parametrize("call", CALLS)
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
    assert export().sent and not export().sent
    (run,) = runs_of(store, folder)
    parent = store.client.get_run(run.data.tags[PARENT_TAG])
    assert parent.info.run_name == "suite · killed" and {parent.info.status, run.info.status} == {"FINISHED"}
    assert run.data.metrics["hm"] == pytest.approx(60.0) and len(points(store, run.info.run_id, "loss")) == 5
    for one in (parent, run):
        assert_no_duplicates(store, one.info.run_id)


def test_two_runs_of_one_folder_from_two_machines_become_one(store, folder, export, monkeypatch):
    """As when two machines, which no lock holds against each other, export the same results at the same time."""
    finished(folder)
    with monkeypatch.context() as patch:
        patch.setattr("runner.tracking.export._find_run", lambda store, key: None)
        patch.setattr("runner.tracking.export._find_exported", lambda store: {})
        export()
        export()
    assert len(runs_of(store, folder)) == 2
    tracked_runs.evaluate(folder, "all", 50)
    export()
    (run,) = runs_of(store, folder)
    assert_no_duplicates(store, run.info.run_id)


def test_a_request_that_the_client_repeats_creates_one_run(store, folder, export, monkeypatch):
    """As when the network loses the server's answer."""
    create = type(store.client).create_run
    twice = lambda *run, **fields: (create(*run, **fields), create(*run, **fields))[1]  # noqa: E731
    monkeypatch.setattr(type(store.open().client), "create_run", twice)
    monkeypatch.setattr(TrackingStore, "is_server", True)
    finished(folder)
    assert export().sent and len(runs_of(store, folder)) == 1


def test_sync_goes_on_past_a_broken_run_and_a_dry_run_changes_nothing(store, tmp_path, capsys, monkeypatch):
    refused, *folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in (0, 1, 2, 3)]
    evaluate_otherwise(refused)
    good, broken, _ = (folder.path.relative_to(tmp_path).as_posix() for folder in folders)
    sync(store, only=[good])
    whole = folders[1].train_file.read_bytes()
    folders[1].train_file.write_bytes(whole[:100])
    command = ["track", "sync", "--results", str(tmp_path), "--tracking", store.uri]
    assert main([*command, "--dry-run"]) == 3
    assert "2 runs to send" in capsys.readouterr().out and not runs_of(store, folders[2])
    with monkeypatch.context() as patch:
        patch.setattr("runner.tracking.content.make_name", lambda text: text.replace("squash", "(squash)"))
        assert main(command) == 3
    said = capsys.readouterr()
    assert f"failed: {refused.path.relative_to(tmp_path)}: {store.address} does not accept it: " in said.err
    assert "1 run sent" in said.out and "1 run up to date" in said.out
    assert f"failed: {broken}: " in said.err and "train.json" in said.err
    folders[1].train_file.write_bytes(whole)
    assert main(command) == 0 and "2 runs sent" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == 0 and "0 runs to send" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path.parent)
    assert main(["track", "sync", "--results", tmp_path.name, "--dry-run"]) == 0
    assert f"to send to {tmp_path.name}/mlflow.db, 0 runs up to date" in capsys.readouterr().out
    assert all(len(runs_of(store, folder)) == 1 for folder in folders)


def test_a_dead_server_costs_one_line_and_no_time(store, tmp_path, capsys):
    results = tmp_path / "my results"
    with closing(socket.socket()) as bound:
        # As long as it is bound nothing else listens there.
        bound.bind(("127.0.0.1", 0))
        dead = f"http://reader:secret@127.0.0.1:{bound.getsockname()[1]}"
        runtime = RuntimeConfig(data=tmp_path, results=results, tracking_uri=dead)
        start = time.monotonic()
        for seed in (1, 2, 3):
            run = finished(tracked_runs.begin(results, seed))
            exporter_for(runtime).post(run.path.relative_to(results).as_posix())
            exporter_for(runtime).flush()
        assert time.monotonic() - start < 30
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "Connection refused" in said.err and f"procap track sync --results '{results}'" in said.err
    assert "secret" not in said.err and len(sync(TrackingStore.choose(results, store.uri)).sent) == 3


def test_a_store_that_hangs_does_not_hold_up_the_end_of_a_command(store, folder, capsys, monkeypatch):
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(TrackingStore, "open", lambda store: time.sleep(5))
    exporter = BackgroundExporter(store, RemoteResults(None, store.results))
    exporter.post(folder.path.as_posix())
    start = time.monotonic()
    exporter.flush()
    assert time.monotonic() - start < 4 and "no answer within" in capsys.readouterr().err


def test_what_a_store_missed_is_exported_when_it_is_back(store, folder, capsys, monkeypatch, tmp_path):
    def refuse(store: TrackingStore) -> TrackingStore:
        raise OSError("no route to host")

    exporter = BackgroundExporter(store, RemoteResults(None, store.results))
    finished(folder)
    with monkeypatch.context() as patch:
        patch.setattr(TrackingStore, "open", refuse)
        exporter.post(folder.path.relative_to(tmp_path).as_posix())
        exporter.flush()
        exporter.flush()
    exporter.flush()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no route to host" in line and len(runs_of(store, folder)) == 1


def test_a_uri_that_is_no_store_does_not_stop_the_run(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///tmp/mlruns")
    runtime = RuntimeConfig(data=tmp_path, results=tmp_path)
    exporter_for(runtime).post(finished(folder).path.relative_to(tmp_path).as_posix())
    exporter_for(runtime).flush()
    assert "'file:///tmp/mlruns' is not a store" in capsys.readouterr().err


def test_the_environment_names_store_and_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@example.org/mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ablation")
    chosen = TrackingStore.choose(tmp_path)
    assert (chosen.uri, chosen.experiment) == ("https://me:secret@example.org/mlflow", "ablation")
    assert TrackingStore.choose(tmp_path, "sqlite:///here.db").uri == f"sqlite:///{Path.cwd() / 'here.db'}"


def die_at_table(number: int) -> None:
    """Let this process be killed when it has made so many tables of a store."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    tables = count(1)

    @event.listens_for(Engine, "after_cursor_execute")
    def die(connection, cursor, statement, *rest):
        if statement.lstrip().startswith("CREATE TABLE") and next(tables) == number:
            connection.commit()
            os.kill(os.getpid(), signal.SIGKILL)


def export_and_exit(results: Path, folders: list[RunFolder], start: int) -> None:
    """What each of several processes does as soon as the pipe `start` is closed; none asks the network."""
    look_up = socket.getaddrinfo

    def local_only(host: str | None, *rest: object, **more: object) -> object:
        assert host in (None, "localhost", "127.0.0.1", "::1"), f"asked the network for {host}"
        return look_up(host, *rest, **more)  # type: ignore[arg-type]

    try:
        socket.getaddrinfo = local_only  # type: ignore[assignment]
        runtime = RuntimeConfig(data=results, results=results)
        os.read(start, 1)
        exporter_for(runtime).post(*(folder.path.relative_to(results).as_posix() for folder in folders))
        exporter_for(runtime).flush()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("processes", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_processes_exporting_at_once_lose_and_double_nothing(processes, tmp_path, store, monkeypatch):
    """To a store whose creator was killed."""
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    creator = os.fork()
    if creator == 0:
        try:
            die_at_table(20)
            TrackingStore.choose(tmp_path).open()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(creator, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / ".mlflow.db.new").stat().st_size and not (tmp_path / "mlflow.db").exists()
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in range(1, 2 * processes + 1)]
    start, go = os.pipe()
    children = []
    for number in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(go)
            export_and_exit(tmp_path, folders[number::processes], start)
    os.close(go)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * processes
    made = TrackingStore.choose(tmp_path).open()
    assert len(made.client.search_runs([made.experiment_id])) == len(folders)
    for folder in folders:
        (run,) = runs_of(made, folder)
        assert run.info.status == "FINISHED" and len(points(made, run.info.run_id, "loss")) == 5
        assert_no_duplicates(made, run.info.run_id)
    names = tuple(folder.path.relative_to(tmp_path).as_posix() for folder in folders[:3])
    write_collection(tmp_path, Collection(kind="suite", name="all", runs=names))
    assert len(sync(TrackingStore.choose(tmp_path)).sent) == 4 and sync(TrackingStore.choose(tmp_path)).sent == []
