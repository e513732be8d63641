"""Read and write the folder of a run, and find the runs of a results folder.

<results>/<config.path>/config.json  progress.json (while running)  train.json  checkpoint.safetensors
                        eval/<target>[.<settings>].json  validation.json  state/ (while running)
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from procap.errors import UsageError, UserError
from runner.config import EvalSettings, RunConfig, Target
from runner.results import (
    EvalResult,
    Progress,
    TrainResult,
    ValidationCount,
    ValidationHistory,
    read_card,
    read_document,
)
from shards.files import LockHeld, file_lock, read_file
from shards.manifest import FILE
from shards.reader import open_dataset

WRITING_SECONDS = 60.0
DEFAULT_SETTINGS = EvalSettings()
RunDocument = TypeVar("RunDocument", TrainResult, Progress, EvalResult, ValidationHistory)
NO_RUNS = {"mlartifacts", "mlruns", "collections"}
"""Folders of results that hold no runs."""
DEPTH = 6
"""Parts of a run's path below the results: classes, data set, method, backbone, shots, and seed with hash."""


class RunHeld(UserError):
    """Another process works on the run; the caller can wait for it."""


def _child(name: str) -> property:
    return property(lambda folder: folder.path / name, doc=f"The path of {name}.")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; reading never creates anything."""

    path: Path

    config_file = _child("config.json")
    progress_file = _child("progress.json")
    train_file = _child("train.json")
    checkpoint_file = _child("checkpoint.safetensors")
    validation_file = _child("validation.json")
    state = _child("state")

    def eval_file(self, target: Target, settings: EvalSettings = DEFAULT_SETTINGS) -> Path:
        return self.path / "eval" / target.file(settings)

    def config(self) -> RunConfig | None:
        return read_document(self.config_file, RunConfig)

    def progress(self) -> Progress | None:
        return self._read(self.progress_file, Progress)

    def train(self) -> TrainResult | None:
        """Read the result of the finished training; None if there is none.

        Raises UserError if it, or the checkpoint if that is here, is of another run than the folder is named after.
        """
        training = self._read(self.train_file, TrainResult)
        if training and (card := read_card(self.checkpoint_file)):
            self._check_hash(self.checkpoint_file, card.config.hash)
            if (card.backbone_digest, card.manifest_digest) != (training.backbone_digest, training.manifest_digest):
                names = f"{self.checkpoint_file} and {self.train_file.name}"
                raise UserError(f"{names} are of different weights or data sets; train again with --force")
        return training

    def status(self) -> str:
        """Return the state of the run in a word. Raises UserError for a broken file."""
        if training := self.train():
            return "imported" if training.imported else "finished"
        progress = self.progress()
        return "failed" if progress and progress.status == "failed" else "unfinished"

    def validation(self) -> list[ValidationCount]:
        """Read the counts at the ends of epochs so far, in order; empty without validation."""
        history = self._read(self.validation_file, ValidationHistory)
        return history.counts if history else []

    def evaluation(self, target: Target, settings: EvalSettings = DEFAULT_SETTINGS) -> EvalResult | None:
        """Read the result on a target under `settings`, which `EvalSettings.for_run` has fitted to the run."""
        return self.read_evaluation(self.eval_file(target, settings))

    def eval_files(self) -> list[Path]:
        folder = self.path / "eval"
        names = os.listdir(folder) if folder.is_dir() else []
        return [folder / name for name in sorted(names) if name.endswith(".json")]

    def evaluations(self) -> list[EvalResult]:
        """Read every evaluation of the run under any settings, in the order of their file names."""
        return [result for result in map(self.read_evaluation, self.eval_files()) if result is not None]

    def read_evaluation(self, path: Path) -> EvalResult | None:
        """Read one of `eval_files`. Raises UserError if it is of another run, target or settings than its name says."""
        result = self._read(path, EvalResult)
        if result and result.file != path.name:
            under = f" under {result.settings.label}" if result.settings.label else ""
            raise UserError(f"{path} is of {result.target!r}{under}: delete it, or restore its name")
        return result

    def _read(self, path: Path, model: type[RunDocument]) -> RunDocument | None:
        """Read a document of the run. Raises UserError for a broken one or one of another configuration."""
        document = read_document(path, model)
        if document:
            self._check_hash(path, document.config_hash)
        return document

    def _check_hash(self, path: Path, found: str) -> None:
        """Raise UserError unless the file at `path` is of the configuration that the folder is named after."""
        if found != (expected := self.path.name.rpartition("-")[2]):
            raise UserError(f"{path} is of run {found!r}, not {expected}; move it away, or repeat with --force")

    def clear(self) -> None:
        """Delete the run. `train.json` is deleted first, so that a kill half-way leaves an unfinished run."""
        try:
            for file in (self.train_file, self.config_file, self.checkpoint_file, self.validation_file):
                file.unlink(missing_ok=True)
            if (self.path / "eval").exists():
                shutil.rmtree(self.path / "eval")
            self.forget_progress()
        except OSError as error:
            raise UserError(f"cannot clear {self.path}: {error.strerror or error}") from error

    def forget_progress(self) -> None:
        """Remove what only an unfinished run needs."""
        self.progress_file.unlink(missing_ok=True)
        shutil.rmtree(self.state, ignore_errors=True)

    def tidy(self) -> None:
        """Remove temporary files of a finished run that was killed, unless the run is locked or the disk read-only."""
        if self.state.exists() or self.progress_file.exists() or any((self.path / "eval").glob(".*.tmp")):
            with suppress(UserError, OSError), self.locked():
                # Before this process had the lock, another one may have restarted the run and stopped.
                if self.train_file.exists():
                    self.forget_progress()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run, or raise RunHeld, which names the holder; remove temporary files of killed processes."""
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self.path / ".lock", timeout=0))
            except LockHeld as error:
                raise RunHeld(
                    f"the run {self.path} is held by another process ({error.owner}); wait for it or stop it"
                ) from None
            except OSError as error:
                reason = error.strerror or error
                raise UserError(f"cannot write to {self.path}: {reason}; name another folder with --results") from error
            for pattern in (".[a-z]*.json.*.tmp", ".checkpoint.*.tmp", "state/.*.tmp", "eval/.*.tmp"):
                for leftover in self.path.glob(pattern):
                    # Evaluations are written without the lock, so a recent temporary file may still have a writer.
                    with suppress(FileNotFoundError):
                        if leftover.parent.name != "eval" or time.time() - leftover.stat().st_mtime > WRITING_SECONDS:
                            leftover.unlink()
            yield


