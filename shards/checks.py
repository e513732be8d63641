"""What proves a packed data set against its manifest: sizes on opening, hashes before a split is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from shards.errors import DataError
from shards.manifest import Manifest, Shard, repack_hint
from shards.stamps import Stamps
from shards.tar import Index, file_sha256

# Splits up to this size are hashed every time they are opened (a fraction of a second); larger ones once per change.
ALWAYS_HASH_BYTES = 256 * 2**20


def check_files(folder: Path, manifest: Manifest, split: str) -> None:
    """Every shard of a split is there and has its size; raises DataError naming the first that is not, with counts."""
    entry = manifest.splits[split]
    for shard in entry.shards:
        problem = size_problem(folder, shard)
        if problem:
            readable = sum(other.count for other in entry.shards if not size_problem(folder, other))
            found = f"{readable} of {entry.count} images readable"
            raise DataError(f"'{manifest.dataset}' {split}: {problem}; {found}; {repack_hint(folder)}")


def size_problem(folder: Path, shard: Shard) -> str | None:
    """What the size of a shard's file alone tells: missing, truncated or longer than packed."""
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
    """Whether a shard's bytes differ from those that were packed."""
    file = folder / shard.file
    try:
        same = file_sha256(file) == shard.sha256
    except OSError as error:
        return f"{file} cannot be read ({error.strerror}; {shard.count} images)"
    return None if same else f"{file} is altered (SHA-256 differs from the manifest; {shard.count} images)"


def check_hashes(folder: Path, manifest: Manifest, split: str) -> None:
    """Every shard of a split has the bytes that were packed; raises DataError naming the first that has not."""
    entry = manifest.splits[split]
    stamps = Stamps(folder) if sum(shard.size for shard in entry.shards) > ALWAYS_HASH_BYTES else None
    for shard in entry.shards:
        if stamps and stamps.vouches(shard):
            continue
        problem = hash_problem(folder, shard)
        if problem:
            total = f"the split has {entry.count} images"
            raise DataError(f"'{manifest.dataset}' {split}: {problem}; {total}; {repack_hint(folder)}")
        if stamps:
            stamps.add(shard)
    if stamps:
        stamps.save()


def read_index(folder: Path, manifest: Manifest, split: str) -> Index:
    """The index of a split, proven against the manifest; raises DataError when it differs."""
    entry, file = manifest.splits[split], folder / split / "index.json"
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != entry.index_sha256:
            raise ValueError("SHA-256 differs from the manifest")
        index = Index.model_validate_json(data)
        if {len(getattr(index, column)) for column in Index.model_fields} != {entry.count}:
            raise ValueError(f"it lists {len(index.label)} images, the manifest {entry.count}")
    except (OSError, ValueError) as error:
        reason = f"{error.error_count()} faults" if isinstance(error, ValidationError) else error
        raise DataError(
            f"'{manifest.dataset}' {split}: {file} is not usable ({reason}); {repack_hint(folder)}"
        ) from None
    return index
