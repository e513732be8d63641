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
from typing import TYPE_CHECKING, Any

from procap.errors import UserError
from runner.run_collection import read_collections
from runner.run_folders import RunFolder, find_runs
from runner.tracking.content import RunContent, read_content
from runner.tracking.store import TrackingError, TrackingStore, format_error, locked
from shards.credentials import mask

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

KEY_TAG = "procap.key"
CONTENT_TAG = "procap.content"
CHECKPOINT_TAG = "procap.checkpoint"
PARENT_TAG = "mlflow.parentRunId"
FORMAT = 4
"""Part of every content hash: increment it when other things are logged, so that all runs are exported again."""
NAMES_PER_BATCH, METRICS_PER_BATCH = 100, 1000
DOCUMENTS = (".json", ".csv", ".md", ".tex")


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
    """Export what the store lacks of the runs and collections of its results; runs are nested below collections.

    only: paths below the results; default all. The collections that a run in it belongs to are exported as well.
    dry_run: change nothing; `sent` lists what would be sent. on_run: called with each path and whether it was sent.
    A broken file, or content that MLflow refuses, fails its run alone. Raises TrackingError when the store cannot be
    reached or stops answering.
    """
    results, summary = store.results, Summary()
    failed = summary.failed if only is None else []
    collections = read_collections(results, on_error=lambda path, error: failed.append((path, str(error))))
    runs = [run.path.relative_to(results).as_posix() for run in find_runs(results)] if only is None else only
    if not runs and not collections and not failed:
        return summary
    is_absent = dry_run and store.file is not None and not store.file.exists()
    exported = {} if is_absent or only is not None else _find_exported(store.open())

    def export(path: str, parents: Mapping[str, str]) -> str:
        folder = results / path
        has_checkpoint = log_checkpoints and RunFolder(folder).train_file.exists()
        try:
            run_id, is_complete = exported.get(_hash_files(folder, parents), ("", False))
            sent = not run_id or is_complete < has_checkpoint
            if sent and dry_run:
                sent = read_content(folder) is not None
            elif sent:
                run_id, sent = _export(store, folder, parents, has_checkpoint)
        except TrackingError:
            raise
        except UserError as error:
            summary.failed.append((path, str(error)))
            return ""
        except Exception as error:
            if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":
                summary.failed.append((path, f"{store.address} does not accept it: {format_error(error)}"))
                return ""
            raise TrackingError(f"{store.address} did not accept {path}: {format_error(error)}") from error
        (summary.sent if sent else summary.up_to_date).append(path)
        if on_run is not None:
            on_run(path, sent)
        return run_id

    # Parents first, because a run is nested below the id of its parent.
    parents: dict[str, dict[str, str]] = {}
    for collection in collections:
        if only is None or collection.path in only or not set(only).isdisjoint(collection.runs):
            run_id = export(collection.path, {})
            for run in collection.runs:
                parents.setdefault(run, {})[collection.tag] = run_id
    for run in runs:
        if RunFolder(results / run).config_file.exists():
            export(run, parents.get(run, {}))
    return summary


def _find_exported(store: TrackingStore) -> dict[str, tuple[str, bool]]:
    """List the exported runs by content hash: the id of the MLflow run, and whether it has its checkpoint."""
    where = f"tags.folder LIKE '{_quote(store.results)}/%'"
    tags = {run.info.run_id: run.data.tags for run in store.search(where)}
    return {one[CONTENT_TAG]: (run_id, CHECKPOINT_TAG in one) for run_id, one in tags.items() if CONTENT_TAG in one}


