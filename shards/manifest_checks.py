"""Compare files of a packed data set with its manifest: sizes on opening, hashes before a split is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shards.errors import DataError
from shards.files import file_sha256
from shards.hash_cache import HashCache
from shards.index import INDEX_FILE, PATHS_FILE, index_rows
from shards.manifest import Manifest, Shard, repack_hint
from shards.mirror import fetch_file, is_mirror

# Splits up to this size are hashed every time they are opened (a fraction of a second); larger ones once per change.
ALWAYS_HASH_BYTES = 256 * 2**20


def check_files(folder: Path, manifest: Manifest, split: str) -> None:
    """Check that every shard of a split exists with its size; those of a mirror are verified when they are opened."""
    if is_mirror(folder.parent):
        return
    entry = manifest.splits[split]
    for shard in entry.shards:
        if problem := size_problem(folder, shard):
            readable = sum(other.count for other in entry.shards if not size_problem(folder, other))
            found = f"{readable} of {entry.count} images readable"
            raise DataError(f"'{manifest.dataset}' {split}: {problem}; {found}; {repack_hint(folder)}")


def size_problem(folder: Path, shard: Shard) -> str | None:
    """Describe a shard whose file is missing, truncated or longer than packed; looks at the size only."""
    file = folder / shard.file
    try:
        size = file.stat().st_size
    except OSError:
        return f"{file} is missing ({shard.count} images)"
    if size == shard.size:
        return None
    verdict = "truncated" if size < shard.size else "altered"
    return f"{file} is {verdict} ({size} of {shard.size} bytes, {shard.count} images)"


def hash_problem(folder: Path, shard: Shard) -> str | None:
    """Describe a shard whose bytes differ from those that were packed; None if they are equal."""
    file = folder / shard.file
    try:
        same = file_sha256(file) == shard.sha256
    except OSError as error:
        return f"{file} cannot be read ({error.strerror}; {shard.count} images)"
    return None if same else f"{file} is altered (SHA-256 differs from the manifest; {shard.count} images)"


def check_hashes(folder: Path, manifest: Manifest, split: str) -> None:
    """Check that every shard of a split has the packed bytes; those of a mirror are verified when they are opened."""
    if is_mirror(folder.parent):
        return
    entry = manifest.splits[split]
    cache = HashCache(folder) if sum(shard.size for shard in entry.shards) > ALWAYS_HASH_BYTES else None
    try:
        for shard in entry.shards:
            if cache and cache.is_verified(shard):
                continue
            if problem := hash_problem(folder, shard):
                total = f"the split has {entry.count} images"
                raise DataError(f"'{manifest.dataset}' {split}: {problem}; {total}; {repack_hint(folder)}")
            if cache:
                cache.add(shard)
    finally:
        # Save also after an interrupt, because hashing hundreds of gigabytes takes minutes.
        if cache:
            cache.save()


def read_index(folder: Path, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Read the index [N] of a split; raises DataError if it differs from the manifest."""
    entry = manifest.splits[split]
    data = _read_verified(folder, manifest, split, INDEX_FILE, entry.index_sha256)
    try:
        rows = index_rows(data)
        if len(rows) != entry.count:
            raise ValueError(f"it lists {len(rows)} images, the manifest {entry.count}")
        if rows["shard"].max() >= len(entry.shards) or rows["label"].min() < 0:
            raise ValueError("it names shards or labels that do not exist")
        if rows["label"].max() >= len(manifest.classnames):
            raise ValueError(f"it has label {rows['label'].max()} of {len(manifest.classnames)} classes")
    except ValueError as error:
        raise _unusable(folder, manifest, split, INDEX_FILE, error) from None
    return rows


def read_paths(folder: Path, manifest: Manifest, split: str) -> bytes:
    """Read the paths of a split, one per line; raises DataError if they differ from the manifest."""
    entry = manifest.splits[split]
    text = _read_verified(folder, manifest, split, PATHS_FILE, entry.paths_sha256)
    lines = text.count(b"\n")
    if lines != entry.count or not text.endswith(b"\n"):
        error = ValueError(f"it lists {lines} images, the manifest {entry.count}")
        raise _unusable(folder, manifest, split, PATHS_FILE, error)
    return text


def _read_verified(folder: Path, manifest: Manifest, split: str, name: str, sha256: str) -> bytes:
    fetch_file(folder, f"{split}/{name}", sha256)
    try:
        data = (folder / split / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("SHA-256 differs from the manifest")
    except (OSError, ValueError) as error:
        raise _unusable(folder, manifest, split, name, error) from None
    return data


def _unusable(folder: Path, manifest: Manifest, split: str, name: str, error: Exception) -> DataError:
    file = folder / split / name
    return DataError(f"'{manifest.dataset}' {split}: {file} is not usable ({error}); {repack_hint(folder)}")
