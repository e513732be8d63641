"""Export runs, suites and sweeps to MLflow, any number of times.

`tracking.json` in the folder of a run holds the ID of its MLflow run. So a run has one MLflow run, however often it is
interrupted, and the next export logs what is missing there. An export to a different store or experiment starts anew.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from procap.errors import UserError
from runner.config import FrozenModel
from runner.results import read_document, write_json
from runner.run_collection import read_collections
from runner.run_folders import TRACKING_FILE, RunFolder, find_runs
from runner.tracking.content import Content, collection_content, run_content
from runner.tracking.store import TrackingStore, format_error
from shards.credentials import mask
from shards.files import file_lock

if TYPE_CHECKING:
    from mlflow.entities import Run

LOCK_SECONDS = 30.0
PARENT_TAG = "mlflow.parentRunId"


class TrackingRecord(FrozenModel):
    """`tracking.json`: the MLflow run of a run or collection."""

    run_id: str


@dataclass
class Summary:
    """The result of `sync`, by paths below the results. failed: reasons."""

    sent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def sync(store: TrackingStore, *, only: Collection[str] | None = None) -> Summary:
    """Log what is missing of the runs and collections of the store's results; runs are nested below collections.

    only: paths below the results; default all. The collections of these runs are exported as well.
    A broken file fails its run alone. Raises UserError when the store cannot be reached or refuses a request.
    """
    results, summary = store.results, Summary()
    collections = read_collections(results, on_error=lambda path, error: summary.failed.update({path: str(error)}))
    if only is None:
        paths = [run.path.relative_to(results).as_posix() for run in find_runs(results)]
    else:
        paths = [*only]
        collections = [each for each in collections if each.path in only or not set(only).isdisjoint(each.runs)]
    by_path = {collection.path: collection for collection in collections}
    parents: dict[str, dict[str, str]] = defaultdict(dict)
    # Two processes would make two MLflow runs of one run.
    with file_lock(results / ".tracking.lock", timeout=LOCK_SECONDS):
        # Parents first, because a run is nested below the ID of its parent.
        for path in dict.fromkeys([*by_path, *paths]):
            folder, collection, now = results / path, by_path.get(path), time.time_ns() // 1_000_000
            run = find_mlflow_run(store, folder)
            content: Content | None
            try:
                if collection:
                    content = collection_content(collection, results, now)
                else:
                    content = run_content(RunFolder(folder), run.info.start_time if run else None, now)
            except UserError as error:
                summary.failed[path] = str(error)
                continue
            if content is None:
                continue
            try:
                run_id, is_new = _export(store, folder, run, content, parents[path])
            except Exception as error:
                raise UserError(f"{store.address} does not accept {path}: {format_error(error)}") from error
            if is_new:
                summary.sent.append(path)
            if collection:
                for child in collection.runs:
                    parents[child][f"{collection.kind}.{collection.name}"] = run_id
    return summary


def find_mlflow_run(store: TrackingStore, folder: Path) -> Run | None:
    """Find the MLflow run of a folder; None if the folder was not exported to this experiment of the store."""
    from mlflow.exceptions import MlflowException

    experiment, record = store.experiment_id, read_document(folder / TRACKING_FILE, TrackingRecord)
    try:
        run = store.client.get_run(record.run_id) if record else None
    except MlflowException as error:
        # A different store does not know the run, and gets a new one. A store that fails must not get a second one.
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise UserError(f"{store.address} does not answer: {format_error(error)}") from error
        return None
    return run if run and run.info.experiment_id == experiment else None


def _export(
    store: TrackingStore, folder: Path, run: Run | None, content: Content, parents: Mapping[str, str]
) -> tuple[str, bool]:
    """Log what is missing of one folder; returns the ID of its MLflow run, and whether anything was missing.

    parents: the IDs of the collections of a run by their tags, such as suite.base-to-novel.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    client = store.client
    # A run can belong to several collections, but MLflow nests it below a single parent: the others only tag it.
    tags = {name: mask(value) for name, value in content.tags.items()} | dict.fromkeys(parents, "yes")
    if parents:
        tags[PARENT_TAG] = next(iter(parents.values()))
    if run is None:
        source = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}
        run = client.create_run(store.experiment_id, content.started, source, content.name)
        # Before anything is logged, so that an export which is killed continues with this run.
        write_json(folder / TRACKING_FILE, TrackingRecord(run_id=run.info.run_id))
    logged, latest = run.data.metrics, {name: value for name, value, _, _ in content.metrics}
    is_logged = latest.items() <= logged.items() and tags.items() <= run.data.tags.items()
    # The status is set last.
    if is_logged and run.info.status == content.status:
        return run.info.run_id, False
    # Values of epochs are sent again, as MLflow stores equal values of equal times once; results have new times.
    new = [metric for metric in content.metrics if metric[3] or logged.get(metric[0]) != metric[1]]
    run_id, metrics = run.info.run_id, [Metric(*metric) for metric in new]
    params = [Param(*param) for param in content.params.items()]
    client.log_batch(run_id, metrics, params, [RunTag(*tag) for tag in tags.items()])
    if content.inputs:
        inputs = [
            DatasetInput(Dataset(name, digest, "procap", name), [InputTag("mlflow.data.context", context)])
            for name, digest, context in content.inputs
        ]
        client.log_inputs(run_id, inputs)
    if content.ended is not None:
        client.set_terminated(run_id, content.status, content.ended)
    else:
        client.update_run(run_id, content.status)
    return run_id, True
