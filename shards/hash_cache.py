"""Remember what was verified, so that large data sets are not hashed again before every run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from shards.files import read_regular, write_file
from shards.manifest import MANIFEST_LIMIT, Shard

VERIFIED_FILE = "verified.json"


class HashCache:
    """What was found right in one data set, by name.

    A shard is remembered with its SHA-256 and its file's size and times, to detect later writes; the list of a split
    with what its digest follows from, which files' times do not change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verified: dict[str, list[object]] = {}
        # A missing or unreadable record means hashing again.
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(read_regular(folder, VERIFIED_FILE, MANIFEST_LIMIT))
            self.verified = content if isinstance(content, dict) else {}
        self._before = dict(self.verified)

    def has_shard(self, shard: Shard, facts: os.stat_result | None = None) -> bool:
        """Whether the shard was hashed and its file, or the one of `facts`, has not been written or replaced since."""
        try:
            return self.verified.get(shard.file) == self._entry(shard, facts)
        except OSError:
            return False

    def add_shard(self, shard: Shard, facts: os.stat_result | None = None) -> None:
        self.verified[shard.file] = self._entry(shard, facts)

    def save(self) -> None:
        """Write the record if something was added."""
        # On a read-only data root every run hashes again, which is slower but as safe.
        with suppress(OSError):
            if self.verified != self._before:
                write_file(self.folder / VERIFIED_FILE, json.dumps(self.verified, indent=1, sort_keys=True) + "\n")

    def _entry(self, shard: Shard, facts: os.stat_result | None) -> list[object]:
        facts = facts or (self.folder / shard.file).stat()
        return [shard.sha256, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
