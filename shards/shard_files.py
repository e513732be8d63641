"""Keep the tars of a split open, and read them at any offset from any thread or process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shards.errors import DataError
from shards.files import open_regular
from shards.manifest import Shard, is_mirror
from shards.mirror import mirrored_url, open_shard
from shards.urls import join

# A process may usually have 1,024 files open; ImageNet alone has more shards than that.
MOST_OPEN = 128


class _OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardFiles:
    """The shards of one split of the data set `folder`; safe to share with other processes and with threads.

    There is no lock that a fork could leave locked: single operations on a dict are atomic, and a thread that still
    reads from a file that another one removes keeps it open by holding it.
    fetch: if the data root is a mirror, download a shard when it is first read.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...], *, fetch: bool = False) -> None:
        self.folder, self.shards = folder, shards
        self.fetch = fetch and is_mirror(folder.parent)
        self._open: dict[int, _OpenFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def path(self, number: int) -> Path:
        return self.folder / self.shards[number].file

    def location(self, number: int) -> str:
        """Return where a shard comes from: its URL, or its file if the data root is no mirror."""
        if is_mirror(self.folder.parent):
            return join(mirrored_url(self.folder.parent), f"{self.folder.name}/{self.shards[number].file}")
        return str(self.path(number))

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset` of a shard; raises DataError when they are not there."""
        try:
            file = self._open.get(number) or self._open_file(number)
            data = os.pread(file.descriptor, size, offset)
        except OSError as error:
            raise DataError(f"'{self.folder.name}': {self.path(number)} cannot be read ({error.strerror})") from error
        if len(data) != size:
            found = f"{len(data)} of {size} bytes at {offset}"
            raise DataError(f"'{self.folder.name}': {self.path(number)} was cut short while in use ({found})")
        return data

    def _open_file(self, number: int) -> _OpenFile:
        if self.fetch:
            descriptor = open_shard(self.folder, self.shards[number])
        else:
            descriptor = open_regular(self.folder, self.shards[number].file)
        file = self._open.setdefault(number, _OpenFile(descriptor))
        for oldest in list(self._open)[:-MOST_OPEN]:
            self._open.pop(oldest, None)
        return file
