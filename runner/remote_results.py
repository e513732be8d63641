"""Keep results behind a URL (s3://bucket/folder, gs://...): a local folder is synchronized with it run by run.

Programs read and write that folder like any other results; `pull_*` downloads, `push_*` uploads. A run with a
`train.json` at the URL is finished and its checkpoint is there: the checkpoint is uploaded first and `train.json` last,
and `train.json` is deleted first. An unfinished run continues on another machine from its last uploaded state.

Locks do not reach other machines. Of two machines that train one run at the same time, the last to finish keeps its
result, whose checkpoint has the SHA-256 that its `train.json` names.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.results import write_bytes
from shards.remote import RemoteFolder, download, filesystem
from shards.urls import cache_name, canonical, is_url, join, local_path, redact, scheme

TRAIN, CHECKPOINT, PROGRESS = "train.json", "checkpoint.safetensors", "progress.json"
RUN = re.compile(r"(?:.*/)?seed\d+-[0-9a-f]{8}(?=/|$)")
# MLflow's database is for one machine.
LOCAL_ONLY = re.compile(r"mlflow\.db|(.*/)?\.")

logger = logging.getLogger(__name__)


def results_root(location: str, cache: Path) -> tuple[Path, str | None]:
    """Return the local folder for `--results`, and the URL that it stands for; None for a folder or a file:// URL.

    Raises UsageError for a URL that cannot be written to, UserError if a package is missing.
    """
    url = canonical(location) if is_url(location) else ""
    folder = local_path(url) if url else Path(location).expanduser()
    if folder is not None:
        return folder, None
    if scheme(url) in ("http", "https", "hf"):
        raise UsageError(f"results cannot be written to {redact(url)}: name a folder or a URL such as s3://bucket/path")
    filesystem(url)
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
        return cls(runtime.results_url, runtime.results)

    def pull_run(self, run: str, *, weights: bool = True, state: bool = False) -> None:
        """Update the local folder of a run from the URL.

        state: also the state to resume from; only the process that holds the lock of the run may do that.
        """
        if not self.url:
            return
        remote = RemoteFolder(self.url)
        names = [f"{run}/{name}" for name in remote.list(run)]
        documents = remote.read(name for name in names if name.endswith(".json"))
        self._write_run(run, documents, weights=weights)
        if state and f"{run}/{TRAIN}" not in documents:
            for name in names:
                # The name of a state contains its hash, so an existing file is the same.
                if name.startswith(f"{run}/state/") and not (self.local / name).exists():
                    download(join(self.url, name), self.local / name)

    def pull_all(self) -> None:
        """Download all documents, which tables and reports are made of; no checkpoints and states."""
        if not self.url:
            return
        remote = RemoteFolder(self.url)
        runs: dict[str, dict[str, bytes]] = defaultdict(dict)
        names = (name for name in remote.list() if name.endswith(".json") and not LOCAL_ONLY.match(name))
        # All at once: a request for each of a thousand folders would take minutes.
        for name, content in remote.read(names).items():
            if run := RUN.match(name):
                runs[run[0]][name] = content
            else:
                self._write(name, content)
        for run_path, documents in runs.items():
            self._write_run(run_path, documents, weights=False)

    def push_run(self, run: str) -> None:
        """Upload what differs from the URL, and delete there what a finished run no longer needs."""
        if not self.url or not (self.local / run).is_dir():
            return
        remote, names = RemoteFolder(self.url), self._list_local(run)
        stored = {f"{run}/{name}" for name in remote.list(run)}
        documents = self._changed(name for name in names if name.endswith(".json"))
        train = documents.pop(f"{run}/{TRAIN}", None)
        if train is not None:
            # A kill between any two of these leaves an unfinished run there, never one with different weights.
            remote.delete(f"{run}/{TRAIN}")
            remote.write(f"{run}/{CHECKPOINT}", self.local / run / CHECKPOINT)
        states = {name for name in names if name.startswith(f"{run}/state/")}
        for name in states - stored:
            remote.write(name, self.local / name)
        for name, content in documents.items():
            remote.write(name, content)
        if train is not None:
            remote.write(f"{run}/{TRAIN}", train)
        # A machine without a state here has only read the run, which another machine may be training.
        if states or f"{run}/{TRAIN}" in names:
            for name in stored - set(names):
                if name.startswith((f"{run}/state/", f"{run}/{PROGRESS}")):
                    remote.delete(name)

    def push_all(self, below: str = "") -> None:
        """Upload everything that changed below a folder of the results."""
        if not self.url:
            return
        names = self._list_local(below)
        for run in sorted({match[0] for name in names if (match := RUN.match(name))}):
            self.push_run(run)
        for name, content in self._changed(name for name in names if not RUN.match(name)).items():
            RemoteFolder(self.url).write(name, content)

    def try_push_all(self, below: str = "") -> None:
        """Call `push_all` and log a failure; what was not uploaded is on the local disk as well."""
        try:
            self.push_all(below)
        except (UserError, OSError) as error:
            logger.warning("%s; what is new is only in %s", error, self.local / below)

    def delete_run(self, run: str) -> None:
        """Delete a run at the URL, `train.json` first; its local folder is left to `RunFolder.clear`."""
        if self.url:
            remote = RemoteFolder(self.url)
            for name in sorted(remote.list(run), key=lambda name: name != TRAIN):
                remote.delete(f"{run}/{name}")

    def _write_run(self, run: str, documents: Mapping[str, bytes], *, weights: bool) -> None:
        """Write the documents of a run here, and its checkpoint; a result at the URL replaces the one here."""
        folder, train = self.local / run, documents.get(f"{run}/{TRAIN}")
        if train is not None and self._read(f"{run}/{TRAIN}") != train:
            # In this order: a kill in between leaves an unfinished run, not a result with other weights.
            for name in (TRAIN, CHECKPOINT):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "eval", ignore_errors=True)
        if train is not None and weights:
            # An existing checkpoint belongs to `train.json`.
            download(join(self.url or "", f"{run}/{CHECKPOINT}"), folder / CHECKPOINT)
        # False sorts before True: `train.json` comes last.
        for name in sorted(documents, key=lambda name: name == f"{run}/{TRAIN}"):
            self._write(name, documents[name])
        if train is not None:
            # Another machine has finished the run.
            shutil.rmtree(folder / "state", ignore_errors=True)
            (folder / PROGRESS).unlink(missing_ok=True)

    def _list_local(self, below: str) -> list[str]:
        """List the names of the local files below a folder that are kept at the URL."""
        files = (file for file in (self.local / below).rglob("*") if file.is_file())
        names = (file.relative_to(self.local).as_posix() for file in files)
        return sorted(name for name in names if not LOCAL_ONLY.match(name))

    def _changed(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read the local files whose content differs from that at the URL."""
        assert self.url is not None
        local = {name: content for name in names if (content := self._read(name)) is not None}
        stored = RemoteFolder(self.url).read(local)
        return {name: content for name, content in local.items() if stored.get(name) != content}

    def _read(self, name: str) -> bytes | None:
        """Read a local file; None if it does not exist."""
        with suppress(FileNotFoundError):
            return (self.local / name).read_bytes()
        return None

    def _write(self, name: str, content: bytes) -> None:
        if self._read(name) != content:
            write_bytes(self.local / name, content)


@contextmanager
def synchronized_run(remote: RemoteResults, run: str, *, resumes: bool = True) -> Iterator[None]:
    """Download what a run resumes from, if it does, and upload its folder at the end.

    The caller holds the lock of the run. After an error the upload is tried too, and its own error is only logged.
    """
    if resumes:
        remote.pull_run(run, state=True)
    try:
        yield
    except BaseException:
        remote.try_push_all(run)
        raise
    remote.push_run(run)
