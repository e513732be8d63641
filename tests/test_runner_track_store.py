"""MLflow stores: names, unreachable ones, moved results, collections as parent runs, a server for a group."""

import importlib.util
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, OrderedDict
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tracked_runs
from command_line import read_files
from object_server import object_server
from ports import free_port
from pydantic import ValidationError
from tracked_runs import evaluated

from benchmarks.cli.ui import select_runs
from procap.errors import UserError
from runner.config import RuntimeConfig
from runner.remote_results import RemoteResults
from runner.run_collection import Collection, read_collection, read_collections, write_collection
from runner.run_folders import find_runs
from runner.tracking.background import CollectionTracker
from runner.tracking.export import PARENT_TAG, sync
from runner.tracking.store import TrackingError, TrackingStore


@pytest.mark.parametrize(("uri", "address"), [
    ("postgresql+psycopg2://me:hunter2@db/mlflow", "postgresql+psycopg2://db/mlflow"),
    ("postgresql+psycopg2://db:5433/mlflow?user=me&password=hunter2", "postgresql+psycopg2://db:5433/mlflow"),
    ("https://me@example.org/mlflow?token=hunter2", "https://example.org/mlflow"),
    ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
    ("databricks", "databricks"),
    ("sqlite+pysqlite:////tmp/why%3F/a@b/mlflow.db", "sqlite+pysqlite:////tmp/why%3F/a@b/mlflow.db"),
])  # fmt: skip
def test_messages_name_a_store_without_its_password(uri, address, tmp_path):
    assert TrackingStore(uri, "procap", tmp_path).address == address


