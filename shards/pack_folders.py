"""Manage the folders of a data set while it is packed: one packer at a time, and the old set stays until the end."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from shards.errors import DataError
from shards.locks import file_lock
from shards.manifest import FILE, SAMPLES_FOLDER


def packing_lock(folder: Path) -> AbstractContextManager[None]:
    """Return a lock that makes other processes wait while the data set `folder` is packed."""
    return file_lock(folder.with_name(f".{folder.name}.lock"), remove=True)


def partial_folder(folder: Path) -> Path:
    """Return where a data set is packed before it is complete; hidden, so that it never looks like a data set."""
    return folder.with_name(f".{folder.name}.partial")


def _old_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def check_replaceable(folder: Path) -> None:
    """Raise DataError when something other than a packed data set lies at `folder`: it is never replaced."""
    if folder.exists() and not (folder / FILE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists but holds no packed data set; move it away or choose another --data folder")


def replace_dataset(complete: Path, folder: Path) -> None:
    """Rename a complete data set to its final folder; the old one is deleted only after that.

    Few-shot samples that were imported for the old set are kept.
    """
    old = _old_folder(folder)
    if (folder / SAMPLES_FOLDER).is_dir():
        shutil.copytree(folder / SAMPLES_FOLDER, complete / SAMPLES_FOLDER, dirs_exist_ok=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(complete, folder)
    except BaseException:
        restore_dataset(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def restore_dataset(folder: Path) -> None:
    """Undo a replacement that was stopped between its two renames."""
    old = _old_folder(folder)
    if (old / FILE).exists() and not folder.exists():
        os.rename(old, folder)
