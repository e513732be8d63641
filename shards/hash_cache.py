"""Remember what was verified, so that large data sets are not hashed again before every run."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from shards.files import read_regular, write_file
from shards.manifest import MANIFEST_LIMIT, Manifest, Shard

FILE = "verified.json"


class HashCache:
    """What was found right in one data set.

    A shard is remembered with its SHA-256 and its file's size and times, to detect later writes; the list of a split
    with what its digest follows from, which files' times do not change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: dict[str, list[object]] = {}
        self._changed = False
        # A missing or unreadable record means hashing again.
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(read_regular(folder, FILE, MANIFEST_LIMIT))
            self._verified = content if isinstance(content, dict) else {}

    def is_verified(self, shard: Shard, facts: os.stat_result | None = None) -> bool:
        """Whether the shard was hashed and its file, or the one of `facts`, has not been written or replaced since."""
        try:
            return self._verified.get(shard.file) == self._entry(shard, facts)
        except OSError:
            return False

    def add(self, shard: Shard, facts: os.stat_result | None = None) -> None:
        self._add(shard.file, self._entry(shard, facts))

    def has_list(self, manifest: Manifest, split: str) -> bool:
        """Whether the digest of a split was compared with its paths, labels and class names."""
        return self._verified.get(split) == _list_entry(manifest, split)

    def add_list(self, manifest: Manifest, split: str) -> None:
        self._add(split, _list_entry(manifest, split))

    def save(self) -> None:
        """Write the record if something was added."""
        # On a read-only data root every run hashes again, which is slower but as safe.
        with suppress(OSError):
            if self._changed:
                write_file(self.folder / FILE, json.dumps(self._verified, indent=1, sort_keys=True) + "\n")

    def _add(self, name: str, entry: list[object]) -> None:
        self._verified[name], self._changed = entry, True

    def _entry(self, shard: Shard, facts: os.stat_result | None) -> list[object]:
        facts = facts or (self.folder / shard.file).stat()
        return [shard.sha256, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _list_entry(manifest: Manifest, split: str) -> list[object]:
    entry = manifest.splits[split]
    names = hashlib.sha256(json.dumps(manifest.classnames).encode()).hexdigest()
    return [entry.digest, entry.index_sha256, entry.paths_sha256, names]
