"""Sending one run to MLflow: its folder is the outbox, `tracking.json` in it says what has been sent where.

What is sent is a `Record`, of a run or of a collection of runs.

Sending again sends only what is missing. What the store already has is asked of the store, not only of `tracking.json`:
a process killed between the two leaves neither a second run nor a doubled point.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from procap.errors import UserError
from runner.results import RunFolder, read_document, write_json
from runner.tracking.record import Point, Record, read_record
from runner.tracking.store import Destination, Store, TrackingError, first_line, held, quiet_libraries

if TYPE_CHECKING:
    from mlflow.entities import Run

KEY_TAG = "procap.key"
PARENT_TAG = "mlflow.parentRunId"
FORM = 3
"""Of what is told about a run: one that a store has in an older form is told again."""
TRACKING = "tracking.json"
METRICS_PER_BATCH = 1000
HEADLINES = ("hm", "base", "novel", "fps")
NAMES_PER_BATCH = 100
RUNS_PER_PAGE = 1000


class Delivery(BaseModel):
    """What one store has of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment_id: str
    run_id: str
    last_epoch: int = Field(default=-1, description="0-based; -1 before the first")
    files: dict[str, str] = Field(default_factory=dict, description="SHA-256 of each file that was attached")
    status: str = ""
    links: dict[str, str] = Field(default_factory=dict, description="run ids of its parents there, by their tag")
    form: int = 1
    seen: str = Field(default="", description="what `glance` gave before the files were read")

    def covers(self, record: Record, links: Mapping[str, str] | None = None) -> bool:
        """Whether nothing of `record` is missing, nor any of its parents where `links` names them."""
        epochs_there = not record.epochs or self.last_epoch >= record.epochs[-1].epoch
        told = self.files == record.files and self.status == record.status and self.form == FORM
        return epochs_there and told and (links is None or self.links == links)


