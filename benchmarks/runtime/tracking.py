"""Log the rows of a runtime report to MLflow: one run per data set, method, mode and precision."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.console.output import note, plural
from runner.config import RuntimeConfig
from runner.tracking.store import TrackingStore, format_error

PARAMS = ("dataset", "method", "mode", "precision", "classes", "train_images", "batch", "test_batch", "epochs", "steps")


def log_rows(report: Mapping[str, Any], runtime: RuntimeConfig) -> None:
    """Log all numbers of each row as metrics, such as `train_seconds` and `encoder_fps/median`."""
    if runtime.tracking_uri == "off":
        return
    try:
        store = TrackingStore.choose(runtime.results, runtime.tracking_uri).open()
        import pandas as pd
        from mlflow.entities import Metric, Param

        tags = {"procap.benchmark": "runtime", "device": report["device"]["name"], "folder": report["folder"]}
        for row in report["rows"]:
            # Nested names are joined; missing numbers are no numbers to pandas, and left out.
            numbers = pd.json_normalize({**row}, sep="/").drop(columns=[*PARAMS]).select_dtypes("number").iloc[0]
            params = {name: row[name] for name in PARAMS} | {"backbone": report["backbone"]["name"]}
            name = " · ".join(("runtime", *(row[part] for part in ("method", "dataset", "mode", "precision"))))
            run_id = store.client.create_run(store.experiment_id, tags=tags, run_name=name).info.run_id
            now = time.time_ns() // 1_000_000
            metrics = [Metric(key, float(value), now, 0) for key, value in numbers.items()]
            store.client.log_batch(run_id, metrics, [Param(key, str(value)) for key, value in params.items()])
            store.client.set_terminated(run_id)
    except Exception as error:
        note(f"tracking: {format_error(error)}; the measurement is in {report['folder']}")
    else:
        note(f"tracking: {plural(len(report['rows']), 'run')} in {store.address}")
