"""The place of a data set while it is packed: one packer at a time, and the old set until the new one is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.errors import DataError
from shards.locks import file_lock
from shards.manifest import FILE, SAMPLES_FOLDER


@contextmanager
def only_packer(folder: Path) -> Iterator[None]:
    """Wait until no other process packs the data set `folder`, then keep others waiting."""
    with file_lock(folder.with_name(f".{folder.name}.lock"), remove=True):
        yield


def partial_of(folder: Path) -> Path:
    """Where a data set is packed before it is complete; hidden, so that it never looks like one."""
    return folder.with_name(f".{folder.name}.partial")


def displaced(folder: Path) -> Path:
    """Where the old set lies for a moment while the new one takes its place."""
    return folder.with_name(f".{folder.name}.old")


def refuse_foreign(folder: Path) -> None:
    """Raises DataError when something lies at `folder` that is no packed data set: it is never replaced."""
    if folder.exists() and not (folder / FILE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists but holds no packed data set; move it away or choose another --data folder")


def swap(complete: Path, folder: Path) -> None:
    """Put a complete data set in its place; the old one goes only when the new one is there.

    Few-shot samples that were imported for the old set are kept.
    """
    old = displaced(folder)
    if (folder / SAMPLES_FOLDER).is_dir():
        shutil.copytree(folder / SAMPLES_FOLDER, complete / SAMPLES_FOLDER, dirs_exist_ok=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(complete, folder)
    except BaseException:
        put_back(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo a swap that was stopped between its two renames."""
    old = displaced(folder)
    if (old / FILE).exists() and not folder.exists():
        os.rename(old, folder)