class Tracking(BaseModel):
    """`tracking.json`. `key` finds the run again in a store that has it, `attempt` is the training it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = Field(default=1, validation_alias="schema", serialization_alias="schema")
    key: str
    attempt: str
    stores: dict[str, Delivery] = Field(default_factory=dict)


def sync(
    folder: RunFolder,
    destination: Destination,
    store: Store,
    links: Mapping[str, str] | None = None,
    noted: Callable[[], None] | None = None,
) -> bool:
    """Send what `store` lacks of the run in `folder`; gives whether there was anything to send.

    links: run ids of the parents that the run is to have there, by the tag that says so (suite.base-to-novel); it is
        shown below the first of them. None leaves its parents as they are.
    noted: called when `tracking.json` has the key of a run that is about to be made, and when it says what was sent.
    Raises UserError for a broken result file, TrackingError when the store refuses or goes away.
    """
    return deliver(folder.path, lambda: read_record(folder), destination, store, links, noted)


def deliver(
    where: Path,
    read: Callable[[], Record | None],
    destination: Destination,
    store: Store,
    links: Mapping[str, str] | None = None,
    noted: Callable[[], None] | None = None,
) -> bool:
    """Send what `store` lacks of the record that `read` gives, whose files lie in the folder `where`; see `sync`."""
    with held(where / ".tracking.lock"):
        seen = glance(where)
        record = read()
        if record is None or record.attempt is None:
            return False
        tracking = tracking_of(where, record)
        known = tracking.stores.get(destination.label)
        try:
            with quiet_libraries():
                run = _find_run(store, tracking, known)
                known = _known_delivery(known, run)
                if run is not None and known is not None and known.covers(record, links):
                    if known.seen != seen:
                        _note(where, tracking, destination, known.model_copy(update={"seen": seen}))
                    return False
                # The key goes to disk before a run carries it: killed in between, the next one finds that run.
                write_json(where / TRACKING, tracking)
                if run is None and noted:
                    noted()
                wanted = (known.links if known else {}) if links is None else dict(links)
                run = run or _create_run(store, tracking, record, wanted)
                delivery = _send(store, run, record, where, known, wanted)
        except UserError:
            raise
        except Exception as error:
            reason = f"{destination.address} did not take {where.name}: {first_line(error)}"
            raise TrackingError(reason) from error
        _note(where, tracking, destination, delivery.model_copy(update={"seen": seen}))
        if noted:
            noted()
        return True


def _note(where: Path, tracking: Tracking, destination: Destination, delivery: Delivery) -> None:
    stores = {**tracking.stores, destination.label: delivery}
    write_json(where / TRACKING, tracking.model_copy(update={"stores": stores}))


def glance(where: Path) -> str:
    """How the files in the folder `where` look from outside: as long as it stays the same, so do they."""
    rows = []
    for folder in (where, where / "eval"):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file() and not entry.name.startswith(".") and entry.name != TRACKING:
                    facts = entry.stat()
                    rows.append((folder.name, entry.name, facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()[:16]


def looks_sent(where: Path, delivery: Delivery | None, links: Mapping[str, str] | None = None) -> bool:
    """Whether nothing has changed since `delivery`, as far as can be told without opening any file of the run."""
    if delivery is None or delivery.form != FORM or (links is not None and delivery.links != links):
        return False
    return delivery.seen == glance(where)


def ids_of_runs(store: Store) -> set[str]:
    """The ids of all runs of the experiment that are not deleted."""
    found: set[str] = set()
    token = None
    while True:
        with quiet_libraries():
            page = store.client.search_runs([store.experiment_id], max_results=RUNS_PER_PAGE, page_token=token)
        found |= {run.info.run_id for run in page}
        token = page.token
        if not token:
            return found


def delivery_of(where: Path, label: str) -> Delivery | None:
    """What the store called `label` has of the run or collection in the folder `where`, None where nobody can tell."""
    try:
        tracking = _read_tracking(where)
    except UserError:
        return None
    return tracking.stores.get(label) if tracking else None


def tracking_of(where: Path, record: Record) -> Tracking:
    """What was sent of this attempt, or a new beginning when `tracking.json` is of another one.

    Raises UserError where `tracking.json` cannot be read.
    """
    assert record.attempt is not None
    found = _read_tracking(where)
    if found is not None and found.attempt == record.attempt:
        return found
    return Tracking(key=uuid.uuid4().hex, attempt=record.attempt)


def _read_tracking(where: Path) -> Tracking | None:
    file = where / TRACKING
    try:
        return read_document(file, Tracking)
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise
        # No new beginning: without its key a run that the store has would be there twice.
        raise UserError(
            f"{file} is damaged or of another version, so nobody knows what was sent; bring back a copy of it, "
            f"or move it away and sync again (what MLflow has already is then there twice)"
        ) from error


def _find_run(store: Store, tracking: Tracking, delivery: Delivery | None) -> Run | None:
    from mlflow.exceptions import MlflowException

    if delivery is not None:
        try:
            run = store.client.get_run(delivery.run_id)
            if run.info.lifecycle_stage == "active" and run.data.tags.get(KEY_TAG) == tracking.key:
                return run
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    found = store.client.search_runs([store.experiment_id], f"tags.`{KEY_TAG}` = '{tracking.key}'", max_results=1)
    return found[0] if found else None


def _known_delivery(delivery: Delivery | None, run: Run | None) -> Delivery | None:
    # A store that lost or moved the run has none of its files either.
    return delivery if delivery is not None and run is not None and delivery.run_id == run.info.run_id else None


def _create_run(store: Store, tracking: Tracking, record: Record, links: Mapping[str, str]) -> Run:
    tags = {KEY_TAG: tracking.key, **record.tags, **_family(links, {})}
    return store.client.create_run(store.experiment_id, start_time=record.start, tags=tags, run_name=record.name())


def _family(links: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """The tags that put a run below one parent and name them all; the parent it has `there` already stays."""
    if not links:
        return {}
    parents = list(links.values())
    present = there.get(PARENT_TAG)
    return {**dict.fromkeys(links, "yes"), PARENT_TAG: present if present in parents else parents[0]}


def _send(
    store: Store, run: Run, record: Record, where: Path, known: Delivery | None, links: dict[str, str]
) -> Delivery:
    from mlflow.entities import Dataset, DatasetInput, Metric, Param, RunTag

    client, run_id, there = store.client, run.info.run_id, run.data
    params = [Param(name, value) for name, value in record.params.items() if name not in there.params]
    told = {**record.tags, **_family(links, there.tags)}
    tags = [RunTag(name, value) for name, value in told.items() if there.tags.get(name) != value]
    for chunk in _chunks(params, NAMES_PER_BATCH):
        client.log_batch(run_id, params=chunk)
    for chunk in _chunks(tags, NAMES_PER_BATCH):
        client.log_batch(run_id, tags=chunk)

    if record.manifest_digest and not (run.inputs and run.inputs.dataset_inputs):
        dataset = Dataset(record.dataset, record.manifest_digest[:16], "procap", record.dataset)
        client.log_inputs(run_id, [DatasetInput(dataset)])

    sent_files = known.files if known and known.form == FORM else {}
    fresh = [name for name in record.points if sent_files.get(name) != record.files[name]]
    points = _not_there(store, run, [point for name in fresh for point in record.points[name]])
    last_there = max((metric.step for metric in _history(store, run, "loss")), default=-1)
    epochs = list(record.epoch_points(after=last_there))
    # MLflow's comparison begins with the figure that came first.
    points.sort(key=lambda point: HEADLINES.index(point.key) if point.key in HEADLINES else len(HEADLINES))
    for batch in _batches([*([point] for point in points), *epochs]):
        client.log_batch(run_id, metrics=[Metric(point.key, point.value, point.when, point.step) for point in batch])

    for name, digest in record.files.items():
        if sent_files.get(name) != digest:
            parent = Path(name).parent.as_posix()
            client.log_artifact(run_id, str(where / name), None if parent == "." else parent)
    # A name that somebody gave it in MLflow is kept.
    if (name := record.name()) != run.info.run_name and name.startswith(run.info.run_name or ""):
        client.update_run(run_id, name=name)
    if record.end is not None and run.info.status != record.status:
        client.set_terminated(run_id, record.status, record.end)
    elif run.info.status != record.status:
        client.update_run(run_id, record.status)
    last = record.epochs[-1].epoch if record.epochs else -1
    return Delivery(
        experiment_id=run.info.experiment_id,
        run_id=run_id,
        last_epoch=last,
        files=record.files,
        status=record.status,
        links=links,
        form=FORM,
    )


def _not_there(store: Store, run: Run, points: Iterable[Point]) -> list[Point]:
    """`points` without those the store has; one that replaces an older value becomes its metric's next step."""
    new: dict[str, Point] = {}
    for point in points:
        latest = run.data.metrics.get(point.key)
        history = () if latest == point.value else _history(store, run, point.key)
        if latest != point.value and not any(metric.timestamp == point.when for metric in history):
            new[point.key] = Point(point.key, point.value, point.when, step=len(history))
    return list(new.values())


def _history(store: Store, run: Run, key: str) -> Sequence:
    return store.client.get_metric_history(run.info.run_id, key) if key in run.data.metrics else ()


def _batches(groups: Iterable[list[Point]]) -> Iterator[list[Point]]:
    # An epoch is never torn apart: the store takes a batch as a whole, so its last epoch is always complete.
    batch: list[Point] = []
    for group in groups:
        if batch and len(batch) + len(group) > METRICS_PER_BATCH:
            yield batch
            batch = []
        batch = [*batch, *group]
    if batch:
        yield batch


def _chunks(items: Sequence, size: int) -> Iterator[list]:
    source = iter(items)
    while chunk := list(itertools.islice(source, size)):
        yield chunk
