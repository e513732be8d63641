"""Tracking: everything of a run reaches MLflow once, and a store that is gone costs the run one line and no data."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import tracked_runs

from runner.collection import Collection, write_collection
from runner.config import RuntimeConfig
from runner.results import RunFolder, ValidationCount, ValidationHistory, find_runs, write_json
from runner.tracking.outbox import KEY_TAG, PARENT_TAG, sync
from runner.tracking.store import Destination, Store, open_store
from runner.tracking.tracker import Sender, Tracker, deliveries, pending, sync_all, tracker_for

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def destination(tmp_path_factory: pytest.TempPathFactory) -> Destination:
    patch = pytest.MonkeyPatch()
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        patch.delenv(name, raising=False)
    chosen = Destination.choose(tmp_path_factory.mktemp("results"))
    patch.undo()
    return chosen


@pytest.fixture(scope="module")
def store(destination: Destination) -> Store:
    """A real SQLite store, made once: its tables take seconds."""
    return open_store(destination)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return tracked_runs.begin(tmp_path)


def runs_of(store: Store, folder: RunFolder) -> list:
    """The MLflow runs of a folder, oldest first."""
    where = f"tags.folder = '{folder.path.resolve()}'"
    return store.client.search_runs([store.experiment_id], where, order_by=["attributes.start_time ASC"])


def points(store: Store, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in store.client.get_metric_history(run_id, key))


def finished(folder: RunFolder) -> RunFolder:
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    tracked_runs.evaluate(folder, "novel", 40)
    return folder


def evaluate_later(folder: RunFolder, classes: str, correct: int) -> None:
    """An evaluation that is repeated a second after the one before, on the clock of any file system."""
    file = folder.path / "eval" / f"shapes-{classes}-test.json"
    before = file.stat()
    tracked_runs.evaluate(folder, classes, correct)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def assert_nothing_twice(store: Store, run_id: str) -> None:
    for key in store.client.get_run(run_id).data.metrics:
        steps = Counter(step for step, _ in points(store, run_id, key))
        assert max(steps.values()) == 1, f"{key} was sent twice"


def test_a_finished_run_arrives_whole(store: Store, destination: Destination, folder: RunFolder) -> None:
    assert sync(finished(folder), destination, store)
    (run,) = runs_of(store, folder)
    assert run.info.run_name == "maple · shapes · base · seed 1" and run.info.status == "FINISHED"
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
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("shapes", "ab" * 8)
    assert metrics["fps"] == pytest.approx(300.0) and (metrics["epochs"], metrics["gpus"]) == (5.0, 0.0)
    assert metrics["fps/shapes-novel-test"] == 300.0 and metrics["train_images_per_second"] == 98.5
    assert metrics["train_images_per_second_model"] == 120.0
    assert metrics["system/cpu_percent"] == 150.0 and metrics["system/peak_memory_megabytes"] == 512.0
    halves = [f"eval/shapes-{half}-test.json" for half in ("base", "novel")]
    where = Path(run.info.artifact_uri.removeprefix("file://"))
    assert where.is_relative_to(destination.results / "mlartifacts")
    for name in ["config.json", "train.json", "checkpoint.safetensors", *halves]:
        assert (where / name).read_bytes() == (folder.path / name).read_bytes()
    assert find_runs(destination.results) == [], "the attached copies were taken for runs"


def test_a_run_watched_while_it_trains_is_one_run_without_doubled_points(
    store: Store, destination: Destination, folder: RunFolder
) -> None:
    assert not sync(folder, destination, store), "nothing has happened yet"
    for epochs in (1, 3):
        tracked_runs.go_on(folder, epochs)
        assert sync(folder, destination, store)
        assert runs_of(store, folder)[0].info.status == "RUNNING"
    tracked_runs.finish(folder)
    assert sync(folder, destination, store)
    tracked_runs.evaluate(folder, "base", 60)
    assert sync(folder, destination, store)
    assert not sync(folder, destination, store)
    (run,) = runs_of(store, folder)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in points(store, run.info.run_id, "loss")] == [0, 1, 2, 3, 4]
    assert_nothing_twice(store, run.info.run_id)


def _in_older_form(folder: RunFolder) -> None:
    note = json.loads(folder.tracking_file.read_text())
    folder.tracking_file.write_text(json.dumps(note).replace('"form": 3', '"form": 2'))


@pytest.mark.parametrize(
    ("called", "then"),
    [("maple · shapes · base · seed 1", "maple · shapes · base · seed 1 · lr 0.1"), ("my best", "my best")],
)
def test_a_run_that_was_sent_under_a_shorter_name_gets_its_own_and_keeps_that_of_a_user(
    store: Store, destination: Destination, tmp_path: Path, called: str, then: str
) -> None:
    folder = tracked_runs.begin(tmp_path, lr=0.1)
    sync(finished(folder), destination, store)
    [run] = runs_of(store, folder)
    store.client.update_run(run.info.run_id, name=called)
    assert not sync(folder, destination, store)
    _in_older_form(folder)
    assert sync(folder, destination, store) and not sync(folder, destination, store)
    assert runs_of(store, folder)[0].info.run_name == then
    assert_nothing_twice(store, run.info.run_id)


@pytest.mark.parametrize("sent", ["nothing", "some epochs", "everything"])
def test_a_kill_before_the_note_of_what_was_sent_doubles_nothing(
    store: Store, destination: Destination, folder: RunFolder, sent: str
) -> None:
    tracked_runs.go_on(folder, 1)
    sync(folder, destination, store)
    note = folder.tracking_file.read_bytes() if sent != "nothing" else _key_alone(folder)
    if sent == "everything":
        finished(folder)
    else:
        tracked_runs.go_on(folder, 3)
    sync(folder, destination, store)
    folder.tracking_file.write_bytes(note)
    finished(folder)
    sync(folder, destination, store)
    (run,) = runs_of(store, folder)
    assert [step for step, _ in points(store, run.info.run_id, "loss")] == [0, 1, 2, 3, 4]
    assert run.data.metrics["hm"] == pytest.approx(60.0)
    assert_nothing_twice(store, run.info.run_id)


def _key_alone(folder: RunFolder) -> bytes:
    """The note as it is when the run was created and nothing could be written after that."""
    note = json.loads(folder.tracking_file.read_text())
    return json.dumps({**note, "stores": {}}).encode()


def test_a_forced_repetition_is_a_new_run(store: Store, destination: Destination, folder: RunFolder) -> None:
    sync(finished(folder), destination, store)
    # The note survives a kill in the middle of forgetting the old run.
    folder.train_file.unlink()
    tracked_runs.go_on(folder, 2, attempt=0.25)
    sync(folder, destination, store)
    tracked_runs.finish(folder, attempt=0.25)
    sync(folder, destination, store)
    old, new = sorted(runs_of(store, folder), key=lambda run: run.data.metrics["train_seconds"])
    assert (old.data.metrics["train_seconds"], new.data.metrics["train_seconds"]) == (10.5, 10.75)
    assert len(points(store, old.info.run_id, "loss")) == len(points(store, new.info.run_id, "loss")) == 5


def test_a_repeated_evaluation_replaces_the_figure_and_keeps_the_old_one(
    store: Store, destination: Destination, folder: RunFolder
) -> None:
    sync(finished(folder), destination, store)
    evaluate_later(folder, "novel", 60)
    assert sync(folder, destination, store)
    (run,) = runs_of(store, folder)
    assert points(store, run.info.run_id, "novel") == [(0, 50.0), (1, 75.0)]
    assert run.data.metrics["hm"] == pytest.approx(75.0)
    assert len(points(store, run.info.run_id, "base")) == 1


def test_an_evaluation_of_a_part_stands_in_no_column_of_whole_ones(
    store: Store, destination: Destination, folder: RunFolder
) -> None:
    tracked_runs.finish(folder)
    tracked_runs.evaluate(folder, "base", 60)
    tracked_runs.evaluate(folder, "novel", 9, total=10)
    sync(folder, destination, store)
    metrics = runs_of(store, folder)[0].data.metrics
    assert metrics["accuracy/shapes-novel-test-first-10"] == 90.0
    assert not {"novel", "hm", "accuracy/shapes-novel-test"} & metrics.keys()


def test_a_run_deleted_from_the_store_is_sent_again(store: Store, destination: Destination, folder: RunFolder) -> None:
    sync(finished(folder), destination, store)
    (run,) = runs_of(store, folder)
    store.client.delete_run(run.info.run_id)
    assert sync(folder, destination, store)
    (again,) = runs_of(store, folder)
    assert again.info.run_id != run.info.run_id and again.data.metrics["hm"] == pytest.approx(60.0)


def test_sync_all_sends_what_was_missed_and_goes_on_past_a_broken_run(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    good, broken, also_good = (finished(tracked_runs.begin(tmp_path, seed)) for seed in (1, 2, 3))
    sync(good, destination, store)
    whole = broken.train_file.read_bytes()
    broken.train_file.write_bytes(whole[:100])
    summary = sync_all(tmp_path, destination.uri)
    assert summary.up_to_date == 1 and summary.sent == [also_good.path.relative_to(tmp_path).as_posix()]
    assert [name for name, _ in summary.failed] == [broken.path.relative_to(tmp_path).as_posix()]
    assert "train.json" in summary.failed[0][1]
    broken.train_file.write_bytes(whole)
    (missing,) = pending(tmp_path, destination.uri)
    assert missing.epochs == 5 and "eval/shapes-novel-test.json" in str(missing)
    sync_all(tmp_path, destination.uri)
    assert pending(tmp_path, destination.uri) == []


def test_a_note_cut_in_half_stops_nobody_else_and_doubles_nothing(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in (1, 2, 3)]
    runs = [folder.path.relative_to(tmp_path).as_posix() for folder in folders]
    for name in ("first", "second"):
        write_collection(tmp_path, Collection(kind="suite", name=name, runs=tuple(runs[:2])))
    assert len(sync_all(tmp_path, destination.uri).sent) == 5
    notes = [folders[0].tracking_file, tmp_path / "collections/suite/first/tracking.json"]
    whole = [note.read_bytes() for note in notes]
    for note, content in zip(notes, whole, strict=True):
        note.write_bytes(content[: len(content) // 2])
    tracked_runs.evaluate(folders[2], "all", 50)
    broken = [runs[0], "collections/suite/first"]
    missing = {one.run: one for one in pending(tmp_path, destination.uri)}
    assert missing.keys() == {*broken, runs[1], runs[2]}, "a parent of the second run is unknown"
    summary = sync_all(tmp_path, destination.uri)
    assert [name for name, _ in summary.failed] == broken[::-1] and runs[2] in summary.sent
    for reason in (*(why for _, why in summary.failed), *(missing[name].unreadable for name in broken)):
        assert "tracking.json is damaged" in reason and "procap train" not in reason
    assert list(deliveries(tmp_path, destination.uri)) == runs[1:], "the pages show those that are known"
    for note, content in zip(notes, whole, strict=True):
        note.write_bytes(content)
    assert sync_all(tmp_path, destination.uri).failed == [] and pending(tmp_path, destination.uri) == []
    assert all(len(runs_of(store, folder)) == 1 for folder in folders)
    (second,) = runs_of(store, folders[1])
    assert {"suite.first", "suite.second", PARENT_TAG} <= second.data.tags.keys()


def test_a_dead_server_costs_one_line_and_loses_nothing(
    store: Store,
    destination: Destination,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = tmp_path / "my results"
    asked: list[object] = []
    with closing(socket.socket()) as bound, monkeypatch.context() as patch:
        # As long as it is bound nobody else listens there. MLflow itself would try again for minutes.
        bound.bind(("127.0.0.1", 0))
        patch.setattr("mlflow.tracking.MlflowClient", asked.append)
        dead = f"http://reader:secret@127.0.0.1:{bound.getsockname()[1]}"
        place = RuntimeConfig(data=tmp_path, results=results, tracking_uri=dead)
        for seed in (1, 2, 3):
            folder = tracked_runs.begin(results, seed)
            tracker = tracker_for(folder, place)
            finished(folder)
            tracker.sync()
            tracker.close()
    assert not asked
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "Connection refused" in said.err and f"procap track sync --results '{results}'" in said.err
    assert "secret" not in said.err
    assert len(pending(results, dead)) == 3
    assert len(sync_all(tmp_path, destination.uri).sent) == 3


def test_a_locked_store_costs_one_line_and_the_next_run_brings_the_missed_one(
    store: Store,
    destination: Destination,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    sender = Sender(replace(destination, results=tmp_path))
    first, second = (finished(tracked_runs.begin(tmp_path, seed)) for seed in (1, 2))
    assert destination.file is not None
    with closing(sqlite3.connect(destination.file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with monkeypatch.context() as patch:
            patch.setattr("runner.tracking.store.ANSWER_SECONDS", 0.1)
            patch.setattr("mlflow.tracking.MlflowClient", asked.append)
            Tracker(first, sender).close()
            Tracker(first, sender).close()
        other.execute("ROLLBACK")
    assert not asked and not runs_of(store, first)
    monkeypatch.setattr(sender, "_retry", 0.0)
    Tracker(second, sender).close()
    assert len(runs_of(store, first)) == len(runs_of(store, second)) == 1
    refused, back = capsys.readouterr().err.splitlines()
    assert "locked" in refused and "procap track sync" in refused
    assert "is back; 2 runs sent" in back


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "nonsense"])
def test_a_uri_that_is_no_store_does_not_stop_the_run(
    uri: str, folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    finished(folder)
    Tracker(folder, Sender(Destination.choose(folder.path))).close()
    assert f"'{uri}' is not a store" in capsys.readouterr().err


def test_the_environment_names_store_and_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@example.org/mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ablation")
    chosen = Destination.choose(tmp_path)
    assert chosen.uri == "https://me:secret@example.org/mlflow"
    assert chosen.label == "https://example.org/mlflow ablation", "the password must not reach tracking.json"
    assert Destination.choose(tmp_path, "sqlite:///here.db").uri == f"sqlite:///{Path.cwd() / 'here.db'}"


def test_one_run_has_one_key_in_every_store(store: Store, destination: Destination, folder: RunFolder) -> None:
    other = replace(destination, experiment="elsewhere")
    elsewhere = open_store(other)
    finished(folder)
    assert sync(folder, destination, store) and sync(folder, other, elsewhere)
    assert not sync(folder, destination, store) and not sync(folder, other, elsewhere)
    keys = {runs_of(where, folder)[0].data.tags[KEY_TAG] for where in (store, elsewhere)}
    assert len(keys) == 1


WATCHED = """
import socket, sys
from pathlib import Path

