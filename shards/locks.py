"""Lock files between processes of one machine, with the filelock library (`flock`): a dead process holds none."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS)
"""What file systems without locks answer; some network disks have none."""


class LockHeld(Exception):
    """Another process or thread holds a lock; `owner` is its process and machine, or "unknown"."""

    def __init__(self, file: Path, owner: str) -> None:
        super().__init__(f"{file} is held by another process ({owner})")
        self.owner = owner


@contextmanager
def file_lock(file: Path, *, timeout: float = -1.0, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `file`, which is created with its folder and then names its holder.

    On a file system without locks the block runs unlocked: refusing to work there would help less.
    timeout: seconds to wait for the lock; 0 tries once, -1 waits forever. remove: delete the file at the end.
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
        if error.errno not in NO_LOCKS:
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
