"""Export runs, suites and sweeps to MLflow, any number of times.

`tracking.json` in the folder of a run holds the id of its MLflow run and what was logged, for each store. So a run has
one MLflow run, however often it is interrupted, and the next export logs what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from procap.errors import UserError
from runner.config import FrozenModel, RunConfig
from runner.results import Progress, TrainResult, harmonic_mean, read_document, write_json
from runner.run_collection import FILE, read_collection, read_collections
from runner.run_collection import Collection as RunCollection
from runner.run_folders import TRACKING_FILE, RunFolder, find_runs
from runner.tracking.content import (
    STATUS,
    Metrics,
    collection_metrics,
    describe_collection,
    describe_run,
    epoch_metrics,
    flatten,
    milliseconds,
    name_run,
    result_metrics,
)
from runner.tracking.store import LOCK_SECONDS, TrackingError, TrackingStore, format_error
from shards.credentials import mask
from shards.files import file_lock

if TYPE_CHECKING:
    from mlflow.entities import Metric

PARENT_TAG = "mlflow.parentRunId"
NAMES_PER_BATCH, METRICS_PER_BATCH = 100, 1000


class Logged(FrozenModel):
    """What one store has of a run or collection. files: when each result in it was written, by name."""

    run_id: str = ""
    started: int = Field(default_factory=lambda: time.time_ns() // 1_000_000, description="milliseconds since 1970")
    status: str = ""
    epochs: int = 0
    files: dict[str, str] = Field(default_factory=dict)
    parents: dict[str, str] = Field(default_factory=dict, description="run ids of its collections, by their tags")


class TrackingRecord(FrozenModel):
    """`tracking.json`: what was logged, by the names of stores."""

    stores: dict[str, Logged] = Field(default_factory=dict)


@dataclass
class Update:
    """What a store lacks of a run or collection. logged: what it has afterwards, except the id of its run."""

    name: Callable[[], str]
    logged: Logged
    tags: dict[str, str]
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    artifacts: list[Path] = field(default_factory=list)
    inputs: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, digest and context of data sets."""
    end: int | None = None


@dataclass
class Summary:
    """The result of `sync`, by paths below the results. failed: (path, reason)."""

    sent: list[str] = field(default_factory=list)
    up_to_date: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


def sync(
    store: TrackingStore,
    *,
    only: Collection[str] | None = None,
    log_checkpoints: bool = False,
    dry_run: bool = False,
    on_run: Callable[[str, bool], None] | None = None,
) -> Summary:
    """Log what is missing of the runs and collections of the store's results; runs are nested below collections.

    only: paths below the results; default all. The collections that a run in it belongs to are exported as well.
    dry_run: change nothing; `sent` lists what would be sent. on_run: called with each path and whether it was sent.
    A broken file, or content that MLflow refuses, fails its run alone. Raises TrackingError when the store cannot be
    reached or stops answering.
    """
    results, summary = store.results, Summary()
    failed = summary.failed if only is None else []
    collections = read_collections(results, on_error=lambda path, error: failed.append((path, str(error))))
    paths = [run.path.relative_to(results).as_posix() for run in find_runs(results)] if only is None else [*only]
    if only is not None:
        collections = [each for each in collections if each.path in only or not set(only).isdisjoint(each.runs)]
    parents: dict[str, dict[str, str]] = {}
    if not paths and not collections and not failed:
        return summary
    if not (dry_run and store.file and not store.file.exists()):
        store.open()
    # Parents first, because a run is nested below the id of its parent.
    for path in dict.fromkeys([*(collection.path for collection in collections), *paths]):
        try:
            run_id, sent = _export(store, path, parents.get(path, {}), log_checkpoints, dry_run=dry_run)
        except TrackingError:
            raise
        except UserError as error:
            summary.failed.append((path, str(error)))
            continue
        except Exception as error:
            if getattr(error, "error_code", "") != "INVALID_PARAMETER_VALUE":
                raise TrackingError(f"{store.address} did not accept {path}: {format_error(error)}") from error
            summary.failed.append((path, f"{store.address} does not accept it: {format_error(error)}"))
            continue
        for collection in (collection for collection in collections if collection.path == path and run_id):
            for run in collection.runs:
                parents.setdefault(run, {})[collection.tag] = run_id
        if sent is not None:
            (summary.sent if sent else summary.up_to_date).append(path)
            if on_run is not None:
                on_run(path, sent)
    return summary


