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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from procap.errors import NotFound, UsageError, UserError
from runner.config import RuntimeConfig
from runner.results import write_bytes, write_json
from runner.run_collection import COLLECTIONS
from shards.default_paths import refuse_system_folder
from shards.files import file_lock
from shards.remote import RemoteFolder, download, filesystem
from shards.urls import cache_name, canonical, is_url, join, local_path, redact, scheme

TRAIN, CHECKPOINT = "train.json", "checkpoint.safetensors"
RECORD_FILE = ".remote.json"
RUN = re.compile(r"(?:.*/)?seed\d+-[0-9a-f]{8}(?=/|$)")
# MLflow's files are not synchronized: a database for one machine, and copies of the runs' files.
LOCAL_ONLY = re.compile(r"(mlruns|mlartifacts)/|mlflow\.db")
CONFLICT_WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts while another machine is writing the same run."""

logger = logging.getLogger(__name__)

Select = Callable[[str], bool]
Stamp = list[int]
"""Size and modification time (ns) of a local file."""


def results_root(given: str, cache: Path) -> tuple[Path, str | None]:
    """Return the local folder for `--results`, and the URL that it stands for; None for a folder or a file:// URL.

    Raises UsageError for a URL that cannot be written to, UserError if a package is missing.
    """
    url = canonical(given) if is_url(given) else ""
    folder = local_path(url) if url else Path(given).expanduser()
    if folder is not None:
        refuse_system_folder("--results", folder)
        return folder, None
    if scheme(url) in ("http", "https", "hf"):
        raise UsageError(f"results cannot be written to {redact(url)}: name a folder or a URL such as s3://bucket/path")
    _, path = filesystem(url)
    if scheme(url) == "local":
        refuse_system_folder("--results", Path(path))
    return cache / "results" / cache_name(url), url


@dataclass(frozen=True)
class RemoteResults:
    """The results at `url` and their local folder; without a URL every method does nothing.

    Every method raises UserError when the URL cannot be reached, or its bucket or a permission is missing.
    """

    url: str | None
    local: Path

    @classmethod
    def from_runtime(cls, runtime: RuntimeConfig) -> RemoteResults:
        return cls(runtime.store, runtime.results)

    def pull_run(self, run: str, *, weights: bool = True, state: bool = False) -> None:
        """Update the local folder of a run from the URL.

        state: also the state to resume from; only the process that holds the lock of the run may do that.
        """

        def selected(name: str) -> bool:
            return weights if name == CHECKPOINT else state or not name.startswith("state/")

        for wait in (0.0, *CONFLICT_WAITS) if self.url else ():
            time.sleep(wait)
            with self._open(run) as folder:
                folder.download(folder.list_remote(), selected)
                # A run that was never uploaded is left alone.
                finished = TRAIN in folder.files and (folder.path / TRAIN).exists()
                if not weights or not finished or _is_complete(folder.path):
                    return
                # The checkpoint was altered here, or another machine is between its two uploads.
                folder.files.pop(CHECKPOINT, None)
                folder.save()

    def pull_all(self, *, weights: bool = False) -> None:
        """Download all documents, which tables and reports are made of; checkpoints on request, states never."""
        if not self.url:
            return
        remote = RemoteFolder(self.url)
        listing: dict[str, dict[str, str]] = defaultdict(dict)
        for name, version in remote.list().items():
            if _is_shared(name) and (folder_name := _folder_of(name)):
                listing[folder_name][name.removeprefix(f"{folder_name}/")] = version

        def selected(name: str) -> bool:
            return (name.endswith(".json") and not name.startswith("state/")) or (weights and name == CHECKPOINT)

        here = {file.parent.relative_to(self.local).as_posix() for file in self.local.rglob(RECORD_FILE)}
        folders = [SyncedFolder(remote, self.local, name) for name in sorted(here | listing.keys())]
        newer = {folder.name: folder.find_newer(listing[folder.name], selected) for folder in folders}
        # All at once: a request for each of a thousand folders would take minutes.
        documents = remote.read(
            f"{name}/{file}" for name, files in newer.items() for file in files if file.endswith(".json")
        )
        for name, files in newer.items():
            with self._open(name) as folder:
                read = {file: documents[f"{name}/{file}"] for file in files if f"{name}/{file}" in documents}
                folder.download(listing[name], selected, read)

    def push_run(self, run: str) -> None:
        """Upload what changed in the folder of a run and delete there what the run no longer needs.

        If another machine finished the run meanwhile, its result replaces the one here. Raises UserError if the
        checkpoint here is not the one of `train.json`.
        """
        if self.url and (self.local / run).is_dir():
            with self._open(run) as folder:
                folder.upload()

    def push_all(self, below: str = "") -> None:
        """Upload everything that changed below a folder of the results."""
        if not self.url:
            return
        names = (file.relative_to(self.local).as_posix() for file in (self.local / below).rglob("*") if file.is_file())
        # A folder may have nothing left but its record.
        folders = {_folder_of(name) for name in names if _is_shared(name) or name.endswith(f"/{RECORD_FILE}")}
        for name in sorted(folders - {""}):
            self.push_run(name)

    def try_push_all(self, below: str = "") -> None:
        """Call `push_all` after another error: a failure is logged, so that the first error stays visible."""
        try:
            self.push_all(below)
        except (UserError, OSError) as error:
            logger.warning("%s; what is new is only in %s", error, self.local / below)

    def delete_run(self, run: str) -> None:
        """Delete a run at the URL, `train.json` first; its local folder is left to `RunFolder.clear`."""
        if self.url:
            with self._open(run) as folder:
                for name in sorted(folder.remote.list(run), key=lambda name: name != TRAIN):
                    folder.remote.delete(f"{run}/{name}")
                (folder.path / RECORD_FILE).unlink(missing_ok=True)

    @contextmanager
    def _open(self, name: str) -> Iterator[SyncedFolder]:
        """Lock a folder of the results: one process of this machine at a time synchronizes it."""
        assert self.url
        with file_lock(self.local / ".remote" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"):
            yield SyncedFolder(RemoteFolder(self.url), self.local, name)


class SyncedFolder:
    """A folder of the results, here and at the URL.

    `.remote.json` in it keeps for each synchronized file its version at the URL, and its stamp here at that time. If it
    is lost, the files are downloaded again.
    """

    def __init__(self, remote: RemoteFolder, local: Path, name: str) -> None:
        self.remote, self.name, self.path = remote, name, local / name
        self.files: dict[str, tuple[str, Stamp]] = {}
        with suppress(OSError, ValueError, TypeError):
            content = json.loads((self.path / RECORD_FILE).read_text(encoding="utf-8"))
            self.files = {name: (str(version), list(stamp)) for name, (version, stamp) in content["files"].items()}

    def save(self) -> None:
        write_json(self.path / RECORD_FILE, {"files": self.files})

    def list_remote(self) -> dict[str, str]:
        """List the files at the URL with their versions."""
        return {name: version for name, version in self.remote.list(self.name).items() if self._holds(name)}

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read the documents among the files at the URL; those that do not exist are left out."""
        found = self.remote.read(f"{self.name}/{name}" for name in names if name.endswith(".json"))
        return {name.removeprefix(f"{self.name}/"): content for name, content in found.items()}

    def find_newer(self, there: Mapping[str, str], selected: Select) -> list[str]:
        """List the selected files of which the URL has a version that was never here, or that are missing here."""
        return [name for name, version in there.items() if selected(name) and not self._is_current(name, version)]

    def download(
        self, there: Mapping[str, str], selected: Select, documents: Mapping[str, bytes] | None = None
    ) -> None:
        """Download what is newer at the URL, `train.json` last, and remove what another machine deleted there.

        documents: those of the newer files that are read already.
        """
        newer = self.find_newer(there, selected)
        if documents is None:
            documents = self.read(newer)
        if TRAIN in newer:
            (self.path / TRAIN).unlink(missing_ok=True)
            if CHECKPOINT not in newer and not self._is_current(CHECKPOINT, there.get(CHECKPOINT, "")):
                # It belongs to another training.
                (self.path / CHECKPOINT).unlink(missing_ok=True)
        for name in sorted(newer, key=lambda name: name == TRAIN):
            # What was deleted since it was listed is skipped.
            with suppress(NotFound, KeyError):
                if name.endswith(".json"):
                    write_bytes(self.path / name, documents[name])
                else:
                    download(join(self.remote.url, f"{self.name}/{name}"), self.path / name, replace=True)
                self._add(name, there[name], _stamp(self.path / name))
        deleted = [name for name in self.files if name not in there and selected(name)]
        if deleted:
            # Another process of this machine may have uploaded since `there` was listed.
            there = self.list_remote()
        for name in sorted(deleted, key=lambda name: name != TRAIN):
            if name not in there:
                _, stamp = self.files.pop(name)
                # A file that has changed here since is kept.
                if stamp == _stamp(self.path / name):
                    (self.path / name).unlink(missing_ok=True)
        if newer or deleted:
            self.save()

    def upload(self) -> None:
        """Upload what was written here since it was synchronized, and delete what is not needed at the URL.

        That are states, and files that a suite no longer writes. If another machine has finished the run, its result is
        downloaded instead.
        """
        # os.walk ignores folders that vanish meanwhile, such as `state` at the end of a training.
        files = (Path(root, name) for root, _, names in os.walk(self.path) for name in names)
        stamps = {file.relative_to(self.path).as_posix(): _stamp(file) for file in files}
        changed = [
            name
            for name, stamp in stamps.items()
            if stamp
            and self._holds(name)
            and (name not in self.files or self.files[name][1] != stamp)
            # The next download replaces it.
            and not self._is_damaged(name)
        ]
        is_collection = self.name.startswith(f"{COLLECTIONS}/")
        deleted = [n for n in self.files if (is_collection or _is_temporary(n)) and not (self.path / n).exists()]
        plain = [name for name in sorted(changed) if name not in (TRAIN, CHECKPOINT)]
        if not (plain or deleted or TRAIN in changed):
            return
        for name in plain:
            try:
                self.remote.write(f"{self.name}/{name}", self.path / name)
            except NotFound:
                # An older state may have been removed here since.
                if (self.path / name).exists():
                    raise
        accepted = TRAIN not in changed or self._upload_finished()
        for name in deleted:
            self.remote.delete(f"{self.name}/{name}")
            self.files.pop(name)
        there = self.list_remote()
        for name in plain:
            if name in there:
                self._add(name, there[name], stamps[name])
        self.save()
        if not accepted:
            self.download(there, lambda name: not _is_temporary(name))

    def _upload_finished(self) -> bool:
        """Upload the checkpoint and then `train.json`; False if another machine has finished the run."""
        names = (CHECKPOINT, TRAIN)
        if not _is_complete(self.path):
            problem = f"{self.path / CHECKPOINT} is not the file that training wrote (its SHA-256 differs)"
            raise UserError(f"{problem}; train again with --force")
        ours = {f"{self.name}/{name}": (self.path / name).read_bytes() for name in names}
        for wait in CONFLICT_WAITS:
            there = self.list_remote()
            if TRAIN in there:
                found = self.read([TRAIN]).get(TRAIN)
                if not self._is_current(TRAIN, there[TRAIN]) and found not in (None, ours[f"{self.name}/{TRAIN}"]):
                    return False
                self.remote.delete(f"{self.name}/{TRAIN}")
            for name in names:
                self.remote.write(f"{self.name}/{name}", self.path / name)
            # Another machine may have uploaded between the two. Listed before reading: a later version counts as newer.
            there = self.list_remote()
            if self.remote.read(ours) == ours:
                for name in names:
                    self._add(name, there[name], _stamp(self.path / name))
                return True
            time.sleep(wait * random.random())
        name = f"{redact(self.remote.url)}/{self.name}"
        raise UserError(f"{name} is being written by another machine; stop one of the two")

    def _holds(self, name: str) -> bool:
        """Whether the file `name` is synchronized with this folder: those in subfolders of a run are, others not."""
        return _is_shared(name) and ("/" not in name or RUN.fullmatch(self.name) is not None)

    def _is_current(self, name: str, version: str) -> bool:
        """Whether the file exists here and the URL has nothing newer."""
        known = name in self.files and self.files[name][0] == version and (self.path / name).exists()
        return known and not self._is_damaged(name)

    def _is_damaged(self, name: str) -> bool:
        """Whether a synchronized document has changed here since and is no JSON any more."""
        if name not in self.files or not name.endswith(".json") or self.files[name][1] == _stamp(self.path / name):
            return False
        with suppress(ValueError, FileNotFoundError):
            json.loads((self.path / name).read_bytes())
            return False
        return True

    def _add(self, name: str, version: str, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.files[name] = version, stamp


class CheckpointUploader:
    """Upload the folder of a run while it trains, from a background thread so that training does not wait."""

    def __init__(self, store: RemoteResults, run: str) -> None:
        self.store = store
        self.run = run
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to upload what has changed, unless an upload is still running; the next call then sends the rest."""
        if self.store.url and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self.upload, name="checkpoint upload", daemon=True)
            self._thread.start()

    def upload(self) -> None:
        """Upload what has changed; a failure is logged, because the state is on the local disk as well."""
        try:
            self.store.push_run(self.run)
        except (UserError, OSError) as error:
            logger.warning("%s; the state of %s is uploaded later", error, self.run)


@contextmanager
def synchronized_run(store: RemoteResults, run: str, *, resumes: bool = True) -> Iterator[None]:
    """Download what a run resumes from, if it does, and upload its folder at the end.

    The caller holds the lock of the run. After an error the upload is tried too, and its own error is only logged.
    """
    if resumes:
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
