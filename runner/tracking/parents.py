"""Suites and sweeps as MLflow shows them: what is told about one, and which runs it is the parent of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from procap.errors import UserError
from runner.collection import CollectionFolder, find_collections, read_collections
from runner.tracking.outbox import deliver, delivery_of, tracking_of
from runner.tracking.record import Point, Record, user_tags
from runner.tracking.store import Destination, Store

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def read_collection_record(folder: CollectionFolder) -> Record | None:
    """What there is to send of the collection in `folder`, None where there is none.

    Raises UserError for a broken file.
    """
    collection = folder.collection()
    if collection is None:
        return None
    name, data = folder.file.name, folder.file.read_bytes()
    when = folder.file.stat().st_mtime_ns // 1_000_000
    figures = {"runs": float(len(collection.runs)), **collection.figures}
    tags = {collection.kind: collection.name, "procap.collection": collection.tag, "folder": str(folder.path.resolve())}
    # A suite that is begun again may be asked for something else, and MLflow lets no parameter change.
    tags |= {f"settings.{key}": _plain(value) for key, value in collection.settings.items()}
    return Record(
        name=lambda: f"{collection.kind} · {collection.name}",
        dataset="",
        manifest_digest=None,
        params={},
        tags=tags | user_tags(),
        attempt=collection.tag,
        epochs=[],
        points={name: [Point(key, value, when) for key, value in figures.items()]},
        files={name: hashlib.sha256(data).hexdigest()},
        status=STATUS[collection.status],
        start=collection.begun,
        end=collection.ended if collection.status != "running" else None,
    )


def sync_collection(
    folder: CollectionFolder, destination: Destination, store: Store, noted: Callable[[], None] | None = None
) -> bool:
    """Send what `store` lacks of the collection itself, not of its runs; gives whether there was anything to send.

    noted: as for `sync`.
    Raises UserError for a broken file, TrackingError when the store refuses or goes away.
    """
    return deliver(folder.path, lambda: read_collection_record(folder), destination, store, noted=noted)


def parents(results: Path, label: str) -> dict[str, dict[str, str]]:
    """For each run of a collection, by its path, the run ids of its parents in the store `label`, by their tag.

    The earliest parent comes first. A collection that cannot be read, or its `tracking.json`, is nobody's parent.
    """
    found: dict[str, dict[str, str]] = {}
    for collection in read_collections(results):
        delivery = delivery_of(results / collection.path, label)
        if delivery is not None:
            for run in collection.runs:
                found.setdefault(run, {})[collection.tag] = delivery.run_id
    return found


def missing_collections(results: Path, destination: Destination, *, gone: bool = False) -> dict[str, str]:
    """The paths of collections that `tracking.json` does not say are in the store, all of them if that is `gone`.

    With each comes why that cannot be told, where a file of it is broken; else nothing.
    """
    missing = {}
    for folder in find_collections(results):
        name = folder.path.relative_to(results).as_posix()
        try:
            record = read_collection_record(folder)
            if record is None:
                continue
            there = None if gone else tracking_of(folder.path, record).stores.get(destination.label)
        except UserError as error:
            missing[name] = str(error)
            continue
        if there is None or not there.covers(record):
            missing[name] = ""
    return missing


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
