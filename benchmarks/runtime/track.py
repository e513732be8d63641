"""Send each row of the runtime benchmark to MLflow as a run, if MLflow is installed and tracking is on."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.console.output import note, plural
from runner.tracking.store import TrackingStore, format_error

EXPERIMENT_TAG = "procap.benchmark"
PARAMS = ("dataset", "method", "mode", "precision", "classes", "train_images", "batch", "test_batch", "epochs", "steps",
          "steps_measured", "extrapolated")  # fmt: skip


def track(report: Mapping[str, Any], folder: Path, results: Path, uri: str) -> int:
    """Send the rows; returns how many were sent. A failing store causes a warning and never an error."""
    if uri == "off" or importlib.util.find_spec("mlflow") is None:
        return 0
    try:
        store = TrackingStore.choose(results, uri or None).open()
        for row in report["rows"]:
            _send(store.client, store.experiment_id, row, report, folder)
    except Exception as error:
        note(f"tracking: {format_error(error)}; the results are in {folder} all the same")
        return 0
    note(f"{plural(len(report['rows']), 'row')} sent to {store.address}")
    return len(report["rows"])


def _send(client: Any, experiment: str, row: Mapping[str, Any], report: Mapping[str, Any], folder: Path) -> None:
    from mlflow.entities import Metric, Param

    when = int(1000 * time.time())
    name = f"runtime · {row['method']} · {row['dataset']} · {row['mode']} · {row['precision']}"
    tags = {EXPERIMENT_TAG: "runtime", "procap.backbone": report["backbone"]["name"], "procap.mode": row["mode"],
            "procap.device": report["device"]["name"]}  # fmt: skip
    run = client.create_run(experiment, tags=tags, run_name=name)
    metrics = [Metric(key, float(value), when, 0) for key, value in metrics_of(row)]
    params = [Param(key, str(row[key])) for key in PARAMS]
    params.append(Param("backbone", f"{report['backbone']['name']} {report['backbone']['weights']}"))
    client.log_batch(run.info.run_id, metrics=metrics, params=params)
    client.log_artifact(run.info.run_id, str(folder / "runtime.json"))
    client.set_terminated(run.info.run_id, "FINISHED")


def metrics_of(row: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Flatten the numbers of a row: `encoder_fps/median`; missing ones are left out."""
    for name, value in row.items():
        if path == "" and name in (*PARAMS, "options"):
            continue
        if isinstance(value, Mapping):
            yield from metrics_of(value, f"{path}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{name}", value
