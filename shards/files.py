"""Keep the tars of a split open, and read them at any offset from any thread or process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shards.errors import DataError
from shards.mirror import MirroredShards

# A process may usually have 1,024 files open; ImageNet alone has more shards than that.
MOST_OPEN = 128


class _OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardFiles:
    """The shards of one split; safe to share with forked and spawned processes and with threads.

    There is no lock that a fork could leave locked: single operations on a dict are atomic, and a thread that still
    reads from a file that another one puts away keeps it open by holding it.
    """

    def __init__(self, dataset: str, files: Sequence[Path], mirrored: MirroredShards | None = None) -> None:
        self.dataset, self.mirrored = dataset, mirrored
        self.files = tuple(files)
        self._open: dict[int, _OpenFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "files": self.files, "mirrored": self.mirrored, "_open": {}}

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset` of a shard; raises DataError when they are not there."""
        file = self.files[shard]
        try:
            opened = self._open.get(shard) or self._opened(shard)
            data = os.pread(opened.descriptor, size, offset)
        except OSError as error:
            raise DataError(f"'{self.dataset}': {file} cannot be read ({error.strerror})") from error
        if len(data) != size:
            read = f"{len(data)} of {size} bytes at {offset}"
            raise DataError(f"'{self.dataset}': {file} was cut short while in use ({read})")
        return data

    def _opened(self, shard: int) -> _OpenFile:
        fetched = self.mirrored.open(shard) if self.mirrored else os.open(self.files[shard], os.O_RDONLY | os.O_CLOEXEC)
        opened = self._open.setdefault(shard, _OpenFile(fetched))
        for oldest in list(self._open)[:-MOST_OPEN]:
            self._open.pop(oldest, None)
        return opened
