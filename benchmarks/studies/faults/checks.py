"""Check a run whose ranks were killed: readable files, few lost steps, the same results, no leftovers."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.faults.ranks import ObservedRun, Signs
from procap.errors import UserError
from runner.checkpoint import STATE_NAME, read_checkpoint
from runner.results import TrainResult
from runner.run_folders import RunFolder, RunHeld

WEIGHTS = 1e-3
"""Tolerance of a weight, relative to the largest of its tensor: fp32 sums in another order."""

TERMS = 1e-4
"""Relative tolerance of the mean of a loss term over an epoch."""

LOOK_SECONDS = 0.03
LATE_STEPS = 3
"""Steps allowed after a checkpoint is due: one notices it, one lets all ranks agree, and one is already running."""


@dataclass(frozen=True)
class Difference:
    """Differences of two runs: worst relative difference of loss terms and of weights, and count differences."""

    terms: float
    weights: float
    counts: int


class Watcher:
    """Read all result files of a run again and again while it is trained."""

    def __init__(self, run: ObservedRun, wrong: list[str]) -> None:
        self.run, self.looks = run, 0
        self._wrong = wrong
        self._last = 0.0

    def look(self, *, at_once: bool = False) -> None:
        """Read all files, unless they were read a moment ago; an unreadable file is recorded."""
        if not at_once and time.monotonic() - self._last < LOOK_SECONDS:
            return
        folder = self.run.folder
        try:
            folder.config()
            folder.progress()
            if (done := folder.train()) is not None:
                read_checkpoint(folder.checkpoint_file, done.checkpoint_sha256)
            folder.evaluations()
            find_newest_state(folder)
        except (UserError, ValueError) as error:
            if str(error) not in self._wrong:
                self._wrong.append(str(error))
        self.looks, self._last = self.looks + 1, time.monotonic()


def find_newest_state(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, 0 without one. Raises ValueError for a damaged file."""
    newest = 0
    for path in folder.state.glob("step-*"):
        with suppress(FileNotFoundError):
            match, data = STATE_NAME.fullmatch(path.name), path.read_bytes()
            if match is None or hashlib.sha256(data).hexdigest()[:16] != match[2]:
                raise ValueError(f"{path} is no whole state")
            newest = max(newest, int(match[1]))
    return newest


def count_overdue(run: ObservedRun, signs: Signs) -> int:
    """Count steps of an attempt that were done after a checkpoint was due, beyond those that agreeing on it takes."""
    written = [run.folder.progress_file, *run.folder.state.glob("step-*")]
    moments = []
    for path in written:
        with suppress(FileNotFoundError):
            moments.append(path.stat().st_mtime)
    if not moments or run.folder.train_file.exists():
        return 0
    late = sum(moment > max(moments) + run.every for moment in signs.ticks)
    return max(late - LATE_STEPS, 0)


def compare(reference: ObservedRun, run: ObservedRun, wrong: list[str]) -> Difference:
    """Compare a finished run with the undisturbed one; record differences and leftover files."""
    wanted, found = _results(reference), _results(run)
    for name in ("steps", "images", "fewshot", "backbone_digest", "manifest_digest"):
        if getattr(wanted, name) != getattr(found, name):
            wrong.append(f"{name}: {getattr(found, name)}, undisturbed {getattr(wanted, name)}")
    difference = Difference(_terms(wanted, found, wrong), _weights(reference, run), _counts(reference, run))
    if difference.terms > TERMS:
        wrong.append(f"a loss term is off by {difference.terms:.1e}")
    if difference.weights > WEIGHTS:
        wrong.append(f"a weight is off by {difference.weights:.1e}")
    if difference.counts:
        wrong.append(f"{difference.counts} counts of right images differ")
    wrong += list_leftovers(run)
    return difference


def list_leftovers(run: ObservedRun) -> list[str]:
    """List files of a finished run that are not results, and a lock that is still held."""
    folder = run.folder
    for partial in (folder.path / "eval").glob(".*.tmp"):
        # A partial file is removed once it is a minute old; its age is set here instead of waiting.
        os.utime(partial, (0, 0))
        folder.tidy()
    files = [folder.config_file, folder.train_file, folder.checkpoint_file, folder.path / ".lock"]
    known = {*files, *(folder.eval_file(target) for target in run.targets)}
    found = [f"{path} was left over" for path in _files(run.results) if path not in known]
    try:
        with folder.locked():
            pass
    except RunHeld:
        found.append(f"{folder.path} is still held")
    return found


def _files(root: Path) -> Iterable[Path]:
    return (path for path in sorted(root.rglob("*")) if not path.is_dir())


def _results(run: ObservedRun) -> TrainResult:
    result = run.folder.train()
    assert result is not None
    return result


def _terms(wanted: TrainResult, found: TrainResult, wrong: list[str]) -> float:
    rates = [[(log.epoch, log.lr, sorted(log.terms)) for log in result.epochs] for result in (wanted, found)]
    if rates[0] != rates[1]:
        wrong.append(f"epochs differ: {rates[1]}, undisturbed {rates[0]}")
        return 0.0
    pairs = [
        (log.terms[name], other.terms[name])
        for log, other in zip(wanted.epochs, found.epochs, strict=True)
        for name in log.terms
    ]
    return max((abs(one - other) / max(abs(one), 1e-6) for one, other in pairs), default=0.0)


def _weights(reference: ObservedRun, run: ObservedRun) -> float:
    wanted, found = (read_checkpoint(each.folder.checkpoint_file)[0] for each in (reference, run))
    assert wanted.keys() == found.keys()
    return max(float((one - found[name]).abs().max() / one.abs().max()) for name, one in wanted.items())


def _counts(reference: ObservedRun, run: ObservedRun) -> int:
    differ = 0
    for target in run.targets:
        wanted, found = (each.folder.evaluation(target) for each in (reference, run))
        assert wanted is not None and found is not None
        pairs = zip(wanted.per_class.correct, found.per_class.correct, strict=True)
        differ += sum(one != other for one, other in pairs) + (wanted.total != found.total)
    return differ