class OtherContent(UserError):
    """A finished run is of other content of a data set than is packed now."""


def check_training_content(config: RunConfig, training: TrainResult, data: Path) -> None:
    """Raise OtherContent if `data` holds other content of the run's data set than at its training."""
    check_content(config, config.dataset, training.manifest_digest, data, "train" if training.steps else "evaluate")


def check_content(
    config: RunConfig, dataset: str, digest: str, data: Path, verb: Literal["train", "evaluate"] = "evaluate"
) -> None:
    """Raise OtherContent if `data` holds other content of `dataset` than `digest`, that of a result of the run."""
    command: str = verb if verb == "train" else "eval"
    if not config.recipe.epochs:
        # Runs without training are stored by shots and seed all the same.
        command += f" --methods {config.method} --shots {config.shots or 'full'} --seeds {config.seed}"
    if (found := packed_digest(data, dataset)) not in (None, digest):
        raise OtherContent(
            f"{config.path} was {verb.removesuffix('e')}ed on other content of {dataset} ({digest}) than is in {data} "
            f"({found}): pack that again, or {verb} again with --force, such as `procap {command} ... --force`, "
            "which replaces the result; to keep it, name other --results, or pack the new content under another name"
        )


def packed_digest(data: Path, dataset: str) -> str | None:
    """Return the digest of the content of `dataset` that is packed in `data`; None if it is not there."""
    return open_dataset(data, dataset).manifest.digest if (data / dataset / FILE).exists() else None


def locate_run(folder: Path) -> tuple[RunConfig, Path]:
    """Return the configuration of the run in `folder`, and the results folder that it lies in."""
    config = RunFolder(folder).config()
    if config is None:
        hint = "list the runs with `procap ls runs --results FOLDER`"
        raise UsageError(f"{folder} is not the folder of a run (no config.json in it); {hint}")
    folder = folder.resolve()
    if not folder.as_posix().endswith(f"/{config.path}"):
        raise UsageError(
            f"{folder} was moved or changed: its config.json is of {config.path}; move it back to RESULTS/{config.path}"
        )
    return config, folder.parents[DEPTH - 1]


def find_runs(results_root: Path) -> list[RunFolder]:
    """List every run below `results_root`, finished or not, ordered by path; copies that MLflow keeps are left out.

    Of equal copies of a run the one that is nearest to the root is listed, with a note. Raises UserError that names two
    which differ, because no number could be preferred.
    """
    found: dict[tuple[str, ...], RunFolder] = {}
    for place, folders, files in os.walk(results_root):
        path = Path(place)
        if not {"config.json", "train.json"}.isdisjoint(files) and path.match("seed*-*") and path != results_root:
            folder, name = RunFolder(path), path.parts[-DEPTH:]
            first = found.setdefault(name, folder)
            if first is not folder:
                found[name] = _choose_copy(first, folder)
            folders.clear()
        # Skip MLflow's folders: they hold copies of the runs, and walking through them takes long.
        folders[:] = [name for name in folders if name not in NO_RUNS]
    return sorted(found.values(), key=lambda folder: folder.path)


def _choose_copy(one: RunFolder, other: RunFolder) -> RunFolder:
    """Return the copy of a run with the shorter path, with a note. Raises UserError if their documents differ."""
    kept, left = sorted((one, other), key=lambda folder: (len(folder.path.parts), folder.path))
    if _read_documents(kept) != _read_documents(left):
        raise UserError(
            f"{kept.path} and {left.path} are the same run with different results; move one of them out of the results"
        )
    warnings.warn(f"{left.path} is a copy of {kept.path}, which counts once", stacklevel=2)
    return kept


def _read_documents(folder: RunFolder) -> dict[str, bytes]:
    files = [folder.config_file, folder.train_file, folder.validation_file, *folder.eval_files()]
    return {file.name: read_file(file) for file in files if file.exists()}