asked = []
def watch(name):
    real = getattr(socket.socket, name)
    def watched(self, address, *rest):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith("127."):
            asked.append(address)
        return real(self, address, *rest)
    setattr(socket.socket, name, watched)
for name in ("connect", "connect_ex", "sendto"):
    watch(name)
look_up = socket.getaddrinfo
def watched_look_up(host, *rest, **more):
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        asked.append(host)
    return look_up(host, *rest, **more)
socket.getaddrinfo = watched_look_up

from runner.config import Workplace
from runner.results import RunFolder
from runner.tracking.tracker import pending, tracker_for

results, run = Path(sys.argv[1]), Path(sys.argv[2])
assert len(pending(results)) == 2
off = tracker_for(RunFolder(run), Workplace(data=results, results=results, tracking_uri="off"))
off.close()
tracker = tracker_for(RunFolder(run), Workplace(data=results, results=results))
tracker.sync()
heavy = {"mlflow", "torch"} & sys.modules.keys()
assert not heavy, f"imported {heavy} before there was anything to send"
tracker.close()
import time; time.sleep(0.5)
assert not asked, f"asked the network for {asked}"
"""


def test_two_processes_make_the_store_together_and_ask_no_network(tmp_path: Path) -> None:
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in (1, 2)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "DO_NOT", "CI"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WATCHED, str(tmp_path), str(folder.path)],
            env={**clean, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0 and out == "" and err == "", err
    assert pending(tmp_path) == []
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,)
        assert database.execute("SELECT count(*) FROM metrics WHERE key = 'loss'").fetchone() == (10,)


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


def test_a_store_whose_maker_is_killed_is_made_anew(tmp_path: Path) -> None:
    maker = os.fork()
    if maker == 0:
        try:
            die_at_table(20)
            open_store(Destination.choose(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) == -signal.SIGKILL
    begun = tmp_path / ".mlflow.db.new"
    assert begun.stat().st_size and not (tmp_path / "mlflow.db").exists()
    opened = open_store(Destination.choose(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"))
    assert opened.client.search_runs([opened.experiment_id]) == []
    assert not list(tmp_path.glob(f"{begun.name}*"))


def test_many_runs_are_asked_for_together_and_changes_are_still_seen(
    store: Store, destination: Destination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.tracking.tracker.FEW", 0)
    monkeypatch.setattr("runner.tracking.outbox.RUNS_PER_PAGE", 2)
    folders = [finished(tracked_runs.begin(tmp_path, seed)) for seed in range(1, 6)]
    assert len(sync_all(tmp_path, destination.uri).sent) == 5
    again = sync_all(tmp_path, destination.uri)
    assert (again.sent, again.up_to_date) == ([], 5)
    deleted, changed, touched = folders[:3]
    store.client.delete_run(runs_of(store, deleted)[0].info.run_id)
    evaluate_later(changed, "novel", 60)
    os.utime(touched.config_file)
    assert [missing.run for missing in pending(tmp_path, destination.uri)] == [
        changed.path.relative_to(tmp_path).as_posix()
    ]
    expected = [folder.path.relative_to(tmp_path).as_posix() for folder in (deleted, changed)]
    assert sync_all(tmp_path, destination.uri).sent == expected
    assert runs_of(store, changed)[0].data.metrics["novel"] == 75.0
    assert all(len(runs_of(store, folder)) == 1 for folder in folders)


def test_validation_figures_stand_in_columns_of_their_own(
    store: Store, destination: Destination, folder: RunFolder
) -> None:
    tracked_runs.go_on(folder, 2)
    counts = [
        ValidationCount(epoch=epoch, target=f"shapes:{classes}:val", correct=correct + epoch, total=10)
        for epoch in (0, 1)
        for classes, correct in (("dev-base", 5), ("dev-novel", 3))
    ]
    write_json(folder.validation_file, ValidationHistory(config_hash="0" * 8, counts=counts))
    sync(folder, destination, store)
    metrics = runs_of(store, folder)[0].data.metrics
    assert (metrics["val_dev-base"], metrics["val_dev-novel"]) == (60.0, 40.0)
    assert metrics["val_hm"] == pytest.approx(48.0)
    assert not {"hm", "base", "novel", "fps"} & metrics.keys(), "validation must not look like a test"
