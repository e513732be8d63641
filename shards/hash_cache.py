"""Remember which large shards were hashed, so that a data set of many gigabytes is not read twice before every run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from shards.manifest import Shard, write_text

FILE = "verified.json"


class Stamps:
    """Shards of one data set that had the right SHA-256, with the file-system facts that any write to them changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._facts: dict[str, list[object]] = {}
        # The record only saves time: one that is missing or unreadable means hashing again.
        with suppress(OSError, ValueError):
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self._facts = content if isinstance(content, dict) else {}

    def vouches(self, shard: Shard) -> bool:
        """Whether the shard was hashed and its file has not been written, replaced or moved since."""
        try:
            return self._facts.get(shard.file) == self._now(shard)
        except OSError:
            return False

    def add(self, shard: Shard) -> None:
        self._facts[shard.file] = self._now(shard)

    def save(self) -> None:
        # On a read-only data root every run hashes again, which is slower but as safe.
        with suppress(OSError):
            write_text(self.folder / FILE, json.dumps(self._facts, indent=1, sort_keys=True) + "\n")

    def _now(self, shard: Shard) -> list[object]:
        facts = (self.folder / shard.file).stat()
        return [shard.sha256, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
