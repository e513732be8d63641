"""Keep results behind a URL (s3://bucket/folder, gs://...): a local folder is synchronized with it run by run.

Programs read and write that folder like any other results; `pull_*` downloads what is newer at the URL, `push_*`
uploads what changed here. Guarantees, whatever process is killed and whenever:

- A run with a `train.json` at the URL is finished and its checkpoint is there: the checkpoint is uploaded first and
  `train.json` last, and `train.json` is deleted first where a run is deleted.
- An unfinished run continues on another machine from its last uploaded state.
- On one machine one process works on a run, guarded by the lock of the run. Locks do not reach other machines: two
  that train one run at the same time do the work twice, and the second to finish takes over the result of the first.

There is no lease at the URL: a lost machine would block its runs until the lease expired, while a run that is trained
twice has the same result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from procap.errors import UsageError, UserError
from runner.collection import COLLECTIONS
from runner.config import RuntimeConfig
from runner.results import write_bytes, write_json
from shards.errors import DataError, NotFound
from shards.locks import file_lock
from shards.remote import RemoteFolder, download, filesystem
from shards.urls import cache_name, canonical, is_url, join, local_path, redact, scheme

TRAIN, CHECKPOINT = "train.json", "checkpoint.safetensors"
RECORD_FILE = ".remote.json"
RUN = re.compile(r"(?:.*/)?seed\d+-[0-9a-f]{8}(?=/|$)")
# MLflow's files are not synchronized: a database for one machine, and copies of the runs' files.
LOCAL_ONLY = re.compile(r"(mlruns|mlartifacts)/|mlflow\.db")
FOLDERS_PER_REQUEST = 100
CONFLICT_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts while another machine is writing the same run."""

logger = logging.getLogger(__name__)

Select = Callable[[str], bool]
Stamp = list[int]
"""Size and modification time (ns) of a local file."""


def results_root(given: str, cache: Path) -> tuple[Path, str | None]:
    """Return the local folder for `--results`, and the URL that it stands for; None for a folder or a file:// URL.

    Raises UsageError for a URL that cannot be written to, DataError if a package is missing.
    """
    if not is_url(given):
        return Path(given).expanduser(), None
    url = canonical(given)
    folder = local_path(url)
    if folder is not None:
        return folder, None
    if scheme(url) in ("http", "https", "hf"):
        raise UsageError(f"results cannot be written to {redact(url)}: name a folder or a URL such as s3://bucket/path")
    filesystem(url)
    return cache / "results" / cache_name(url), url


