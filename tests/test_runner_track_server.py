"""A tracking server with object storage, as a group of people has it: real ones, on this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import tracked_runs

from benchmarks.cli.ui import RunFilter, prepare
from benchmarks.studies.chaos.object_server import object_server
from benchmarks.studies.chaos.ports import free_port
from runner.run_collection import Collection, write_collection
from runner.tracking.export import PARENT_TAG, sync
from runner.tracking.store import TrackingStore

ROOT = Path(__file__).parent.parent
NEEDED = ("boto3", "moto")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]


@contextmanager
def tracking_server(folder: Path, artifacts: str, environment: dict[str, str]) -> Iterator[str]:
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


def test_two_processes_a_suite_and_the_page_with_a_server_and_object_storage(tmp_path: Path) -> None:
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
        assert (
            len(sync(TrackingStore.choose(results, address)).sent) == 7
            and sync(TrackingStore.choose(results, address)).sent == []
        )
        store = TrackingStore.choose(results, address).open()
        found = list(store.client.search_runs([store.experiment_id], "tags.`suite.base-to-novel` = 'yes'"))
        assert len(found) == 6 and {run.data.tags["seed"] for run in found} == set("123456")
        assert len({run.data.tags[PARENT_TAG] for run in found}) == 1
        for run in found:
            losses = Counter(point.step for point in store.client.get_metric_history(run.info.run_id, "loss"))
            assert losses == {epoch: 1 for epoch in range(5)}
            kept = {file.path for file in store.client.list_artifacts(run.info.run_id)}
            assert {"config.json", "train.json", "eval"} <= kept
        wanted = RunFilter(suite="base-to-novel", methods=["maple"])
        assert {*prepare(results, store, wanted).run_ids} == {run.info.run_id for run in found}
        assert len(store.client.search_runs([store.experiment_id])) == 7
    copies = [file for file in (results / "mlartifacts").glob("**/*")] if (results / "mlartifacts").exists() else []
    assert copies == [], "files were kept beside the results instead of in the bucket"
