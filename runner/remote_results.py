"""Keep results behind a URL (s3://bucket/folder, gs://...): a local folder is synchronized with it run by run.

Programs read and write that folder like any other results; `pull` downloads, `push` uploads. A run with a `train.json`
at the URL is finished and its checkpoint is there: the checkpoint is uploaded first and `train.json` last, and
`train.json` is deleted first. An unfinished run continues on another machine from its last uploaded state.

Locks do not reach other machines. Of two machines that train one run at the same time, the last to finish keeps its
result, whose checkpoint has the SHA-256 that its `train.json` names.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from procap.errors import UsageError, UserError
from runner.results import write_bytes
from shards.names import require_text
from shards.remote import delete, download, filesystem, list_files, read_files, upload
from shards.urls import cache_name, canonical, join, local_path, redact, require_location, scheme

TRAIN, CHECKPOINT, PROGRESS = "train.json", "checkpoint.safetensors", "progress.json"
RUN = re.compile(r"(?:.*/)?seed\d+-[0-9a-f]{8}(?=/)")
# MLflow's database is for one machine.
LOCAL_ONLY = re.compile(r"mlflow\.db|(.*/)?\.")

logger = logging.getLogger(__name__)


def results_root(location: str, cache: Path) -> tuple[Path, str | None]:
    """Return the local folder for `--results`, and its URL if any.

    Raises UsageError for a file and for a kind of URL that is only read, UserError if a package for it is missing.
    """
    if not location:
        raise UsageError("the name of the results folder is empty")
    require_location(location)
    if (folder := local_path(location)) is not None:
        folder = folder.expanduser()
        require_text(folder)
        if in_place := next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None):
            raise UsageError(f"--results {folder}: {in_place} is a file, name a folder")
        return folder, None
    url = canonical(location)
    if scheme(url) in ("http", "https", "hf"):
        raise UsageError(f"results cannot be written to {redact(url)}: name a folder or a URL such as s3://bucket/path")
    filesystem(url)
    return cache / "results" / cache_name(url), url


@dataclass(frozen=True)
class RemoteResults:
    """The results at `url` and their local folder; without a URL every method does nothing.

    Methods raise UserError when the URL cannot be reached, or its bucket or a permission is missing.
    """

    url: str | None
    local: Path

    def pull(self, below: str = "", *, weights: bool = False, states: bool = False) -> None:
        """Download the documents below a folder, such as that of a run; tables and reports are made of them.

        weights: also the checkpoints of finished runs. states: also what unfinished runs resume from; only the process
            that holds the lock of a run may do that.
        """
        if not self.url:
            return
        names = self._list_remote(below)
        # All at once: a request for each of a thousand folders would take minutes.
        documents = read_files(self._address(), (name for name in names if name.endswith(".json")))
        for run, group in group_by_run(names).items():
            self._write_run(run, {name: documents[name] for name in group if name in documents}, weights=weights)
            if states and f"{run}/{TRAIN}" not in documents:
                for name in group:
                    # The name of a state contains its hash, so a file that is here is the same and is kept.
                    if name.startswith(f"{run}/state/"):
                        download(self._address(name), self.local / name)

    def push(self, below: str = "") -> None:
        """Upload what differs below a folder, and delete at the URL what a finished run no longer needs."""
        if not self.url:
            return
        files = (file.relative_to(self.local).as_posix() for file in (self.local / below).rglob("*") if file.is_file())
        local = group_by_run(sorted(file for file in files if not LOCAL_ONLY.match(file)))
        stored = group_by_run(self._list_remote(below)) if local else {}
        for run, names in local.items():
            self._push_run(run, names, stored.get(run, []))

    def try_push(self, below: str = "") -> None:
        """Call `push` and log a failure; what was not uploaded is on the local disk as well."""
        try:
            self.push(below)
        except (UserError, OSError) as error:
            logger.warning("%s; what is new is only in %s", error, self.local / below)

    def delete_run(self, run: str) -> None:
        """Delete a run at the URL, `train.json` first; its local folder is left to `RunFolder.clear`."""
        if self.url:
            for name in sorted(self._list_remote(run), key=lambda name: name != f"{run}/{TRAIN}"):
                delete(self._address(name))

    def _write_run(self, run: str, documents: Mapping[str, bytes], *, weights: bool) -> None:
        """Write the documents of a run here, and its checkpoint; a result at the URL replaces the one here."""
        folder, train = self.local / run, documents.get(f"{run}/{TRAIN}")
        if train is not None and _read(folder / TRAIN) != train:
            # In this order: a kill in between leaves an unfinished run, not a result with other weights.
            for name in (TRAIN, CHECKPOINT):
                (folder / name).unlink(missing_ok=True)
            for name in ("eval", "scores"):
                shutil.rmtree(folder / name, ignore_errors=True)
        if train is not None and weights:
            # An existing checkpoint belongs to `train.json`.
            download(self._address(f"{run}/{CHECKPOINT}"), folder / CHECKPOINT)
        # False sorts before True: `train.json` comes last.
        for name in sorted(documents, key=lambda name: name == f"{run}/{TRAIN}"):
            if _read(self.local / name) != documents[name]:
                write_bytes(self.local / name, documents[name])
        if train is not None:
            # Another machine has finished the run.
            shutil.rmtree(folder / "state", ignore_errors=True)
            (folder / PROGRESS).unlink(missing_ok=True)

    def _push_run(self, run: str, names: Sequence[str], stored: Sequence[str]) -> None:
        """Upload a run, or the files of none. names, stored: all files here and at the URL."""
        result = f"{run}/{TRAIN}"
        documents = {name: _read(self.local / name) for name in names if name.endswith(".json") or not run}
        there = read_files(self._address(), documents)
        states = {name: self.local / name for name in names if name.startswith(f"{run}/state/")}
        uploads: dict[str, bytes | Path] = {name: file for name, file in states.items() if name not in stored}
        uploads |= {name: content for name, content in documents.items() if content not in (None, there.get(name))}
        if train := uploads.pop(result, None):
            # A kill between any two of these leaves an unfinished run there, never one with different weights.
            delete(self._address(result))
            upload(self.local / run / CHECKPOINT, self._address(f"{run}/{CHECKPOINT}"))
            uploads[result] = train
        for name, content in uploads.items():
            upload(content, self._address(name))
        # A machine without a state here has only read the run, which another machine may be training.
        if states or result in names:
            for name in set(stored) - set(names):
                if name.startswith((f"{run}/state/", f"{run}/{PROGRESS}")):
                    delete(self._address(name))

    def _list_remote(self, below: str) -> list[str]:
        """List the names of the files at the URL below a folder."""
        return [f"{below}/{name}" if below else name for name in list_files(self._address(below))]

    def _address(self, name: str = "") -> str:
        """Return the URL of a file or folder of the results; by default of all."""
        assert self.url
        return join(self.url, name) if name else self.url


def group_by_run(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by the folder of the run that they lie in; "" for the files of no run."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = RUN.match(name)
        groups[match[0] if match else ""].append(name)
    return groups


def _read(file: Path) -> bytes | None:
    """Read a file; None if it does not exist."""
    with suppress(FileNotFoundError):
        return file.read_bytes()
    return None