@dataclass(frozen=True)
class RemoteResults:
    """The results at `url` and their local folder; without a URL every method does nothing.

    Every method raises DataError when the URL cannot be reached, or its bucket or a permission is missing.
    """

    url: str | None
    local: Path

    @classmethod
    def of(cls, runtime: RuntimeConfig) -> RemoteResults:
        return cls(runtime.store, runtime.results)

    def pull_run(self, run: str, *, weights: bool = True, state: bool = False) -> None:
        """Update the local folder of a run from the URL.

        state: also the state to resume from; only the process that holds the lock of the run may do that.
        """

        def selected(name: str) -> bool:
            return weights if name == CHECKPOINT else state or not name.startswith("state/")

        for wait in CONFLICT_WAITS if self.url else ():
            with self._locked(run):
                there = self._list(run)
                self._download(run, there, selected)
                self._remove_deleted(run, there, selected)
                if not weights or not (self.local / run / TRAIN).exists() or _is_complete(self.local / run):
                    return
                # The checkpoint was altered here, or another machine is between its two uploads. A run that was never
                # uploaded is left alone.
                record = SyncRecord(self.local / run)
                if TRAIN in record.files:
                    record.files.pop(CHECKPOINT, None)
                    record.save()
            time.sleep(wait)

    def pull_all(self, *, weights: bool = False) -> None:
        """Download all documents, which tables and reports are made of; checkpoints on request, states never."""
        if not self.url:
            return
        listing: dict[str, dict[str, str]] = defaultdict(dict)
        for name, version in self._remote.list().items():
            if _is_shared(name) and (folder := _folder_of(name)):
                listing[folder][name.removeprefix(f"{folder}/")] = version

        def selected(name: str) -> bool:
            return (name.endswith(".json") and not name.startswith("state/")) or (weights and name == CHECKPOINT)

        newer = {folder: SyncRecord(self.local / folder).newer(there, selected) for folder, there in listing.items()}
        folders = sorted(folder for folder, names in newer.items() if names)
        for start in range(0, len(folders), FOLDERS_PER_REQUEST):
            some = folders[start : start + FOLDERS_PER_REQUEST]
            documents = self._read(f"{folder}/{name}" for folder in some for name in newer[folder])
            for folder in some:
                with self._locked(folder):
                    self._download(folder, listing[folder], selected, documents)
        for file in self.local.rglob(RECORD_FILE):
            folder = file.parent.relative_to(self.local).as_posix()
            if any(selected(name) and name not in listing[folder] for name in SyncRecord(file.parent).files):
                with self._locked(folder):
                    self._remove_deleted(folder, self._list(folder), selected)

    def push_run(self, run: str) -> None:
        """Upload what changed in the folder of a run and delete there what the run no longer needs.

        If another machine finished the run meanwhile, its result replaces the one here. Raises UserError if the
        checkpoint here is not the one of `train.json`.
        """
        if self.url and (self.local / run).is_dir():
            self._upload(run)

    def push_all(self, below: str = "") -> None:
        """Upload everything that changed below a folder of the results."""
        if not self.url:
            return
        names = (file.relative_to(self.local).as_posix() for file in (self.local / below).rglob("*") if file.is_file())
        # A folder may have nothing left but its record.
        folders = {_folder_of(name) for name in names if _is_shared(name) or name.endswith(f"/{RECORD_FILE}")}
        for folder in sorted(folders - {""}):
            self._upload(folder)

    def try_push_all(self, below: str = "") -> None:
        """Call `push_all` after another error: a failure is logged, so that the first error stays visible."""
        try:
            self.push_all(below)
        except (UserError, DataError, OSError) as error:
            logger.warning("%s; what is new is only in %s", error, self.local / below)

    def delete_run(self, run: str) -> None:
        """Delete a run at the URL, `train.json` first; its local folder is left to `RunFolder.clear`."""
        if self.url:
            with self._locked(run):
                for name in sorted(self._remote.list(run), key=lambda name: name != TRAIN):
                    self._remote.delete(f"{run}/{name}")
                (self.local / run / RECORD_FILE).unlink(missing_ok=True)

    @property
    def _remote(self) -> RemoteFolder:
        assert self.url
        return RemoteFolder(self.url)

    def _locked(self, folder: str) -> AbstractContextManager[None]:
        """Lock a folder of the results: one process of this machine at a time synchronizes it."""
        return file_lock(self.local / ".remote" / f"{hashlib.sha256(folder.encode()).hexdigest()[:16]}.lock")

    def _list(self, folder: str) -> dict[str, str]:
        return {name: version for name, version in self._remote.list(folder).items() if _belongs(name, folder)}

    def _read(self, names: Iterator[str]) -> dict[str, bytes]:
        return self._remote.read(name for name in names if name.endswith(".json"))

    def _download(
        self, folder: str, there: Mapping[str, str], selected: Select, documents: Mapping[str, bytes] | None = None
    ) -> None:
        """Download what is newer at the URL, `train.json` last."""
        path, record = self.local / folder, SyncRecord(self.local / folder)
        newer = record.newer(there, selected)
        if not newer:
            return
        if documents is None:
            documents = self._read(f"{folder}/{name}" for name in newer)
        if TRAIN in newer:
            (path / TRAIN).unlink(missing_ok=True)
            if CHECKPOINT not in newer and not record.is_current(CHECKPOINT, there.get(CHECKPOINT, "")):
                # It belongs to another training.
                (path / CHECKPOINT).unlink(missing_ok=True)
        for name in sorted(newer, key=lambda name: name == TRAIN):
            # What was deleted since it was listed is skipped.
            if name.endswith(".json"):
                if f"{folder}/{name}" not in documents:
                    continue
                write_bytes(path / name, documents[f"{folder}/{name}"])
            else:
                try:
                    download(join(self.url or "", f"{folder}/{name}"), path / name, replace=True)
                except NotFound:
                    continue
            record.add(name, there[name], _stamp(path / name))
        record.save()

    def _remove_deleted(self, folder: str, there: Mapping[str, str], selected: Select) -> None:
        """Remove here what another machine deleted at the URL, unless it has changed here since."""
        path, record = self.local / folder, SyncRecord(self.local / folder)
        gone = [name for name in record.files if name not in there and selected(name)]
        for name in sorted(gone, key=lambda name: name != TRAIN):
            _, stamp = record.files.pop(name)
            if stamp == _stamp(path / name):
                (path / name).unlink(missing_ok=True)
        if gone:
            record.save()

    def _upload(self, folder: str) -> None:
        with self._locked(folder):
            path, record = self.local / folder, SyncRecord(self.local / folder)
            changed = record.changed(folder)
            deleted = record.deleted(folder)
            plain = [name for name in sorted(changed) if name not in (TRAIN, CHECKPOINT)]
            finished = TRAIN in changed
            if not (plain or deleted or finished):
                return
            for name in plain:
                try:
                    self._remote.write(f"{folder}/{name}", path / name)
                except NotFound:
                    # An older state may have been removed here since.
                    if (path / name).exists():
                        raise
            accepted = not finished or self._upload_finished(folder, record)
            for name in deleted:
                self._remote.delete(f"{folder}/{name}")
                record.files.pop(name)
            there = self._list(folder)
            for name in plain:
                if name in there:
                    record.add(name, there[name], changed[name])
            record.save()
            if not accepted:
                self._download(folder, there, lambda name: not _is_temporary(name))

    def _upload_finished(self, folder: str, record: SyncRecord) -> bool:
        """Upload the checkpoint and then `train.json`; False if another machine has finished the run."""
        path, names = self.local / folder, (CHECKPOINT, TRAIN)
        if not _is_complete(path):
            problem = f"{path / CHECKPOINT} is not the file that training wrote (its SHA-256 differs)"
            raise UserError(f"{problem}; train again with --force")
        ours = {f"{folder}/{name}": (path / name).read_bytes() for name in names}
        for wait in CONFLICT_WAITS:
            there = self._list(folder)
            if TRAIN in there:
                found = self._remote.read([f"{folder}/{TRAIN}"]).get(f"{folder}/{TRAIN}")
                if there[TRAIN] != record.version(TRAIN) and found not in (None, ours[f"{folder}/{TRAIN}"]):
                    return False
                self._remote.delete(f"{folder}/{TRAIN}")
            for name in names:
                self._remote.write(f"{folder}/{name}", path / name)
            # Another machine may have uploaded between the two. Listed before reading: a later version counts as newer.
            there = self._list(folder)
            if self._remote.read(ours) == ours:
                for name in names:
                    record.add(name, there[name], _stamp(path / name))
                return True
            time.sleep(wait * random.random())
        raise UserError(f"{redact(self.url or '')}/{folder} is being written by another machine; stop one of the two")


