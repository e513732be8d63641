"""Read and write the index of a split: where each image lies in its shard, its label and its path.

`index.npy` is a plain NumPy array and `paths.txt` has one path per line, both in list order, so that a split of a
million images opens in milliseconds. Both are compared with their SHA-256 in the manifest. `digests.bin` has the digest
of each image, with which single images are compared when they are read: hashing all shards of ImageNet takes minutes.
Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.files import read_regular
from shards.manifest import Manifest, Shard, lines_digest, repack_hint

INDEX_FILE = "index.npy"
PATHS_FILE = "paths.txt"
DIGESTS_FILE = "digests.bin"
# Fixed widths and byte order: the same file and SHA-256 on all machines.
INDEX = np.dtype([("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""One image: the number of its shard, the bytes it has there and where they begin, and its label."""
DIGEST_BYTES = 8
"""Bytes of an image's digest, the first of its SHA-256."""


def read_index(folder: Path, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Read the index [N] of a split; raises UserError if it differs from the manifest."""
    entry = manifest.splits[split]
    with _verified(folder, split, INDEX_FILE, entry.index_sha256) as data:
        rows: NDArray[np.void] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        if rows.dtype != INDEX or rows.shape != (entry.count,):
            raise ValueError(f"it is no index of {entry.count} images")
        is_listed = np.isin(rows["label"], range(len(manifest.classnames))) & (rows["shard"] < len(entry.shards))
        if not is_listed.all():
            raise ValueError("it has labels or shards that the manifest does not list")
    return rows


def read_paths(folder: Path, manifest: Manifest, split: str) -> list[str]:
    """Read the paths [N] of a split; raises UserError if they differ from the manifest."""
    entry = manifest.splits[split]
    with _verified(folder, split, PATHS_FILE, entry.paths_sha256) as data:
        paths = data.decode().split("\n")
        # Behind the last line end there is one more, empty element.
        if len(paths) != entry.count + 1:
            raise ValueError(f"it has no {entry.count} lines")
    return paths[:-1]


@contextmanager
def _verified(folder: Path, split: str, name: str, sha256: str) -> Iterator[bytes]:
    """Yield the content of a file; raises UserError that names it for an error of reading or parsing it."""
    file = folder / split / name
    try:
        data = read_regular(file)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError("SHA-256 differs from the manifest")
        yield data
    except (OSError, ValueError, SyntaxError, TokenError, MemoryError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"'{folder.name}' {split}: {file} is not usable ({reason}); {repack_hint(folder)}") from None


def image_digest(data: bytes) -> bytes:
    """Compute the DIGEST_BYTES bytes that identify the bytes of an image."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def shards_digest(shards: Iterable[Shard]) -> bytes:
    """Compute the DIGEST_BYTES bytes with which `digests.bin` begins: it belongs to these shards and to no others."""
    return image_digest("".join(shard.sha256 for shard in shards).encode())


def list_digest(paths: Iterable[str], labels: NDArray[np.int64], classnames: Sequence[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines path<TAB>label<TAB>class name."""
    ends = [f"\t{label}\t{name}" for label, name in enumerate(classnames)]
    return lines_digest(path + ends[label] for path, label in zip(paths, labels.tolist(), strict=True))
