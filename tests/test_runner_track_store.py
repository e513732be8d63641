"""MLflow's store: how messages name it, and that an unreachable one fails within seconds."""

from __future__ import annotations

import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest

from runner.tracking.store import TrackingError, TrackingStore


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("postgresql+psycopg2://me:hunter2@db/mlflow", "postgresql+psycopg2://db/mlflow"),
        ("postgresql+psycopg2://db:5433/mlflow?user=me&password=hunter2", "postgresql+psycopg2://db:5433/mlflow"),
        ("https://me@example.org/mlflow?token=hunter2", "https://example.org/mlflow"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("databricks", "databricks"),
        ("sqlite+pysqlite:////tmp/why%3F/a@b/mlflow.db", "sqlite+pysqlite:////tmp/why%3F/a@b/mlflow.db"),
    ],
)
def test_messages_name_a_store_without_its_password(uri: str, address: str, tmp_path: Path) -> None:
    assert TrackingStore(uri, "procap", tmp_path).address == address


@pytest.mark.parametrize("scheme", ["http", "postgresql", "postgresql+psycopg2", "mysql+pymysql"])
def test_a_store_where_no_program_listens_fails_at_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("mlflow.tracking.MlflowClient", asked.append)
    with closing(socket.socket()) as bound:
        # As long as it is bound nothing else listens there. MLflow itself would retry for minutes.
        bound.bind(("127.0.0.1", 0))
        there = f"127.0.0.1:{bound.getsockname()[1]}/mlflow"
        with pytest.raises(TrackingError, match=rf"^cannot reach {scheme.replace('+', '.')}://{there}: .*refused"):
            TrackingStore(f"{scheme}://me:hunter2@{there}", "procap", tmp_path).open()
    assert not asked


def test_a_folder_with_any_name_keeps_its_store_in_itself(tmp_path: Path, mlflow_database: Path) -> None:
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