class SyncRecord:
    """`.remote.json` of a folder: for each synchronized file its version at the URL, and its stamp here at that time.

    If it is lost, the files are downloaded again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, tuple[str, Stamp]] = {}
        with suppress(OSError, ValueError, TypeError):
            content = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
            self.files = {name: (str(version), list(stamp)) for name, (version, stamp) in content["files"].items()}

    def version(self, name: str) -> str | None:
        return self.files[name][0] if name in self.files else None

    def is_current(self, name: str, version: str) -> bool:
        """Whether the file exists here and the URL has nothing newer."""
        return self.version(name) == version and (self.path / name).exists()

    def newer(self, there: Mapping[str, str], selected: Select) -> list[str]:
        """List the selected files of which the URL has a version that was never here, or that are missing here."""
        return [name for name, version in there.items() if selected(name) and not self.is_current(name, version)]

    def changed(self, folder: str) -> dict[str, Stamp]:
        """List the files here that were written since they were synchronized."""
        # os.walk ignores folders that vanish meanwhile, such as `state` at the end of a training.
        files = (Path(root, name) for root, _, names in os.walk(self.path) for name in names)
        stamps = {file.relative_to(self.path).as_posix(): _stamp(file) for file in files}
        return {
            name: stamp
            for name, stamp in stamps.items()
            if stamp and _belongs(name, folder) and (name not in self.files or self.files[name][1] != stamp)
        }

    def deleted(self, folder: str) -> list[str]:
        """List files that were removed here and are not needed at the URL: states, and files of a rerun suite."""
        remade = folder.startswith(f"{COLLECTIONS}/")
        return [name for name in self.files if (remade or _is_temporary(name)) and not (self.path / name).exists()]

    def add(self, name: str, version: str, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.files[name] = version, stamp

    def save(self) -> None:
        write_json(self.path / RECORD_FILE, {"files": self.files})


class CheckpointUploader:
    """Uploads the folder of a run while it trains, from a background thread so that training does not wait."""

    def __init__(self, store: RemoteResults, run: str) -> None:
        self.store = store
        self.run = run
        self._thread: threading.Thread | None = None

    def offer(self) -> None:
        """Begin to upload what has changed, unless an upload is still running; the next call then sends the rest."""
        if self.store.url and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self.upload, name="checkpoint upload", daemon=True)
            self._thread.start()

    def upload(self) -> None:
        """Upload what has changed; a failure is logged, because the state is on the local disk as well."""
        try:
            self.store.push_run(self.run)
        except (UserError, DataError, OSError) as error:
            logger.warning("%s; the state of %s is uploaded later", error, self.run)


@contextmanager
def synchronized_run(store: RemoteResults, run: str, *, delete: bool = False) -> Iterator[None]:
    """Download what a run resumes from, or with `delete` delete it at the URL, and upload its folder at the end.

    The caller holds the lock of the run. After an error the upload is tried too, and its own error is only logged.
    """
    if delete:
        store.delete_run(run)
    else:
        store.pull_run(run, state=True)
    try:
        yield
    except BaseException:
        store.try_push_all(run)
        raise
    store.push_run(run)


def _folder_of(name: str) -> str:
    """Return the folder that a file is synchronized with: that of its run, else the one that holds it."""
    run = RUN.match(name)
    return run[0] if run else name.rpartition("/")[0]


def _belongs(name: str, folder: str) -> bool:
    """Whether the file `name` of `folder` is synchronized with it: subfolders of a run are, those of others are not."""
    return _is_shared(name) and ("/" not in name or RUN.fullmatch(folder) is not None)


def _is_shared(name: str) -> bool:
    """Whether a file of the results belongs at the URL."""
    return not LOCAL_ONLY.match(name) and not any(part.startswith(".") for part in name.split("/"))


def _is_temporary(name: str) -> bool:
    """Whether a file of a run exists only until the run is finished."""
    return name == "progress.json" or name.startswith("state/")


def _stamp(file: Path) -> Stamp | None:
    try:
        facts = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [facts.st_size, facts.st_mtime_ns]


def _is_complete(path: Path) -> bool:
    """Whether the checkpoint of a run is the one that its `train.json` names."""
    try:
        named = json.loads((path / TRAIN).read_bytes())["checkpoint_sha256"]
        return bool(named == hashlib.sha256((path / CHECKPOINT).read_bytes()).hexdigest())
    except (OSError, ValueError, KeyError, TypeError):
        return False
