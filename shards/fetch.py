"""Download what a URL names: whole, proven where a hash is known, and by one process of a machine at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from shards.errors import DataError
from shards.remote import open_body, persist
from shards.tar import file_sha256
from shards.urls import canonical, shown

PIECE = 2**20
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS)

# Called with the bytes that are there and the bytes of the whole file, where the server says how many.
Progress = Callable[[int, int | None], None]


def download(
    url: str, target: Path, *, sha256: str | None = None, size: int | None = None, on_progress: Progress | None = None
) -> None:
    """Bring what a URL names to `target`, whole or not at all; a target that is there already and right is kept.

    Of several processes of a machine one downloads and the others wait for it. What was received before a failure is
    kept hidden beside the target and the next call goes on from there, if the server can. Raises DataError: not there,
    refused, no space, or other bytes than `sha256` and `size` say, in which case nothing of it is kept.
    """
    url = canonical(url)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _part_of(target) as part:
            if _is_right(target, sha256, size):
                return
            persist(lambda: part.fill(url, size, on_progress))
            part.prove(url, sha256, size)
            part.become(target)
    except OSError as error:
        hint = "free some space or choose another folder"
        raise DataError(f"{target} cannot be written ({error.strerror or error}); {hint}") from error


def _is_right(target: Path, sha256: str | None, size: int | None) -> bool:
    if not target.is_file() or (size is not None and target.stat().st_size != size):
        return False
    return sha256 is None or file_sha256(target) == sha256


class _Part:
    """The hidden file that a download grows in; whoever holds its lock is the one that downloads."""

    def __init__(self, path: Path, stream: BinaryIO, shared: bool) -> None:
        self.path, self.stream, self.shared = path, stream, shared
        self._tag_file = path.with_name(f"{path.name}.tag")

    def fill(self, url: str, size: int | None, on_progress: Progress | None) -> None:
        """Receive the whole file, going on where an earlier attempt on the same version of it stopped."""
        there, tag = self.stream.seek(0, os.SEEK_END), self._tag(url)
        with open_body(url, there if tag else 0, tag) as body:
            done = self._keep(body.start)
            self._set_tag(url, body.tag)
            total = None if body.length is None else done + body.length
            if size is not None and total is not None and total != size:
                raise self._refusal(url, f"it has {total} bytes, not {size}")
            _refuse_without_space(self.path, url, done, total)
            while data := body.read(PIECE):
                done += self.stream.write(data)
                if size is not None and done > size:
                    raise self._refusal(url, f"it has more than {size} bytes")
                if on_progress:
                    on_progress(done, total)
        self.stream.flush()

    def prove(self, url: str, sha256: str | None, size: int | None) -> None:
        """Raise DataError, and keep nothing, when what was received is not what was expected."""
        received = self.path.stat().st_size
        if size is not None and received != size:
            raise self._refusal(url, f"it has {received} bytes, not {size}")
        found = file_sha256(self.path) if sha256 else None
        if found != sha256:
            raise self._refusal(url, f"its SHA-256 is {found}, not {sha256}")

    def become(self, target: Path) -> None:
        self._tag_file.unlink(missing_ok=True)
        os.replace(self.path, target)

    def close(self) -> None:
        """Give the lock back; a part with nothing to go on from leaves no file behind."""
        with suppress(OSError):
            # Unlinked while the lock is held: whoever waits for it sees that this file is no longer the part.
            if is_at(self.stream, self.path) and (not self.shared or self.stream.seek(0, os.SEEK_END) == 0):
                self._tag_file.unlink(missing_ok=True)
                self.path.unlink()
        self.stream.close()

    def _keep(self, start: int) -> int:
        self.stream.seek(start)
        self.stream.truncate()
        return start

    def _refusal(self, url: str, reason: str) -> DataError:
        self._keep(0)
        return DataError(f"{shown(url)} is not the file that is expected: {reason}; nothing of it was kept")

    def _tag(self, url: str) -> str:
        """What the server called the version that this part is of, if the part is of this URL."""
        with suppress(OSError, ValueError):
            of_url, _, tag = self._tag_file.read_text(encoding="utf-8").partition("\n")
            return tag if of_url == hashlib.sha256(url.encode()).hexdigest() else ""
        return ""

    def _set_tag(self, url: str, tag: str) -> None:
        self._tag_file.write_text(f"{hashlib.sha256(url.encode()).hexdigest()}\n{tag}", encoding="utf-8")


@contextmanager
def _part_of(target: Path) -> Iterator[_Part]:
    """The part of `target`, locked: waits while another process or thread of this machine downloads it."""
    # With the machine's name in it: on a disk that machines share without locks, no two ever write into one file.
    node = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:40]
    path = target.with_name(f".{target.name}.{node}.part")
    part = None
    while part is None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        stream = cast(BinaryIO, os.fdopen(descriptor, "r+b"))
        try:
            shared = lock(stream)
            if not shared:
                path = target.with_name(f".{target.name}.{node}-{os.getpid()}-{threading.get_ident()}.part")
                part = _Part(path, cast(BinaryIO, path.open("w+b")), shared)
            elif is_at(stream, path):
                part = _Part(path, stream, shared)
        finally:
            if part is None or part.stream is not stream:
                stream.close()
    try:
        yield part
    finally:
        part.close()


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """One process or thread of a machine at a time; on a disk that is not writable, where none has to wait, any."""
    try:
        stream = file.open("ab")
    except OSError:
        yield
        return
    with stream:
        lock(cast(BinaryIO, stream))
        yield


def lock(stream: BinaryIO) -> bool:
    """Wait for the lock of an open file, which lasts until it is closed; False on a file system without locks."""
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def is_at(stream: BinaryIO, path: Path) -> bool:
    """Whether the open file still is the one of that name: whoever held its lock before may have renamed it."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _refuse_without_space(path: Path, url: str, done: int, total: int | None) -> None:
    free = shutil.disk_usage(path.parent).free
    if total is not None and total - done > free:
        numbers = f"{(total - done) / 2**20:,.0f} MiB to download, {free / 2**20:,.0f} MiB free"
        raise DataError(f"{shown(url)} does not fit into {path.parent}: {numbers}")
