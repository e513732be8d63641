"""Record the runs of a suite or a sweep, its status and its metrics in <results>/collections/<kind>/<name>/."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from procap.errors import UserError
from runner.results import MaskedText, StoredDocument, read_document, write_json
from runner.stop_signals import Interrupted
from shards.files import file_lock

COLLECTIONS, COLLECTION_FILE = "collections", "collection.json"
LOCK_SECONDS = 30.0
COLLECTION_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

Status = Literal["running", "finished", "failed", "interrupted"]


Moment = Annotated[int, Field(ge=0, lt=10**14, description="milliseconds since 1970")]


class Collection(StoredDocument):
    """`collection.json`. A run may belong to several collections; its files lie in none of them."""

    kind: Literal["suite", "sweep"]
    name: str = Field(pattern=COLLECTION_NAME)
    runs: tuple[str, ...] = Field(default=(), description="their paths below the results, each once")
    settings: dict[str, Any] = Field(default_factory=dict, description="the options of the command, for display")
    source: str = Field(default="", description="name and digest of the user's file that defines a suite")
    status: Status = "running"
    metrics: dict[str, float] = Field(
        default_factory=dict, description="hm/procap or accuracy/procap of a suite, best/val of a sweep"
    )
    failed: dict[str, MaskedText] = Field(
        default_factory=dict,
        description="reasons, of runs whose last attempt failed, and of a suite without some of its outputs",
    )
    started: Moment = Field(default_factory=lambda: time.time_ns() // 1_000_000)
    ended: Moment | None = Field(default=None, description="None while it is running")

    @property
    def path(self) -> str:
        """Its folder below the results."""
        return f"{COLLECTIONS}/{self.kind}/{self.name}"


def status_after(error: BaseException) -> Status:
    """Return the status of a collection that ended with `error`: interrupted by a signal, else failed."""
    return "failed" if isinstance(error, Exception) and not isinstance(error, Interrupted) else "interrupted"


def read_collection(folder: Path) -> Collection | None:
    """Read the collection of a folder, None if it has none. Raises UserError for a broken file."""
    repair = "move it away and type the command again, its runs are kept"
    return read_document(folder / COLLECTION_FILE, Collection, repair)


def write_collection(results: Path, collection: Collection) -> Collection:
    """Write `collection` below `results`, with the start time of an existing file; return it.

    Of a file that says "running" the runs are kept too: a second command may execute a different part of the suite.
    """
    folder = results / collection.path
    with file_lock(folder / ".lock", timeout=LOCK_SECONDS, remove=True):
        if before := read_collection(folder):
            changes: dict[str, Any] = {"started": min(before.started, collection.started)}
            if before.status == "running":
                changes["runs"] = tuple(dict.fromkeys([*before.runs, *collection.runs]))
            collection = collection.model_copy(update=changes)
        write_json(folder / COLLECTION_FILE, collection)
    return collection


def find_collections(results: Path) -> list[Path]:
    """List the folders of all collections of `results`, ordered by kind and name."""
    return [file.parent for file in sorted((results / COLLECTIONS).glob(f"*/*/{COLLECTION_FILE}"))]


def read_collections(results: Path, on_error: Callable[[str, UserError], None] | None = None) -> list[Collection]:
    """Read every collection of `results`, the earliest first; `on_error` gets the path and error of a broken one."""
    collections = []
    for folder in find_collections(results):
        try:
            if collection := read_collection(folder):
                collections.append(collection)
        except UserError as error:
            if on_error is not None:
                on_error(folder.relative_to(results).as_posix(), error)
    return sorted(collections, key=lambda collection: (collection.started, collection.kind, collection.name))
