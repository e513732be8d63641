"""Read and write the index of a split: where each image lies in its shard, its label and its path.

`index.npy` is a plain NumPy array and `paths.txt` has one path per line, both in list order, so that a split of a
million images opens in milliseconds. Both are compared with their SHA-256 in the manifest. Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.files import read_file
from shards.manifest import Manifest, SplitEntry, repack_hint
from shards.names import unsafe_path

INDEX_FILE = "index.npy"
PATHS_FILE = "paths.txt"
INDEX = np.dtype([("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""One image: the number of its shard, the bytes it has there and where they begin, and its label."""
# Bytes: the header of a NumPy file, and the longest path that a file system stores.
HEADER, LONGEST_PATH = 4096, 4096


def index_limit(entry: SplitEntry) -> int:
    """Return the largest size of `index.npy` in bytes."""
    return HEADER + INDEX.itemsize * entry.count


def paths_limit(entry: SplitEntry) -> int:
    """Return the largest size of `paths.txt` in bytes."""
    return LONGEST_PATH * entry.count


def index_bytes(rows: NDArray[np.void]) -> bytes:
    """Encode rows [N] of dtype INDEX as the content of `index.npy`; the same rows always give the same bytes."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def read_index(folder: Path, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Read the index [N] of a split; raises UserError if it differs from the manifest."""
    entry, file = manifest.splits[split], folder / split / INDEX_FILE
    try:
        data = _read_verified(file, entry.index_sha256, index_limit(entry))
        rows = np.load(io.BytesIO(data), allow_pickle=False)
        _check_rows(rows, entry, len(manifest.classnames))
    # NumPy raises EOFError for an empty file.
    except (OSError, ValueError, EOFError) as error:
        raise _unusable(file, error, folder) from None
    return rows


def _check_rows(rows: NDArray[np.void], entry: SplitEntry, classes: int) -> None:
    """Raise ValueError for an index that does not fit the shards of its manifest."""
    if not isinstance(rows, np.ndarray) or rows.dtype != INDEX or rows.ndim != 1:
        raise ValueError("it is no array of shard, size, offset and label")
    counts = np.array([shard.count for shard in entry.shards])
    sizes = np.array([shard.size for shard in entry.shards], np.uint64)
    if not np.array_equal(rows["shard"], np.repeat(np.arange(len(counts), dtype=np.uint32), counts)):
        raise ValueError("it names different shards, or more or fewer images of one, than the manifest")
    ends = np.maximum.reduceat(rows["offset"] + rows["size"], np.cumsum(counts) - counts)
    if rows["offset"].max() >= 2**63 or (ends > sizes).any():
        raise ValueError("it has images beyond the end of their shard")
    if rows["label"].min() < 0 or rows["label"].max() >= classes:
        raise ValueError(f"it has labels that do not exist; there are {classes} classes")


def read_paths(folder: Path, manifest: Manifest, split: str) -> bytes:
    """Read the paths of a split, one per line; raises UserError if they differ from the manifest."""
    entry, file = manifest.splits[split], folder / split / PATHS_FILE
    try:
        text = _read_verified(file, entry.paths_sha256, paths_limit(entry))
        lines = text.count(b"\n")
        if lines != entry.count or not text.endswith(b"\n"):
            raise ValueError(f"it lists {lines} images, the manifest {entry.count}")
        # Decoding takes memory, and most lists are ASCII.
        if not text.isascii():
            text.decode()
    except (OSError, ValueError) as error:
        raise _unusable(file, error, folder) from None
    return text


def _read_verified(file: Path, sha256: str, limit: int) -> bytes:
    data = read_file(file, limit)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("SHA-256 differs from the manifest")
    return data


def _unusable(file: Path, error: Exception, folder: Path) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"'{folder.name}' {file.parent.name}: {file} is not usable ({reason}); {repack_hint(folder)}")


def list_digest(paths: bytes, labels: NDArray[np.int64], classnames: Sequence[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines path<TAB>label<TAB>class name; `paths` has one per line."""
    ends = [f"\t{label}\t{name}".encode() for label, name in enumerate(classnames)]
    lines = (path + ends[label] for path, label in zip(paths.split(b"\n"), labels.tolist(), strict=False))
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]


def path_problem(paths: bytes) -> str | None:
    """Describe the first path of a list (one per line) that is no plain path, or there twice."""
    earlier: set[bytes] = set()
    for number, path in enumerate(paths.split(b"\n")[:-1], 1):
        reason = "is listed twice" if path in earlier else unsafe_path(path.decode())
        if reason:
            return f"image {number} of {PATHS_FILE}, {path.decode()!r:.200}, {reason}"
        earlier.add(path)
    return None
