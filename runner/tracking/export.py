"""Export runs, suites and sweeps to MLflow, any number of times and from any number of processes.

An MLflow run is identified by its tag `procap.key`. Its tag `procap.content`, written last, is the hash of the exported
files: if it is equal, there is nothing to do; otherwise whatever is missing or has changed is logged. So the next
export completes one that was killed half-way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from procap.errors import UserError
from runner.collection import CollectionFolder, find_collections, read_collections
from runner.results import RunFolder, find_runs
from runner.tracking.record import Record, read_collection, read_run
from runner.tracking.store import Destination, Store, TrackingError, first_line, locked, open_store

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

KEY_TAG = "procap.key"
CONTENT_TAG = "procap.content"
CHECKPOINT_TAG = "procap.checkpoint"
PARENT_TAG = "mlflow.parentRunId"
FORMAT = 4
"""Part of every content hash: increment it when other things are logged, so that all runs are exported again."""
NAMES_PER_BATCH, METRICS_PER_BATCH, RUNS_PER_PAGE = 100, 1000, 1000
DOCUMENTS = (".json", ".csv", ".md", ".tex")
PROGRESS = "progress.json"


@dataclass
class Summary:
    """The result of `sync`, by paths below the results. failed: (path, reason)."""

    destination: str
    sent: list[str] = field(default_factory=list)
    up_to_date: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def sync(
    results: Path,
    uri: str | None = None,
    *,
    only: Collection[str] | None = None,
    log_checkpoints: bool = False,
    dry_run: bool = False,
    store: Store | None = None,
    on_run: Callable[[str, bool], None] | None = None,
) -> Summary:
    """Export what the store lacks of the runs and collections below `results`; runs are nested below collections.

    only: paths below `results`; default all. The collections that a run in it belongs to are exported as well.
    dry_run: change nothing; `sent` then lists what would be sent.
    store: the open store of `uri`; default: it is opened.
    on_run: called with each path and whether it was sent.
    A broken file fails its run alone. Raises TrackingError when the store cannot be reached or stops answering,
    UsageError for a URI that is none.
    """
    destination = Destination.choose(results, uri)
    summary = Summary(destination.address)
    collections = read_collections(results)
    readable = {results / one.path for one in collections}
    broken = [folder for folder in find_collections(results) if folder.path not in readable]
    runs = find_runs(results) if only is None else [RunFolder(results / path) for path in only]
    if not runs and not collections and not broken:
        return summary
    if store is None and not (dry_run and destination.file and not destination.file.exists()):
        store = open_store(destination)
    exporter = _Exporter(store, log_checkpoints, _exported(store, results) if store and only is None else {})

    def export(folder: RunFolder | CollectionFolder, parents: Mapping[str, str]) -> str:
        path = folder.path.relative_to(results).as_posix()
        try:
            run_id, sent = exporter.export(folder, parents, dry_run=dry_run)
        except TrackingError:
            raise
        except UserError as error:
            summary.failed.append((path, str(error)))
            return ""
        except Exception as error:
            raise TrackingError(f"{destination.address} did not take {path}: {first_line(error)}") from error
        if sent:
            summary.sent.append(path)
        else:
            summary.up_to_date += 1
        if on_run is not None:
            on_run(path, sent)
        return run_id

    # Parents first: a run cannot be nested below what is not there.
    parents: dict[str, dict[str, str]] = {}
    for collection in collections:
        if only is None or collection.path in only or not set(only).isdisjoint(collection.runs):
            run_id = export(CollectionFolder(results / collection.path), {})
            for run in collection.runs:
                parents.setdefault(run, {})[collection.tag] = run_id
    for folder in broken if only is None else ():
        export(folder, {})
    for run_folder in runs:
        if run_folder.config_file.exists():
            export(run_folder, parents.get(run_folder.path.relative_to(results).as_posix(), {}))
    return summary


def search_runs(store: Store, where: str) -> Iterator[Run]:
    """List all runs of the experiment that match the search `where`, page by page."""
    token = None
    while True:
        page = store.client.search_runs([store.experiment_id], where, max_results=RUNS_PER_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _exported(store: Store, results: Path) -> dict[str, tuple[str, bool]]:
    """Return, by content hash, the id of each MLflow run of `results` and whether it has its checkpoint."""
    # A quote would end the pattern; `_` matches any character.
    where = f"tags.folder LIKE '{results.resolve().as_posix().replace(chr(39), '_')}/%'"
    tags = {run.info.run_id: run.data.tags for run in search_runs(store, where)}
    return {one[CONTENT_TAG]: (run_id, CHECKPOINT_TAG in one) for run_id, one in tags.items() if CONTENT_TAG in one}


@dataclass(frozen=True)
class _Exporter:
    """store: None in a dry run where there is none yet. exported: as `_exported` gives it."""

    store: Store | None
    log_checkpoints: bool
    exported: Mapping[str, tuple[str, bool]]

    def export(
        self, folder: RunFolder | CollectionFolder, parents: Mapping[str, str], *, dry_run: bool = False
    ) -> tuple[str, bool]:
        """Log what is missing of one folder; returns the id of its MLflow run and whether anything was logged.

        parents: ids of the MLflow runs of its collections by their tag (suite.base-to-novel), the direct parent first.
        """
        checkpoint = self.log_checkpoints and isinstance(folder, RunFolder) and folder.train_file.exists()
        run_id, has_checkpoint = self.exported.get(_content(folder.path, parents), ("", False))
        if run_id and has_checkpoint >= checkpoint:
            return run_id, False
        if dry_run or self.store is None:
            record = _read(folder)
            return run_id, record is not None and record.key is not None
        with locked(folder.path / ".tracking.lock"):
            content, record = _content(folder.path, parents), _read(folder)
            if record is None or record.key is None:
                return "", False
            run = _find(self.store, record.key)
            if run is None:
                tags = {KEY_TAG: record.key, **record.tags}
                run = self.store.client.create_run(
                    self.store.experiment_id, start_time=record.start, tags=tags, run_name=record.name()
                )
            elif run.data.tags.get(CONTENT_TAG) == content and (CHECKPOINT_TAG in run.data.tags) >= checkpoint:
                return run.info.run_id, False
            tags = {**record.tags, **dict.fromkeys(parents, "yes")}
            if parents:
                tags[PARENT_TAG] = next(iter(parents.values()))
            _log(self.store, run, record, tags)
            _attach(self.store, run, folder.path)
            if checkpoint and record.checkpoint and isinstance(folder, RunFolder):
                self.store.client.log_artifact(run.info.run_id, str(folder.checkpoint_file))
                self.store.client.set_tag(run.info.run_id, CHECKPOINT_TAG, record.checkpoint)
            self.store.client.set_tag(run.info.run_id, CONTENT_TAG, content)
            return run.info.run_id, True


def _read(folder: RunFolder | CollectionFolder) -> Record | None:
    return read_run(folder) if isinstance(folder, RunFolder) else read_collection(folder)


def _documents(path: Path) -> list[Path]:
    """List the small files of a run or a collection: its results, and the tables of a suite."""
    files = [*path.glob("*"), *path.glob("eval/*.json")]
    return sorted(file for file in files if file.suffix in DOCUMENTS and not file.name.startswith("."))


def _content(path: Path, parents: Mapping[str, str]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {path.resolve()} {sorted(parents.items())}".encode())
    for file in _documents(path):
        with suppress(FileNotFoundError):
            digest.update(f"{file.name} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _find(store: Store, key: str) -> Run | None:
    found = sorted(search_runs(store, f"tags.`{KEY_TAG}` = '{key}'"), key=lambda run: run.info.run_id)
    # Lock files do not work between machines, so two machines can have created a run each.
    for copy in found[1:]:
        store.client.delete_run(copy.info.run_id)
    return found[0] if found else None


def _log(store: Store, run: Run, record: Record, tags: Mapping[str, str]) -> None:
    """Log parameters, tags, metrics and the status as far as `run` does not have them."""
    from mlflow.entities import Param, RunTag

    client, run_id, there = store.client, run.info.run_id, run.data
    params = [Param(name, value) for name, value in record.params.items() if name not in there.params]
    for start in range(0, len(params), NAMES_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + NAMES_PER_BATCH])
    changed = [RunTag(name, value) for name, value in tags.items() if there.tags.get(name) != value]
    for start in range(0, len(changed), NAMES_PER_BATCH):
        client.log_batch(run_id, tags=changed[start : start + NAMES_PER_BATCH])
    metrics = list(_new_metrics(run, record))
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
    if record.end is not None:
        client.set_terminated(run_id, record.status, record.end)
    elif run.info.status != record.status:
        client.update_run(run_id, record.status)


def _new_metrics(run: Run, record: Record) -> Iterator[Metric]:
    """List the points that `run` lacks: of a series those after its last step, single values if changed."""
    from mlflow.entities import Metric

    last = {metric.key: metric for metric in run.data.to_proto().metrics}
    for point in record.points:
        before = last.get(point.key)
        step = point.step
        if step is None:
            if before is not None and before.value == point.value:
                continue
            step = before.step + 1 if before else 0
        elif before is not None and step <= before.step:
            continue
        yield Metric(point.key, point.value, point.time, step)


def _attach(store: Store, run: Run, path: Path) -> None:
    for file in _documents(path):
        if file.name != PROGRESS:
            store.client.log_artifact(run.info.run_id, str(file), "eval" if file.parent != path else None)
