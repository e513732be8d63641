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
from shards.files import read_regular
from shards.manifest import Manifest, repack_hint

INDEX_FILE = "index.npy"
PATHS_FILE = "paths.txt"
# Fixed widths and byte order: the same file and SHA-256 on all machines.
INDEX = np.dtype([("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""One image: the number of its shard, the bytes it has there and where they begin, and its label."""


def index_bytes(rows: NDArray[np.void]) -> bytes:
    """Encode rows [N] of dtype INDEX as the content of `index.npy`; the same rows always give the same bytes."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def read_index(folder: Path, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Read the index [N] of a split; raises UserError if it differs from the manifest."""
    data = _read_verified(folder, split, INDEX_FILE, manifest.splits[split].index_sha256)
    rows: NDArray[np.void] = np.load(io.BytesIO(data), allow_pickle=False)
    return rows


def read_paths(folder: Path, manifest: Manifest, split: str) -> bytes:
    """Read the paths of a split, one per line; raises UserError if they differ from the manifest."""
    return _read_verified(folder, split, PATHS_FILE, manifest.splits[split].paths_sha256)


def _read_verified(folder: Path, split: str, name: str, sha256: str) -> bytes:
    file, reason = folder / split / name, "SHA-256 differs from the manifest"
    try:
        data = read_regular(file)
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(f"'{folder.name}' {split}: {file} is not usable ({reason}); {repack_hint(folder)}")


def list_digest(paths: bytes, labels: NDArray[np.int64], classnames: Sequence[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines path<TAB>label<TAB>class name; `paths` has one per line."""
    ends = [f"\t{label}\t{name}".encode() for label, name in enumerate(classnames)]
    # Not strict: behind the last line end `split` gives one more, empty path.
    lines = (path + ends[label] for path, label in zip(paths.split(b"\n"), labels.tolist(), strict=False))
    return hashlib.sha256(b"\n".join(lines)).hexdigest()[:16]
