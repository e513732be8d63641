"""Find the runs of a results folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.results import RunFolder

NO_RUNS = {"mlartifacts", "mlruns", "collections"}
"""Folders of results that hold no runs."""
DEPTH = 6
"""Parts of a run's path below the results: classes, data set, method, backbone, shots, and seed with hash."""


def locate_run(folder: Path) -> tuple[RunConfig, Path]:
    """Return the configuration of the run in `folder`, and the results folder that it lies in."""
    config = RunFolder(folder).config()
    if config is None:
        hint = "list the runs with `procap ls runs --results FOLDER`"
        raise UsageError(f"{folder} is not the folder of a run (no config.json in it); {hint}")
    folder = folder.resolve()
    if not folder.as_posix().endswith(f"/{config.path}"):
        raise UsageError(
            f"{folder} was moved or changed: its config.json is of {config.path}; put it there, or elsewhere"
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
    return {file.name: file.read_bytes() for file in files if file.exists()}
