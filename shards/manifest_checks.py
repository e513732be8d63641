"""Compare files of a packed data set with its manifest: sizes on opening, hashes and lists before a split is read.

`index.npy` is a plain NumPy array and `paths.txt` has one path per line, both in list order, so that a split of a
million images opens in milliseconds. Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.files import open_regular, read_regular
from shards.hash_cache import HashCache
from shards.manifest import FILE, Manifest, Shard, repack_hint
from shards.mirror import fetch_file, is_mirror
from shards.names import unsafe_path

INDEX_FILE = "index.npy"
PATHS_FILE = "paths.txt"
INDEX = np.dtype([("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""One image: the number of its shard, the bytes it has there and where they begin, and its label."""
# Splits up to this size are hashed every time they are opened (a fraction of a second); larger ones once per change.
ALWAYS_HASH_BYTES = 256 * 2**20
# Bytes: the header of a NumPy file, and the longest path that a file system stores.
HEADER, LONGEST_PATH = 4096, 4096


def check_files(folder: Path, manifest: Manifest, split: str) -> None:
    """Check that every shard of a split exists with its size; those of a mirror are verified when they are opened."""
    if is_mirror(folder.parent):
        return
    entry = manifest.splits[split]
    problems = {shard.file: problem for shard in entry.shards if (problem := shard_problem(folder, shard))}
    if problems:
        problem = next(iter(problems.values()))
        readable = sum(shard.count for shard in entry.shards if shard.file not in problems)
        found = f"{readable} of {entry.count} images readable"
        raise UserError(f"'{manifest.dataset}' {split}: {problem}; {found}; {repack_hint(folder)}")


def shard_problem(folder: Path, shard: Shard, *, hashed: bool = False) -> str | None:
    """Describe a shard that is missing, a link or no regular file, or of another size; hashed: or of other bytes."""
    file, images = folder / shard.file, f"{shard.count} images"
    try:
        with open(open_regular(folder, shard.file), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != shard.size:
                verdict = "truncated" if size < shard.size else "altered"
                return f"{file} is {verdict} ({size} of {shard.size} bytes, {images})"
            if hashed and hashlib.file_digest(stream, "sha256").hexdigest() != shard.sha256:
                return f"{file} is altered (SHA-256 differs from the manifest; {images})"
    except FileNotFoundError:
        return f"{file} is missing ({images})"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror}; {images})"
    return None


def check_split(folder: Path, manifest: Manifest, split: str, labels: NDArray[np.int64], *, hash_shards: bool) -> None:
    """Check that a split has the packed bytes, and that its digest is that of its paths, labels [N] and class names.

    What was found right is remembered for large splits. hash_shards: hash the shards, unless they are of a mirror,
    whose shards are verified when they are opened.
    """
    entry = manifest.splits[split]
    cache = HashCache(folder) if sum(shard.size for shard in entry.shards) > ALWAYS_HASH_BYTES else None
    names = hashlib.sha256(json.dumps(manifest.classnames).encode()).hexdigest()
    list_facts: list[object] = [entry.digest, entry.index_sha256, entry.paths_sha256, names]
    try:
        for shard in entry.shards if hash_shards and not is_mirror(folder.parent) else ():
            if cache and cache.has_shard(shard):
                continue
            if problem := shard_problem(folder, shard, hashed=True):
                total = f"the split has {entry.count} images"
                raise UserError(f"'{manifest.dataset}' {split}: {problem}; {total}; {repack_hint(folder)}")
            if cache:
                cache.add_shard(shard)
        if not (cache and cache.verified.get(split) == list_facts):
            if problem := list_problem(folder, manifest, split, read_paths(folder, manifest, split), labels):
                raise UserError(f"'{manifest.dataset}' {split}: {problem}; {repack_hint(folder)}")
            if cache:
                cache.verified[split] = list_facts
    finally:
        # Save also after an interrupt, because hashing hundreds of gigabytes takes minutes.
        if cache:
            cache.save()


def list_problem(folder: Path, manifest: Manifest, split: str, paths: bytes, labels: NDArray[np.int64]) -> str | None:
    """Describe a split whose paths (one per line), labels [N] or class names are not those of its digest."""
    digest = list_digest(paths, labels, manifest.classnames)
    if digest == manifest.splits[split].digest:
        return None
    what = f"its paths, labels and class names have digest {digest}, not {manifest.splits[split].digest}"
    return f"{folder / FILE} is altered ({what})"


def list_digest(paths: bytes, labels: NDArray[np.int64], classnames: Sequence[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines path<TAB>label<TAB>class name; `paths` is one per line."""
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


def index_bytes(rows: NDArray[np.void]) -> bytes:
    """Encode rows [N] of dtype INDEX as the content of `index.npy`; the same rows always give the same bytes."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def read_index(folder: Path, manifest: Manifest, split: str) -> NDArray[np.void]:
    """Read the index [N] of a split; raises UserError if it differs from the manifest."""
    entry = manifest.splits[split]
    with _usable(folder, manifest, split, INDEX_FILE):
        limit = HEADER + INDEX.itemsize * entry.count
        file = f"{split}/{INDEX_FILE}"
        rows = np.load(io.BytesIO(_read_verified(folder, file, entry.index_sha256, limit)), allow_pickle=False)
        if not isinstance(rows, np.ndarray) or rows.dtype != INDEX or rows.ndim != 1:
            raise ValueError("it is no array of shard, size, offset and label")
        counts, sizes = (np.array([getattr(shard, name) for shard in entry.shards]) for name in ("count", "size"))
        if not np.array_equal(rows["shard"], np.repeat(np.arange(len(counts), dtype=np.uint32), counts)):
            raise ValueError("it names other shards, or more or fewer images of one, than the manifest")
        ends = np.maximum.reduceat(rows["offset"] + rows["size"], np.cumsum(counts) - counts)
        if rows["offset"].max() >= 2**63 or (ends > sizes.astype(np.uint64)).any():
            raise ValueError("it has images beyond the end of their shard")
        if rows["label"].min() < 0 or rows["label"].max() >= len(manifest.classnames):
            raise ValueError(f"it has labels that do not exist; there are {len(manifest.classnames)} classes")
        return rows


def read_paths(folder: Path, manifest: Manifest, split: str) -> bytes:
    """Read the paths of a split, one per line; raises UserError if they differ from the manifest."""
    entry = manifest.splits[split]
    with _usable(folder, manifest, split, PATHS_FILE):
        text = _read_verified(folder, f"{split}/{PATHS_FILE}", entry.paths_sha256, LONGEST_PATH * entry.count)
        lines = text.count(b"\n")
        if lines != entry.count or not text.endswith(b"\n"):
            raise ValueError(f"it lists {lines} images, the manifest {entry.count}")
        # Decoding takes memory, and most lists are ASCII.
        if not text.isascii():
            text.decode()
        return text


def _read_verified(folder: Path, file: str, sha256: str, limit: int) -> bytes:
    fetch_file(folder, file, sha256)
    data = read_regular(folder, file, limit)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("SHA-256 differs from the manifest")
    return data


@contextmanager
def _usable(folder: Path, manifest: Manifest, split: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        file = folder / split / name
        raise UserError(
            f"'{manifest.dataset}' {split}: {file} is not usable ({reason}); {repack_hint(folder)}"
        ) from None
