"""Results behind a URL (s3://bucket/folder, gs://...): a folder of this machine stands for them.

Programs read and write that folder as any other results; `pull` brings what is newer at the URL, `push` sends what was
changed here. What holds, whatever is killed and whenever:

- A run with a `train.json` at the URL is finished, and its checkpoint is there: the checkpoint goes first, `train.json`
  last, and it is the first to go where a run is forgotten. At object stores a name appears with its whole content;
  elsewhere files are renamed into place.
- A run that another machine left goes on from its last pushed state.
- On one machine one process works on a run, held by its lock. Locks do not reach other machines: two of them that train
  one run at once do the same work twice, and who is second to finish takes what the first one left.

There is no lease at the store: a machine that was lost would hold its runs until the lease ran out, while a run that is
done twice has the same result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.results import write_bytes
from runner.store_index import (
    CHECKPOINT,
    FILE,
    TRAIN,
    Index,
    belongs,
    is_document,
    is_kept,
    is_passing,
    stamp_of,
    unit_of,
)
from shards.errors import DataError
from shards.locks import file_lock
from shards.remote import RemoteFolder, filesystem
from shards.urls import cache_name, canonical, is_url, local_path, redact, scheme

# Seconds to wait for who came first to finish a run, or for who is between its two files.
PATIENCE = (0.5, 1.0, 2.0, 4.0)
UNITS_TOGETHER = 100

logger = logging.getLogger(__name__)

Wanted = Callable[[str], bool]


def results_root(given: str, cache: Path) -> tuple[Path, str | None]:
    """The folder of results that `--results` names, and the URL that it stands for; None for a folder of its own.

    A file:// URL is the folder itself. Raises UsageError for a URL that nothing can be written to, DataError where a
    package is missing.
    """
    if not is_url(given):
        return Path(given).expanduser(), None
    url = canonical(given)
    folder = local_path(url)
    if folder is not None:
        return folder, None
    if scheme(url) in ("http", "https", "pipe", "hf"):
        raise UsageError(f"results cannot be written to {redact(url)}: name a folder or a URL such as s3://bucket/path")
    filesystem(url)
    return cache / "results" / cache_name(url), url


@dataclass(frozen=True)
class ResultsStore:
    """What is at `url`, and the folder `local` that stands for it; without a URL there is nothing to do.

    Every method raises DataError when the URL cannot be reached, or its bucket or a right is missing.
    """

    url: str | None
    local: Path

    @classmethod
    def of(cls, place: RuntimeConfig) -> ResultsStore:
        return cls(place.store, place.results)

    def pull(self, run: str, *, weights: bool = True, state: bool = False) -> None:
        """Bring the folder of a run up to date.

        state: also what the run goes on from, which is for who holds its lock.
        """
        if self.url:
            for wait in (*PATIENCE[:-1], 0.0):
                self._pull_unit(run, lambda name: _is_wanted(name, weights, state))
                if not weights or _is_whole(self.local / run):
                    return
                # Altered here, or caught between the two files of somebody who finishes this run.
                self._distrust(run)
                time.sleep(wait)

    def _distrust(self, run: str) -> None:
        with self._alone(run):
            index = Index(self.local, run)
            # Only what the URL has too: a finished run that was never sent is all there is of it.
            if TRAIN in index:
                index.forget(CHECKPOINT)
                index.save()

    def pull_all(self, *, weights: bool = False) -> None:
        """Bring what tables, lists and reports are made of: every document; no weights unless asked for, no states."""
        self._pull_below("", lambda name: is_document(name) or (weights and name == CHECKPOINT))

    def push(self, run: str, *, only: str = "") -> None:
        """Send what has changed in the folder of a run, and forget there what the run no longer needs.

        Where somebody else has finished the run meanwhile, theirs replaces what is here. Raises UserError where the
        checkpoint here is not the one of `train.json`.
        only: this file and no other, of a run that others may be working on.
        """
        if self.url and (self.local / run).is_dir():
            self._push_unit(run, only)

    def push_all(self) -> None:
        """Send everything that has changed."""
        self.push_tree("")

    def push_tree(self, name: str) -> None:
        """Send what has changed below a folder of the results."""
        if self.url:
            files = (file.relative_to(self.local) for file in (self.local / name).rglob("*") if file.is_file())
            kept = (file.as_posix() for file in files)
            # Also the folders of which nothing is left but the index.
            units = {unit_of(file) for file in kept if is_kept(file) or file.endswith(f"/{FILE}")}
            for unit in sorted(unit for unit in units if unit):
                self._push_unit(unit)

    def push_left(self, name: str = "") -> None:
        """`push_tree` for who fails anyway: what cannot be sent is said and hides no other error."""
        try:
            self.push_tree(name)
        except (UserError, DataError, OSError) as error:
            logger.warning("%s; what is new is only in %s", error, self.local / name)

    def clear(self, run: str) -> None:
        """Forget a run there; `train.json` goes first. Its folder here is left to `RunFolder.clear`."""
        if self.url:
            with self._alone(run):
                there = self._there.list(run)
                for name in sorted(there, key=lambda name: name != TRAIN):
                    self._there.delete(f"{run}/{name}")
                (self.local / run / FILE).unlink(missing_ok=True)

    @property
    def _there(self) -> RemoteFolder:
        assert self.url
        return RemoteFolder(self.url)

    @contextmanager
    def _alone(self, unit: str) -> Iterator[None]:
        """One process of this machine at a time brings a folder up to date."""
        locks = self.local / ".store"
        locks.mkdir(parents=True, exist_ok=True)
        with file_lock(locks / f"{hashlib.sha256(unit.encode()).hexdigest()[:16]}.lock"):
            yield

    def _pull_below(self, name: str, wanted: Wanted) -> None:
        if not self.url:
            return
        units: dict[str, dict[str, str]] = defaultdict(dict)
        for file, tag in self._there.list(name).items():
            path = f"{name}/{file}" if name else file
            if is_kept(path) and (unit := unit_of(path)):
                units[unit][path.removeprefix(f"{unit}/")] = tag
        stale = {unit: names for unit, there in units.items() if (names := self._stale(unit, there, wanted))}
        order = sorted(stale)
        for start in range(0, len(order), UNITS_TOGETHER):
            some = order[start : start + UNITS_TOGETHER]
            # Of many runs at once: one by one, the way to the store and back is what takes the time.
            contents = self._there.read(f"{unit}/{file}" for unit in some for file in stale[unit])
            for unit in some:
                with self._alone(unit):
                    found = {file: contents[f"{unit}/{file}"] for file in stale[unit] if f"{unit}/{file}" in contents}
                    self._take(unit, units[unit], found.__contains__, found)
        for index in (self.local / name).rglob(FILE):
            unit = index.parent.relative_to(self.local).as_posix()
            # What went away is looked for again, now that nobody here can be sending it.
            if any(wanted(known) and known not in units.get(unit, {}) for known in Index(self.local, unit).names()):
                self._pull_unit(unit, wanted)

    def _stale(self, unit: str, there: Mapping[str, str], wanted: Wanted) -> list[str]:
        index = Index(self.local, unit)
        return [name for name, tag in there.items() if wanted(name) and not index.is_current(name, tag)]

    def _pull_unit(self, unit: str, wanted: Wanted) -> None:
        with self._alone(unit):
            there = self._listed(unit)
            self._take(unit, there, wanted)
            self._drop(unit, there, wanted)

    def _listed(self, unit: str) -> dict[str, str]:
        return {name: tag for name, tag in self._there.list(unit).items() if belongs(name, unit)}

    def _read(self, unit: str, names: list[str]) -> dict[str, bytes]:
        contents = self._there.read(f"{unit}/{name}" for name in names)
        return {name: contents[f"{unit}/{name}"] for name in names if f"{unit}/{name}" in contents}

    def _take(
        self, unit: str, there: Mapping[str, str], wanted: Wanted, contents: Mapping[str, bytes] | None = None
    ) -> None:
        """Write what is newer there; of a run that was finished there, `train.json` last."""
        folder = self.local / unit
        index = Index(self.local, unit)
        newer = [name for name, tag in there.items() if wanted(name) and not index.is_current(name, tag)]
        if not newer:
            return
        contents = self._read(unit, newer) if contents is None else contents
        if TRAIN in newer:
            (folder / TRAIN).unlink(missing_ok=True)
            if CHECKPOINT not in newer and not index.is_current(CHECKPOINT, there.get(CHECKPOINT, "")):
                # Of another training, and worse than none.
                (folder / CHECKPOINT).unlink(missing_ok=True)
        for name in sorted(contents, key=lambda name: name == TRAIN):
            write_bytes(folder / name, contents[name])
            index.record(name, there[name], stamp_of(folder / name))
        index.save()

    def _drop(self, unit: str, there: Mapping[str, str], wanted: Wanted) -> None:
        """Remove here what somebody removed there, unless it has changed here since."""
        folder = self.local / unit
        index = Index(self.local, unit)
        gone = [name for name in index.names() if name not in there and wanted(name)]
        for name in sorted(gone, key=lambda name: name != TRAIN):
            if index.is_same(name, stamp_of(folder / name)):
                (folder / name).unlink(missing_ok=True)
            index.forget(name)
        if gone:
            index.save()

    def _push_unit(self, unit: str, only: str = "") -> None:
        with self._alone(unit):
            folder = self.local / unit
            index = Index(self.local, unit)
            changed, dropped = index.changed(), index.dropped()
            if only:
                changed, dropped = {name: stamp for name, stamp in changed.items() if name == only}, []
            plain = [name for name in sorted(changed) if name not in (TRAIN, CHECKPOINT)]
            if not plain and not dropped and TRAIN not in changed:
                return
            strange = [name for name in plain if name not in index and not is_passing(name)]
            if strange:
                # Whoever was first to make a file that is new here has the say.
                there = self._listed(unit)
                plain = [name for name in plain if name not in strange or name not in there]
            for name in plain:
                # What was there a moment ago may be an older state that was removed since.
                if stamp_of(folder / name) is not None:
                    self._there.write(f"{unit}/{name}", (folder / name).read_bytes())
            finished = self._finish(unit, index) if TRAIN in changed else {}
            for name in dropped:
                self._there.delete(f"{unit}/{name}")
                index.forget(name)
            there = self._listed(unit)
            for name, tag in {**{name: there[name] for name in plain if name in there}, **(finished or {})}.items():
                index.record(name, tag, changed.get(name) or stamp_of(folder / name))
            index.save()
            if finished is None:
                self._take(unit, there, lambda name: not is_passing(name))

    def _finish(self, unit: str, index: Index) -> dict[str, str] | None:
        """Put the checkpoint there and then `train.json`; None where somebody else has finished the run.

        Gives the versions of the two as they were when both were ours: what somebody puts there after that is newer.
        """
        train, weights = (_content(index.folder / name) for name in (TRAIN, CHECKPOINT))
        there = self._listed(unit)
        if TRAIN in there and there[TRAIN] != index.version(TRAIN):
            return None
        if weights is None or not _fit(train, weights):
            problem = f"{index.folder / CHECKPOINT} is not the file that training wrote (its SHA-256 differs)"
            raise UserError(f"{problem}; train again with --force")
        written = False
        if TRAIN in there:
            self._there.delete(f"{unit}/{TRAIN}")
        elif CHECKPOINT not in there:
            self._there.write(f"{unit}/{CHECKPOINT}", weights)
            written = True
        if not written and TRAIN not in there and self._finished_soon(unit):
            return None
        for wait in PATIENCE:
            if not written:
                self._there.write(f"{unit}/{CHECKPOINT}", weights)
            self._there.write(f"{unit}/{TRAIN}", train or b"")
            # Listed before they are read: nobody else writes the very same, so that these versions are ours.
            there = self._listed(unit)
            found = self._read(unit, [CHECKPOINT, TRAIN])
            if found == {CHECKPOINT: weights, TRAIN: train}:
                return {name: there[name] for name in found}
            if _fit(found.get(TRAIN), found.get(CHECKPOINT)):
                return None
            written = False
            time.sleep(wait * random.random())
        raise UserError(f"{redact(self.url or '')}/{unit} is being written by another machine; stop one of the two")

    def _finished_soon(self, unit: str) -> bool:
        """Whether who put a checkpoint there finishes the run; a machine that was lost between the two does not."""
        for wait in PATIENCE:
            if TRAIN in self._listed(unit):
                return True
            time.sleep(wait)
        return False


def _is_wanted(name: str, weights: bool, state: bool) -> bool:
    if name == CHECKPOINT:
        return weights
    return state or not name.startswith("state/")


def _is_whole(folder: Path) -> bool:
    """Whether the checkpoint here is that of the finished training here, if there is one."""
    train = _content(folder / TRAIN)
    return train is None or _fit(train, _content(folder / CHECKPOINT))


def _fit(train: bytes | None, weights: bytes | None) -> bool:
    """Whether these are the two files of one finished training."""
    if train is None or weights is None:
        return False
    try:
        named = json.loads(train)["checkpoint_sha256"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(named == hashlib.sha256(weights).hexdigest())


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
