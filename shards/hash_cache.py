"""Remember which shards were hashed, so that large data sets are not hashed again before every run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from shards.files import write_file
from shards.manifest import Shard

FILE = "verified.json"


class HashCache:
    """The shards of one data set whose SHA-256 was right, with their file's size and times, to detect later writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: dict[str, list[object]] = {}
        # A missing or unreadable record means hashing again.
        with suppress(OSError, ValueError):
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self._verified = content if isinstance(content, dict) else {}

    def is_verified(self, shard: Shard, stat: os.stat_result | None = None) -> bool:
        """Whether the shard was hashed and its file, or the one of `stat`, has not been written or replaced since."""
        try:
            return self._verified.get(shard.file) == self._facts(shard, stat)
        except OSError:
            return False

    def add(self, shard: Shard, stat: os.stat_result | None = None) -> None:
        self._verified[shard.file] = self._facts(shard, stat)

    def save(self) -> None:
        # On a read-only data root every run hashes again, which is slower but as safe.
        with suppress(OSError):
            write_file(self.folder / FILE, json.dumps(self._verified, indent=1, sort_keys=True) + "\n")

    def _facts(self, shard: Shard, stat: os.stat_result | None) -> list[object]:
        stat = stat or (self.folder / shard.file).stat()
        return [shard.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