def _exists(store: TrackingStore, run_id: str) -> bool:
    """Whether the store has a run, which may have been deleted there."""
    from mlflow.exceptions import MlflowException

    try:
        return bool(run_id) and store.client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def _export(
    store: TrackingStore,
    path: str,
    parents: Mapping[str, str],
    log_checkpoints: bool,
    *,
    dry_run: bool,
) -> tuple[str, bool | None]:
    """Log what is missing of one folder; returns the id of its MLflow run and whether anything was missing.

    The second value is None if there is nothing to log yet.
    """
    folder = store.results / path
    with file_lock(folder / ".tracking.lock", timeout=LOCK_SECONDS, required=False):
        record = read_document(folder / TRACKING_FILE, TrackingRecord) or TrackingRecord()
        before = record.stores.get(store.name, Logged())
        is_new = dry_run and store.file is not None and not store.file.exists()
        if is_new or not _exists(store, before.run_id):
            before = Logged()
        collection = read_collection(folder)
        update = (
            _update_run(RunFolder(folder), before, log_checkpoints)
            if collection is None
            else _update_collection(collection, folder, store.results, before)
        )
        if update is None:
            return before.run_id, None
        update.logged = update.logged.model_copy(update={"parents": {**before.parents, **parents}})
        if before.run_id and update.logged == before:
            return before.run_id, False
        if dry_run:
            return before.run_id, True
        if not before.run_id:
            start, name = update.logged.started, update.name()
            run = store.client.create_run(store.experiment_id, start_time=start, run_name=name)
            before = Logged(run_id=run.info.run_id, started=start)
            # Before anything is logged, so that an export which is killed continues with this run.
            _write_record(folder, record, store, before)
        update.logged = update.logged.model_copy(update={"run_id": before.run_id})
        _log(store, update)
        _write_record(folder, record, store, update.logged)
        return before.run_id, True


def _write_record(folder: Path, record: TrackingRecord, store: TrackingStore, logged: Logged) -> None:
    write_json(folder / TRACKING_FILE, TrackingRecord(stores={**record.stores, store.name: logged}))


def _update_run(folder: RunFolder, before: Logged, log_checkpoints: bool) -> Update | None:
    """Collect what is missing of a run; None before the end of its first epoch. Raises UserError for a broken file."""
    config, train = folder.config(), folder.train()
    # The run may finish, and its progress file be gone, between the two reads.
    state = train or folder.progress() or folder.train()
    if config is None or state is None or not (state.epochs or isinstance(state, TrainResult)):
        return None
    if not before.run_id:
        end = milliseconds(state.written) if isinstance(state, TrainResult) else before.started
        before = before.model_copy(update={"started": end - int(1000 * state.seconds)})
    logged = before.model_copy(update={"status": STATUS[state.status], "epochs": len(state.epochs)})
    tags, params = describe_run(config, state, folder.path), dict(flatten(config.model_dump(mode="json")))
    update = Update(lambda: name_run(config), logged, tags, params)
    update.metrics = list(_new_epochs(config, folder, state, before))
    if isinstance(state, TrainResult):
        update.end = milliseconds(state.written)
        _add_results(update, config, state, folder, before, log_checkpoints)
    return update


