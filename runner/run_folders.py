"""Name, list and read the files in the folder of a run, and find the runs of a results folder.

<results>/<config.path>/config.json  progress.json (while running)  train.json  checkpoint.safetensors
                        eval/<target>[.<settings>].json  scores/<target>[.<settings>].json
                        validation.json  tracking.json (with MLflow)  state/ (while running)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from procap.errors import UsageError, UserError
from runner.config import EvalSettings, RunConfig, Target
from runner.results import (
    EvalResult,
    Progress,
    RunDocument,
    TargetResult,
    TrainResult,
    ValidationCount,
    ValidationHistory,
    read_document,
)
from shards.files import explain_writing, file_lock

TRACKING_FILE = "tracking.json"
DEFAULT_SETTINGS = EvalSettings()
OnError = Callable[[str, UserError], None]
"""Gets the path below the results, and the error, of what cannot be read."""
AnyDocument = TypeVar("AnyDocument", bound=RunDocument)
AnyResult = TypeVar("AnyResult", bound=TargetResult)
RUNS = "*/*/*/*/*/seed*-*"
"""Paths of runs below the results: classes, data set, method, backbone, shots, and seed with hash."""


def _child(name: str) -> property:
    return property(lambda folder: folder.path / name, doc=f"The path of {name}.")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run; reading never creates anything."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    config_file = _child("config.json")
    progress_file = _child("progress.json")
    train_file = _child("train.json")
    checkpoint_file = _child("checkpoint.safetensors")
    validation_file = _child("validation.json")
    state_folder = _child("state")

    def result_file(
        self, target: Target, settings: EvalSettings = DEFAULT_SETTINGS, model: type[TargetResult] = EvalResult
    ) -> Path:
        return self.path / model.FOLDER / target.file(settings)

    def read_config(self) -> RunConfig | None:
        return read_document(self.config_file, RunConfig)

    @cached_property
    def _config(self) -> RunConfig | None:
        return self.read_config()

    @property
    def _hash(self) -> str:
        return self.path.name.rpartition("-")[2]

    def check_config(self, config: RunConfig, *, force: bool = False) -> None:
        """Raise UserError if the folder has another run with the hash of `config`. `force` accepts a broken file."""
        stored = None
        with suppress(UserError) if force else nullcontext():
            stored = self.read_config()
        if stored and stored.identity() != config.identity():
            raise UserError(f"{self.path} has another run, whose hash happens to be the same: name another --results")

    def read_progress(self) -> Progress | None:
        return self._read(self.progress_file, Progress)

    def read_training(self) -> TrainResult | None:
        """Read the result of the finished training; None if there is none.

        `Run.read_training` also checks its configuration, `read_current_training` code and backbone, `read_finished`
        data and files as well.
        """
        training = self._read(self.train_file, TrainResult)
        few_shot = training and training.fewshot
        if few_shot and not self.path.as_posix().endswith(
            f"/{few_shot.shots or 'full'}shot/seed{few_shot.seed}-{self._hash}"
        ):
            drawn = f"{few_shot.shots} shots and seed {few_shot.seed}"
            raise UserError(f"{self.train_file} has few-shot samples of {drawn}: move it away, or repeat with --force")
        return training

    def read_validation(self) -> list[ValidationCount]:
        """Read the counts at the ends of epochs so far, in order; empty without validation."""
        history = self._read(self.validation_file, ValidationHistory)
        return history.counts if history else []

    def read_evaluation(self, target: Target, settings: EvalSettings = DEFAULT_SETTINGS) -> EvalResult | None:
        """Read the result on a target under `settings`, which `EvalSettings.for_run` has fitted to the run."""
        return self.read_result(EvalResult, target, settings)

    def read_result(self, model: type[AnyResult], target: Target, settings: EvalSettings) -> AnyResult | None:
        return self._read_result_file(self.result_file(target, settings, model), model)

    def read_evaluations(self) -> list[EvalResult]:
        """Read every evaluation of the run under any settings, in the order of their file names."""
        return self.read_results(EvalResult)

    def result_files(self, model: type[TargetResult] = EvalResult) -> list[Path]:
        folder = self.path / model.FOLDER
        names = os.listdir(folder) if folder.is_dir() else []
        return [folder / name for name in sorted(names) if name.endswith(".json")]

    def read_results(self, model: type[AnyResult]) -> list[AnyResult]:
        results = (self._read_result_file(file, model) for file in self.result_files(model))
        return [result for result in results if result is not None]

    def _read_result_file(self, path: Path, model: type[AnyResult]) -> AnyResult | None:
        """Read a result. Raises UserError if its target is not in its name."""
        result = self._read(path, model)
        if result and result.file != path.name:
            under = f" under {result.settings.name}" if result.settings.name else ""
            raise UserError(f"{path} holds {result.target!r}{under}: delete it, or restore its name")
        config = self._config
        if result and config and result.precision != (result.settings.precision or config.precision):
            raise UserError(f"{path} was computed in {result.precision}, its run in {config.precision}: delete it")
        return result

    def _read(self, path: Path, model: type[AnyDocument]) -> AnyDocument | None:
        """Read a document of the run. Raises UserError for a broken one or a different configuration."""
        # The folder of a run ends in the hash of its configuration.
        document, expected = read_document(path, model), self._hash
        if document and document.config_hash != expected:
            raise UserError(
                f"{path} is of run {document.config_hash!r}, not {expected}; move it away, or repeat with --force"
            )
        return document

    def clear(self) -> None:
        """Delete the run. `train.json` is deleted first, so that a kill half-way leaves an unfinished run."""
        with explain_writing(self.path):
            self.train_file.unlink(missing_ok=True)
            # Hidden files stay: `.lock` is one, and the caller holds it.
            for entry in self.path.glob("[!.]*"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def forget_progress(self) -> None:
        """Remove what only an unfinished run needs."""
        self.progress_file.unlink(missing_ok=True)
        shutil.rmtree(self.state_folder, ignore_errors=True)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the run. Raises LockHeld, which names the holder."""
        return file_lock(self.path / ".lock", timeout=0)


class OtherContent(UserError):
    """The data of a finished run differs from the data that is packed now."""


def locate_run(folder: Path) -> tuple[RunConfig, Path]:
    """Return the configuration of the run in `folder`, and the results folder that it lies in."""
    config = RunFolder(folder).read_config()
    if config is None:
        hint = "list the runs with `procap ls runs --results FOLDER`"
        raise UsageError(f"{folder} is not the folder of a run (no config.json in it); {hint}")
    folder = folder.resolve()
    if not folder.as_posix().endswith(f"/{config.path}"):
        raise UsageError(
            f"{folder} was moved or changed: its config.json is of {config.path}; move it back to RESULTS/{config.path}"
        )
    # Runs lie as deep below their results as the pattern.
    return config, folder.parents[RUNS.count("/")]


def find_runs(results_root: Path) -> list[RunFolder]:
    """List every run below `results_root`, finished or not, ordered by path."""
    folders = map(RunFolder, sorted(results_root.glob(RUNS)))
    return [folder for folder in folders if folder.config_file.exists() or folder.train_file.exists()]
