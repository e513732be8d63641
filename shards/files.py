"""Write local files whole or not at all, lock them between processes, and hash them."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import platform
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from procap.errors import UserError

# A temporary file that is this old (seconds) was left by a process that was killed while it wrote.
ABANDONED_SECONDS = 3600.0
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS)
"""What file systems without locks answer; some network disks have none."""


@contextmanager
def replace_at_end(file: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside `file` that replaces it at the end of the block, not after an error.

    Temporary files that killed writers of `file` left are removed.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            for left in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):
                if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                    left.unlink()


def write_file(file: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8, or nothing; creates its folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_at_end(file) as temporary, temporary.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def open_regular(folder: Path, name: str) -> int:
    """Open a file by its name below `folder` (with forward slashes) for reading, and return its descriptor.

    A link, folder, device or FIFO at the end, and a link on the way, raise OSError; `folder` itself may be a link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in name.split("/"):
        outer = descriptor
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=outer)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a link; put the file itself there") from None
            raise
        finally:
            os.close(outer)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return descriptor


def require_regular(file: Path) -> None:
    """Raise OSError for what exists and is no file: opening a FIFO waits for a writer, reading a device may not end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(file))


def read_file(file: Path) -> bytes:
    """Read a whole file. Raises OSError, also for what `require_regular` refuses."""
    require_regular(file)
    return file.read_bytes()


def read_regular(folder: Path, name: str, limit: int) -> bytes:
    """Read a file that `open_regular` opens. Raises OSError, also when it is longer than `limit` bytes."""
    with open(open_regular(folder, name), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes")
        return stream.read()


def file_sha256(file: Path) -> str:
    """Compute the SHA-256 of a whole file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class LockHeld(UserError):
    """Another process or thread holds a lock; `owner` is its process and machine, or "unknown"."""

    def __init__(self, file: Path, owner: str) -> None:
        super().__init__(f"{file} is held by another process ({owner})")
        self.owner = owner


@contextmanager
def file_lock(file: Path, *, timeout: float = -1.0, remove: bool = False, required: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `file` between processes of one machine; a process that dies releases it.

    The file is created with its folder and then names its holder. On a file system without locks the block runs
    unlocked: a refusal would be worse. timeout: seconds to wait for the lock; 0 tries once, -1 waits
    forever. remove: delete the file at the end. required: False also runs unlocked where the file cannot be created.
    Raises LockHeld when the lock is not free in time, OSError when the file cannot be created.
    """
    from filelock import FileLock, Timeout

    # A soft lock, filelock's fallback, would outlive a killed process.
    lock = FileLock(file, timeout=timeout, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        owner = ""
        with suppress(OSError):
            owner = file.read_text(encoding="utf-8", errors="replace")[:320].strip()
        raise LockHeld(file, owner or "unknown") from None
    except OSError as error:
        if required and error.errno not in NO_LOCKS:
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
