"""Write local files whole or not at all, lock them between processes, and hash them."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from procap.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS)
"""What file systems without locks answer; some network disks have none."""


@contextmanager
def explain_writing(path: Path, advice: str = "name another folder") -> Iterator[None]:
    """Raise UserError if a block that writes `path` raises OSError. advice: what would work, but for a full disk."""
    try:
        yield
    except OSError as error:
        remedy = "free some space" if error.errno in FULL else advice
        raise UserError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def check_writable(folder: Path) -> None:
    """Raise UserError if no file can be written below `folder`, which may not exist yet, before work would be lost."""
    with explain_writing(folder):
        TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())).close()


@contextmanager
def replace_at_end(file: Path) -> Iterator[Path]:
    """Yield the name of a temporary file next to `file`, which replaces it at the end of the block unless it fails.

    Raises OSError for a device or a pipe, which would be replaced too.
    """
    # In the same folder, because a rename is atomic within one file system alone. Several processes or threads may
    # write the same file.
    require_regular(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    except OSError as error:
        # A full disk has no name, and the temporary one says nothing to a reader. With a file name, an error without a
        # number would lose its text.
        if error.errno and error.filename in (None, str(temporary)):
            error.filename = str(file)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_file(file: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8, or nothing; creates its folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_at_end(file) as temporary, temporary.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        # Otherwise the new name can reach the disk before the content: after a power failure the file would be empty.
        os.fsync(stream.fileno())


def require_regular(file: Path, limit: int | None = None) -> Path:
    """Return a regular file of at most `limit` bytes. Raises OSError for others: a pipe can be read without end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    if limit and file.exists() and (size := file.stat().st_size) > limit:
        raise OSError(errno.EFBIG, f"it has {size / 1e9:,.0f} GB, the limit is {limit / 1e9:,.0f} GB", str(file))
    return file


def read_regular(file: Path, limit: int = 10**9) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises OSError for others."""
    return require_regular(file, limit).read_bytes()


def file_sha256(file: Path) -> str:
    """Compute the SHA-256 of a whole file, in hex. Raises OSError for anything but a regular file."""
    with require_regular(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class LockHeld(UserError):
    """Another process or thread holds a lock; the message names its process and machine."""


@contextmanager
def file_lock(file: Path, *, timeout: float = -1.0, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `file` between processes of one machine; a process that dies releases it.

    The file is created with its folder and names its holder. On a file system without locks the block runs unlocked.
    timeout: seconds to wait; 0 tries once, -1 waits forever. remove: delete the file at the end.
    Raises LockHeld when the lock is not free in time, UserError when the file cannot be created.
    """
    from filelock import FileLock, Timeout

    # A soft lock, filelock's fallback, would outlive a killed process.
    lock = FileLock(file, timeout=timeout, thread_local=False, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Where no file can be made, such as in a deleted folder, filelock takes the error for that of a file which its
        # holder removes, and waits forever.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o666))
        lock.acquire()
    except Timeout:
        owner = ""
        with suppress(OSError):
            owner = file.read_text(encoding="utf-8", errors="replace")[:320].strip()
        what = file.parent if file.name == ".lock" else file
        held = f"{what} is held by another process ({owner or 'unknown'}); wait for it or stop it"
        raise LockHeld(held) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            with explain_writing(file.parent):
                raise
    try:
        # The owner is information only: a full disk must not stop the holder here.
        with suppress(OSError):
            file.write_text(f"pid {os.getpid()} on {platform.node()}\n", encoding="utf-8")
        yield
    finally:
        if remove:
            # Safe before the release: filelock's waiters check that their file still has a name and open a new one.
            file.unlink(missing_ok=True)
        lock.release()