def _export(store: TrackingStore, folder: Path, parents: Mapping[str, str], with_checkpoint: bool) -> tuple[str, bool]:
    """Log what is missing of one folder; returns the id of its MLflow run and whether anything was logged."""
    client = store.client
    with locked(folder / ".tracking.lock"):
        digest, content = _hash_files(folder, parents), read_content(folder)
        if content is None:
            return "", False
        run = _find_run(store, content.key)
        if run is None:
            # An earlier training of this folder that lost its state began again: nothing else ends its MLflow run.
            for replaced in store.search(f"tags.folder LIKE '{_quote(folder)}' AND attributes.status = 'RUNNING'"):
                client.set_terminated(replaced.info.run_id, "KILLED")
            tags = mask_values({KEY_TAG: content.key, **content.tags})
            run = client.create_run(store.experiment_id, start_time=content.start, tags=tags, run_name=content.name())
            if store.is_server:
                # MLflow repeats a request whose answer was lost, and so creates a second run.
                run = _find_run(store, content.key) or run
        elif run.data.tags.get(CONTENT_TAG) == digest and (CHECKPOINT_TAG in run.data.tags) >= with_checkpoint:
            return run.info.run_id, False
        run_id = run.info.run_id
        # The id of a parent that could not be exported is empty.
        parent_id = next(filter(None, parents.values()), "")
        parent = {PARENT_TAG: parent_id} if parent_id else {}
        _log(store, run, content, mask_values({**content.tags, **dict.fromkeys(parents, "yes"), **parent}))
        for file in _documents(folder):
            if file.name != "progress.json":
                client.log_artifact(run_id, str(file), "eval" if file.parent != folder else None)
        if with_checkpoint and content.checkpoint:
            client.log_artifact(run_id, str(RunFolder(folder).checkpoint_file))
            client.set_tag(run_id, CHECKPOINT_TAG, content.checkpoint)
        client.set_tag(run_id, CONTENT_TAG, digest)
        return run_id, True


def mask_values(named: Mapping[str, str]) -> dict[str, str]:
    """Mask credentials in the values of tags or parameters, which may be credentials by their names."""
    return {name: mask(f"{name}={value}").removeprefix(f"{name}=") for name, value in named.items()}


def _documents(path: Path) -> list[Path]:
    files = [*path.glob("*"), *path.glob("eval/*.json")]
    return sorted(file for file in files if file.suffix in DOCUMENTS and file.name[0] != "." and file.is_file())


def _hash_files(path: Path, parents: Mapping[str, str]) -> str:
    digest = hashlib.sha256(f"{FORMAT} {path.resolve()} {sorted(parents.items())}".encode())
    for file in _documents(path):
        with suppress(FileNotFoundError):
            digest.update(f"{file.name} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _quote(path: Path) -> str:
    """Format a path for a pattern, which a quote would end; `_` matches any character."""
    return path.resolve().as_posix().replace("'", "_")


def _find_run(store: TrackingStore, key: str) -> Run | None:
    found = sorted(store.search(f"tags.`{KEY_TAG}` = '{key}'"), key=lambda run: run.info.run_id)
    # Lock files do not work between machines, so two machines can have created a run each.
    for copy in found[1:]:
        store.client.delete_run(copy.info.run_id)
    return found[0] if found else None


def _log(store: TrackingStore, run: Run, content: RunContent, tags: Mapping[str, str]) -> None:
    """Log parameters, tags, metrics and the status as far as `run` does not have them."""
    from mlflow.entities import Param, RunTag

    client, run_id, logged, params = store.client, run.info.run_id, run.data, mask_values(content.params)
    missing: tuple[tuple[str, list[Any], int], ...] = (
        ("params", [Param(*item) for item in params.items() if item[0] not in logged.params], NAMES_PER_BATCH),
        ("tags", [RunTag(*item) for item in tags.items() if logged.tags.get(item[0]) != item[1]], NAMES_PER_BATCH),
        ("metrics", list(_new_metrics(run, content)), METRICS_PER_BATCH),
    )
    for name, entities, size in missing:
        for start in range(0, len(entities), size):
            batch: dict[str, Any] = {name: entities[start : start + size]}
            client.log_batch(run_id, **batch)
    if content.end is not None:
        client.set_terminated(run_id, content.status, content.end)
    elif run.info.status != content.status:
        client.update_run(run_id, content.status)


def _new_metrics(run: Run, content: RunContent) -> Iterator[Metric]:
    """List the points that `run` lacks: of a series those after its last step, single values if changed."""
    from mlflow.entities import Metric

    last = {metric.key: metric for metric in run.data.to_proto().metrics}
    for point in content.points:
        before = last.get(point.key)
        step = point.step
        if step is None:
            if before is not None and before.value == point.value:
                continue
            step = before.step + 1 if before else 0
        elif before is not None and step <= before.step:
            continue
        yield Metric(point.key, point.value, point.time, step)