@pytest.mark.parametrize("scheme", ["http", "postgresql", "postgresql+psycopg2", "mysql+pymysql"])
def test_a_store_where_no_program_listens_fails_at_once(scheme, tmp_path, monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr("mlflow.tracking.MlflowClient", asked.append)
    with closing(socket.socket()) as bound:
        # As long as it is bound nothing else listens there. MLflow itself would retry for minutes.
        bound.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{bound.getsockname()[1]}/mlflow"
        with pytest.raises(TrackingError, match=rf"^cannot reach {scheme.replace('+', '.')}://{there}: .*refused"):
            TrackingStore(f"{scheme}://me:hunter2@{there}", "procap", tmp_path).open()
    assert not asked


def test_a_folder_with_any_name_keeps_its_store_in_itself(tmp_path, mlflow_database):
    """MLflow's URIs give `?`, `#` and `%20` another meaning, with which files landed beside the results."""
    results = tmp_path / "a?b#c%20d%3Fe'f\"g" / "r"
    results.mkdir(parents=True)
    shutil.copy(mlflow_database, results / "mlflow.db")
    store = TrackingStore.choose(results).open()
    again = TrackingStore.choose(results, store.uri)
    run = again.client.create_run(again.experiment_id)
    (results / "note.txt").write_text("kept")
    again.client.log_artifact(run.info.run_id, str(results / "note.txt"))
    assert store == again and store.file == results / "mlflow.db"
    assert [file.relative_to(results).parts[0] for file in results.rglob("*/note.txt")] == ["mlartifacts"]
    assert [*tmp_path.iterdir()] == [results.parent] and [*results.parent.iterdir()] == [results]


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


def test_a_copy_and_then_a_moved_copy_export_each_run_once_into_their_own_folder(original, copy, tmp_path, monkeypatch):
    before = read_files(original)
    tracked_runs.evaluated(copy, 3)
    assert sync(TrackingStore.choose(copy)).failed == []
    assert read_files(original) == before
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
    selected = select_runs(moved, store, suite="both")
    assert set(selected.run_ids) == {run.info.run_id for run in runs if run.data.tags["seed"] in "12"}


def test_artifacts_that_are_elsewhere_on_purpose_stay(copy, tmp_path):
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


def test_a_collection_continues_what_was_written_of_it(tmp_path):
    first = write_collection(tmp_path, Collection(kind="suite", name="few-shot", runs=("a", "b"), started=5))
    again = write_collection(tmp_path, Collection(kind="suite", name="few-shot", runs=("b", "c"), status="finished"))
    assert first.runs == ("a", "b") and again.runs == ("a", "b", "c") and again.started == 5
    write_collection(tmp_path, Collection(kind="sweep", name="rates", started=3))
    assert [(one.tag, one.status) for one in read_collections(tmp_path)] == [
        ("sweep.rates", "running"),
        ("suite.few-shot", "finished"),
    ]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(name):
    with pytest.raises(ValidationError):
        Collection(kind="sweep", name=name)


def test_a_suite_is_a_parent_run_with_its_runs_below(store):
    runs = [evaluated(store.results, seed) for seed in (1, 2)]
    tracker = CollectionTracker(
        place(store), Collection(kind="suite", name="base-to-novel", settings={"shots": 16, "world": "s3://a:b@mini"})
    )
    tracker.update(runs)
    tracker.close("finished", {"hm/maple": 60.0})
    assert family(store) == {"suite · base-to-novel": [f"{RUN} · seed 1", f"{RUN} · seed 2"]}
    (parent,) = [run for run in all_runs(store) if run.data.tags.get("suite") == "base-to-novel"]
    assert parent.info.status == "FINISHED" and parent.info.end_time >= parent.info.start_time
    assert parent.data.metrics == {"runs": 2.0, "runs_finished": 2.0, "hm/maple": 60.0}
    assert parent.data.tags["settings.shots"] == "16" and parent.data.tags["settings.world"] == "s3://mini"
    found = store.client.search_runs([store.experiment_id], "tags.`suite.base-to-novel` = 'yes'")
    assert [run.data.metrics["hm"] for run in found] == [pytest.approx(60.0)] * 2
    assert sync(store).sent == []


def test_a_run_of_two_collections_is_there_once_and_carries_both_tags(store):
    results = store.results
    shared, alone = evaluated(results, 1), evaluated(results, 2)
    write_collection(results, Collection(kind="sweep", name="rates", runs=(shared, alone), started=2))
    write_collection(results, Collection(kind="suite", name="stability", runs=(shared,), started=1))
    for _ in range(2):
        summary = sync(TrackingStore.choose(results, store.uri))
    assert summary.sent == [] and len(summary.up_to_date) == 4 and len(all_runs(store)) == 4
    assert family(store) == {"suite · stability": [f"{RUN} · seed 1"], "sweep · rates": [f"{RUN} · seed 2"]}
    wanted = "tags.`suite.stability` = 'yes' AND tags.`sweep.rates` = 'yes'"
    both = store.client.search_runs([store.experiment_id], wanted)
    assert [run.data.tags["seed"] for run in both] == ["1"]


def test_a_run_exported_before_is_nested_below_its_parent_without_duplicates(store):
    run = evaluated(store.results, 1)
    assert sync(store).sent == [run]
    (before,) = all_runs(store)
    write_collection(store.results, Collection(kind="suite", name="late", runs=(run,)))
    assert sync(store).sent == ["collections/suite/late", run]
    assert family(store) == {"suite · late": [before.info.run_name]} and len(all_runs(store)) == 2
    for key in before.data.metrics:
        steps = Counter(metric.step for metric in store.client.get_metric_history(before.info.run_id, key))
        assert max(steps.values()) == 1
    assert not sync(store, only=[run]).sent
    assert family(store) == {"suite · late": [before.info.run_name]}


def test_a_suite_deleted_from_the_store_comes_back_with_its_runs(store):
    run = evaluated(store.results, 1)
    write_collection(store.results, Collection(kind="suite", name="gone", runs=(run,)))
    sync(store)
    for one in all_runs(store):
        store.client.delete_run(one.info.run_id)
    sync(store)
    assert len(all_runs(store)) == 2 and family(store) == {"suite · gone": [f"{RUN} · seed 1"]}


def test_results_continued_on_another_machine_are_one_suite_and_one_run(store, tmp_path):
    """Of results behind a URL: the machine that started the suite is lost after it has exported."""
    for machine in ("first", "second"):
        results = tmp_path / machine
        at = RuntimeConfig(results, results, tracking_uri=store.uri, store=f"local://{tmp_path}/remote")
        RemoteResults.from_runtime(at).pull_all(weights=True)
        tracker = CollectionTracker(at, Collection(kind="suite", name="shared"))
        if machine == "first":
            run = evaluated(results, 1)
            RemoteResults.from_runtime(at).push_run(run)
        tracker.update([run])
        tracker.close("finished")
    assert family(store) == {"suite · shared": [f"{RUN} · seed 1"]} and len(all_runs(store)) == 2


def test_results_whose_url_is_away_cost_one_line(store, tmp_path, capsys):
    (tmp_path / "a file").touch()
    at = replace(place(store), store=f"local://{tmp_path}/a file/remote")
    run = evaluated(at.results, 1)
    tracker = CollectionTracker(at, Collection(kind="suite", name="alone"))
    tracker.update([run])
    tracker.close("finished")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"is only in {at.results} so far" in said
    assert family(store) == {"suite · alone": [f"{RUN} · seed 1"]}


def test_a_results_folder_that_cannot_be_written_is_reported_and_stops_nothing(store, capsys):
    (store.results / "collections").write_text("a file where a folder must be")
    tracker = CollectionTracker(place(store), Collection(kind="suite", name="blocked"))
    tracker.update(["base/shapes/maple/mini/16shot/seed1-0"])
    tracker.close("finished")
    assert "cannot" in capsys.readouterr().err


def test_with_tracking_off_the_collection_is_kept_for_later(tmp_path):
    run = evaluated(tmp_path, 1)
    at = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off")
    tracker = CollectionTracker(at, Collection(kind="suite", name="quiet"))
    tracker.update([run])
    tracker.close("finished")
    written = json.loads((tmp_path / "collections/suite/quiet/collection.json").read_text())
    assert written["runs"] == [run] and written["status"] == "finished" and written["schema"] == 1
    assert not (tmp_path / "mlflow.db").exists()


def test_a_broken_file_is_not_answered_with_training_again(tmp_path):
    (tmp_path / "collection.json").write_text("{")
    with pytest.raises(UserError, match=r"collection\.json cannot be read .*type the command again, its runs are kept"):
        read_collection(tmp_path)


ROOT = Path(__file__).parent.parent
NEEDED = ("boto3", "moto")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@contextmanager
def tracking_server(folder, artifacts, environment):
    """`mlflow server` as the README says; gives its address."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", artifacts]
    command += ["--allowed-hosts", f"127.0.0.1:{port},tracking.example.org"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, env={**os.environ, **environment, **quiet}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            patience = time.monotonic() + 180
            while ask(f"http://127.0.0.1:{port}/health") != 200:
                assert time.monotonic() < patience and process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(30)


def ask(url: str, host: str = "") -> int:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


SEND = """
import sys
from pathlib import Path
from runner.config import RuntimeConfig
from runner.tracking import store
from runner.tracking.background import exporter_for
store.CONNECT_SECONDS = 60.0
results = Path(sys.argv[1])
exporter = exporter_for(RuntimeConfig(data=results, results=results, tracking_uri=sys.argv[2]))
exporter.post(*sys.argv[3:])
exporter.flush()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT), reason=f"needs {', '.join(NEEDED)}")
def test_two_processes_a_suite_and_the_page_with_a_server_and_object_storage(tmp_path):
    results = tmp_path / "results"
    runs = [tracked_runs.evaluated(results, seed) for seed in range(1, 7)]
    with (
        object_server(tmp_path) as objects,
        tracking_server(tmp_path, f"s3://{objects.bucket}/mlflow", objects.environment) as address,
    ):
        assert ask(f"{address}/api/2.0/mlflow/experiments/search?max_results=1", host="evil.example.com") == 403
        assert ask(f"{address}/api/2.0/mlflow/experiments/search?max_results=1", host="tracking.example.org") == 200
        senders = [
            subprocess.Popen(
                [sys.executable, "-c", SEND, str(results), address, *runs[number::2]],
                # A busy machine's server may answer late.
                env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        for sender in senders:
            assert sender.communicate(timeout=600)[1] == "" and sender.returncode == 0
        write_collection(results, Collection(kind="suite", name="base-to-novel", runs=tuple(runs), status="finished"))
        assert [len(sync(TrackingStore.choose(results, address)).sent) for _ in range(2)] == [7, 0]
        store = TrackingStore.choose(results, address).open()
        found = list(store.client.search_runs([store.experiment_id], "tags.`suite.base-to-novel` = 'yes'"))
        assert len(found) == 6 and {run.data.tags["seed"] for run in found} == set("123456")
        assert len({run.data.tags[PARENT_TAG] for run in found}) == 1
        for run in found:
            losses = Counter(point.step for point in store.client.get_metric_history(run.info.run_id, "loss"))
            assert losses == {epoch: 1 for epoch in range(5)}
            kept = {file.path for file in store.client.list_artifacts(run.info.run_id)}
            assert {"config.json", "train.json", "eval"} <= kept
        wanted = select_runs(results, store, suite="base-to-novel", methods=["maple"])
        assert {*wanted.run_ids} == {run.info.run_id for run in found}
        assert len(store.client.search_runs([store.experiment_id])) == 7
    copies = [file for file in (results / "mlartifacts").glob("**/*")] if (results / "mlartifacts").exists() else []
    assert copies == [], "files were kept beside the results instead of in the bucket"