def _new_epochs(
    config: RunConfig, folder: RunFolder, state: TrainResult | Progress, before: Logged
) -> Iterator[Metric]:
    """Yield the metrics of the epochs that were not logged; their times follow from their seconds."""
    validation: dict[int, list[float]] = {}
    for count in folder.validation():
        if count.target.startswith(f"{config.dataset}:"):
            validation.setdefault(count.epoch, []).append(count.accuracy)
    clock = float(before.started)
    for log in state.epochs:
        clock += 1000 * log.seconds
        if log.epoch >= before.epochs:
            metrics = epoch_metrics(log)
            if accuracies := validation.get(log.epoch):
                metrics["validation/accuracy"] = harmonic_mean(*accuracies) if len(accuracies) == 2 else accuracies[0]
            yield from _to_mlflow(metrics, int(clock), log.epoch)


def _add_results(
    update: Update, config: RunConfig, train: TrainResult, folder: RunFolder, before: Logged, log_checkpoints: bool
) -> None:
    """Add the metrics, files and data sets of a finished run as far as they were written since the last export."""
    evaluations = folder.evaluations()
    written = {folder.train_file: train.written}
    written |= {folder.path / "eval" / result.file: result.written for result in evaluations}
    if log_checkpoints:
        written[folder.checkpoint_file] = train.checkpoint_sha256
    files = {**before.files, **{file.relative_to(folder.path).as_posix(): when for file, when in written.items()}}
    update.logged = update.logged.model_copy(update={"files": files})
    if files == before.files:
        return
    update.artifacts = [file for file, when in written.items() if before.files.get(file.name) != when]
    last = max([train.written, *(result.written for result in evaluations)])
    metrics = result_metrics(config, train, evaluations)
    update.metrics += _to_mlflow({"train_seconds": metrics.pop("train_seconds")}, milliseconds(train.written), 0)
    update.metrics += _to_mlflow(metrics, milliseconds(last), 0)
    update.inputs = [(config.dataset, train.manifest_digest, "training")]
    update.inputs += [(result.target, result.manifest_digest, "evaluation") for result in evaluations]


def _update_collection(collection: RunCollection, folder: Path, results: Path, before: Logged) -> Update:
    """Collect what is missing of a suite or sweep."""
    metrics = collection_metrics(collection, results)
    logged = before.model_copy(
        update={
            "status": STATUS[collection.status],
            "started": collection.started,
            "files": {FILE: " ".join(f"{name}={value!r}" for name, value in sorted(metrics.items()))},
        }
    )
    update = Update(lambda: f"{collection.kind} · {collection.name}", logged, describe_collection(collection, folder))
    update.metrics = list(_to_mlflow(metrics, time.time_ns() // 1_000_000, 0))
    update.end = collection.ended if collection.status != "running" else None
    return update


def _to_mlflow(metrics: Metrics, milliseconds: int, step: int) -> Iterator[Metric]:
    from mlflow.entities import Metric

    return (Metric(name, float(value), milliseconds, step) for name, value in metrics.items())


def _log(store: TrackingStore, update: Update) -> None:
    """Send an update to MLflow.

    Repeating an update that was killed half-way changes nothing: equal values of equal times are stored once.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

    client, run_id, logged = store.client, update.logged.run_id, update.logged
    tags = {name: mask(value) for name, value in update.tags.items()} | dict.fromkeys(logged.parents, "yes")
    if logged.parents:
        tags[PARENT_TAG] = next(iter(logged.parents.values()))
    for batch in _batches(list(update.params.items()), NAMES_PER_BATCH):
        client.log_batch(run_id, params=[Param(name, mask(value)) for name, value in batch])
    client.log_batch(run_id, tags=[RunTag(*item) for item in tags.items()])
    for metrics in _batches(update.metrics, METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics)
    if update.inputs:
        inputs = [
            DatasetInput(Dataset(name, digest[:36], "procap", name), [InputTag("mlflow.data.context", context)])
            for name, digest, context in update.inputs
        ]
        client.log_inputs(run_id, inputs)
    for file in update.artifacts:
        client.log_artifact(run_id, str(file), "eval" if file.parent.name == "eval" else None)
    if update.end is not None:
        client.set_terminated(run_id, logged.status, update.end)
    else:
        client.update_run(run_id, logged.status)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
