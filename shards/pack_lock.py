"""The place of a data set while it is packed: one packer at a time, and the old set until the new one is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.errors import DataError
from shards.manifest import FILE

PICKS = "picks"


@contextmanager
def only_packer(folder: Path) -> Iterator[None]:
    """Wait until no other process packs the data set `folder`; the lock dies with its process."""
    descriptor = _locked(folder.with_name(f".{folder.name}.lock"))
    try:
        yield
    finally:
        # Removed while it is still held: whoever waits for it sees that it is gone and makes a new one.
        folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)
        os.close(descriptor)


def _locked(file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks; a lone packer is the usual case there.
            if error.errno in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS):
                return descriptor
            os.close(descriptor)
            raise
        except BaseException:
            os.close(descriptor)
            raise
        try:
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


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

    Picks that were imported for the old set are the user's, not ours to lose: they stay.
    """
    old = displaced(folder)
    if (folder / PICKS).is_dir():
        shutil.copytree(folder / PICKS, complete / PICKS, dirs_exist_ok=True)
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
