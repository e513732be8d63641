"""Export runs, suites and sweeps to MLflow, any number of times.

`tracking.json` in the folder of a run holds the id of its MLflow run and what was logged. So a run has one MLflow run,
however often it is interrupted, and the next export logs what is missing. An export to a different store starts anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from procap.errors import UserError
from runner.config import FrozenModel
from runner.results import read_document, write_json
from runner.run_collection import read_collections
from runner.run_folders import TRACKING_FILE, RunFolder, find_runs
from runner.tracking.content import Content, collection_content, run_content
from runner.tracking.store import TrackingStore, format_error
from shards.credentials import mask
from shards.files import file_lock

LOCK_SECONDS = 30.0
PARENT_TAG = "mlflow.parentRunId"
METRICS_PER_BATCH = 1000


class TrackingRecord(FrozenModel):
    """`tracking.json`: the MLflow run of a run or collection in one store. digest: of what was logged."""

    store: str
    run_id: str
    started: int
    digest: str = ""


@dataclass
class Summary:
    """The result of `sync`, by paths below the results. failed: reasons."""

    sent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def sync(store: TrackingStore, *, only: Collection[str] | None = None) -> Summary:
    """Log what is missing of the runs and collections of the store's results; runs are nested below collections.

    only: paths below the results; default all. The collections that a run in it belongs to are exported as well.
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
        # Parents first, because a run is nested below the id of its parent.
        for path in dict.fromkeys([*by_path, *paths]):
            record, collection = read_record(store, results / path), by_path.get(path)
            content: Content | None
            try:
                if collection:
                    content = collection_content(collection, results, time.time_ns() // 1_000_000)
                else:
                    content = run_content(RunFolder(results / path), record.started if record else None)
            except UserError as error:
                summary.failed[path] = str(error)
                continue
            if content is None:
                continue
            try:
                exported = _export(store, results / path, record, content, parents[path])
            except Exception as error:
                raise UserError(f"{store.address} does not accept {path}: {format_error(error)}") from error
            if exported != record:
                summary.sent.append(path)
            if collection:
                for run in collection.runs:
                    parents[run][f"{collection.kind}.{collection.name}"] = exported.run_id
    return summary


def _export(
    store: TrackingStore, folder: Path, record: TrackingRecord | None, content: Content, parents: Mapping[str, str]
) -> TrackingRecord:
    """Log what is missing of one folder, and return its new record.

    parents: the ids of the collections of a run by their tags, such as suite.base-to-novel.
    """
    values = [(name, value, step) for name, value, _, step in content.metrics]
    digest = hashlib.sha256(json.dumps([content.status, values, parents]).encode()).hexdigest()
    if record and record.digest == digest:
        return record
    if record is None:
        source = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}
        run = store.client.create_run(store.experiment_id, content.started, source, content.name)
        record = TrackingRecord(store=store.identity, run_id=run.info.run_id, started=content.started)
        # Before anything is logged, so that an export which is killed continues with this run.
        write_json(folder / TRACKING_FILE, record)
    _log(store, record.run_id, content, parents)
    record = record.model_copy(update={"digest": digest})
    write_json(folder / TRACKING_FILE, record)
    return record


def read_record(store: TrackingStore, folder: Path) -> TrackingRecord | None:
    """Read `tracking.json`; None if the folder was not exported to `store`."""
    identity, record = store.identity, read_document(folder / TRACKING_FILE, TrackingRecord)
    return record if record and record.store == identity else None


def _log(store: TrackingStore, run_id: str, content: Content, parents: Mapping[str, str]) -> None:
    """Send `content` to MLflow. Repeating this changes nothing: equal values of equal times are stored once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    client = store.client
    # A run can belong to several collections, but MLflow nests it below a single parent: the others only tag it.
    tags = {name: mask(value) for name, value in content.tags.items()} | dict.fromkeys(parents, "yes")
    if parents:
        tags[PARENT_TAG] = next(iter(parents.values()))
    params = [Param(name, mask(value)) for name, value in content.params.items()]
    metrics = [Metric(*metric) for metric in content.metrics]
    client.log_batch(run_id, params=params, tags=[RunTag(*item) for item in tags.items()])
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
    if content.inputs:
        # MLflow accepts digests of at most 36 characters.
        inputs = [
            DatasetInput(Dataset(name, digest[:36], "procap", name), [InputTag("mlflow.data.context", context)])
            for name, digest, context in content.inputs
        ]
        client.log_inputs(run_id, inputs)
    if content.ended is not None:
        client.set_terminated(run_id, content.status, content.ended)
    else:
        client.update_run(run_id, content.status)
