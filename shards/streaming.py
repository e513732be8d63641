"""Read packed shards from start to end through a webdataset pipeline, from local files or from a URL.

Evaluation reads this way; few-shot samples use the index over the same tars (`shards.reader`). webdataset drops the
rest of a truncated tar silently, so every shard is compared with its size and SHA-256 in the manifest while it is read;
one that differs raises UserError with its name.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.manifest import Shard
from shards.pools import prefetch, thread_pool
from shards.remote import open_stream, translate_errors
from shards.tar import IMAGES, SAMPLE_KEY
from shards.urls import redact

if TYPE_CHECKING:
    import webdataset

Locations = Sequence[tuple[str, Shard]]
"""Shards with the URL or file that each is read from."""

# Shards that are read while images of an earlier one are used, each in a separate thread.
SHARDS_AHEAD = 2
BLOCK = 2**20


class ShardStreamError(UserError):
    """A shard that is cut short, altered or unreadable; its text survives webdataset, which appends to `args`."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


def make_pipeline(shards: Locations, *, distribute: bool = False) -> webdataset.WebDataset:
    """Make a pipeline of undecoded samples: `__key__`, `__url__`, `cls`, `json`, the image under its extension.

    distribute: give each process of torch.distributed and each worker of a DataLoader its own shards.
    """
    import webdataset

    expected = dict(shards)
    dataset = webdataset.WebDataset(
        list(expected),
        handler=_raise_user_error,
        shardshuffle=False,
        nodesplitter=webdataset.split_by_node if distribute else None,
        workersplitter=webdataset.split_by_worker if distribute else None,
        # With more workers than shards some workers have nothing to read, which is no error.
        empty_check=False,
        # Without a seed webdataset draws from Python's global generator.
        seed=0,
    )
    # Replace webdataset's own opener: it starts curl for http:// and does not verify what it reads.
    opener = next(i for i, stage in enumerate(dataset.pipeline) if isinstance(stage, webdataset.cache.StreamingOpen))
    dataset.pipeline[opener] = _OpenVerified(expected)
    return dataset


def stream_images(
    shards: Locations, rows: NDArray[np.void], positions: NDArray[np.int64], order: Sequence[int]
) -> Generator[bytes, None, None]:
    """Yield the encoded images `order` of a selection with index rows [N] and positions [N], each of them once.

    A shard is read whole into memory when its first image is needed, and its images are used after it was verified; up
    to `SHARDS_AHEAD` later shards are read meanwhile. Images stay in memory until they are yielded, so images in list
    order need one shard at a time.
    """
    positions_by_shard: dict[int, set[int]] = {}
    for i in order:
        positions_by_shard.setdefault(int(rows[i]["shard"]), set()).add(int(positions[i]))
    images: dict[int, bytes] = {}
    with thread_pool(SHARDS_AHEAD, "shards") as pool:
        assert pool

        def read(item: tuple[int, set[int]]) -> Future[dict[int, bytes]]:
            return pool.submit(_read_shard, shards[item[0]], item[1])

        reads = prefetch(positions_by_shard.items(), read, SHARDS_AHEAD)
        for i in order:
            while (position := int(positions[i])) not in images:
                images |= next(reads).result()
            yield images.pop(position)


def _read_shard(shard: tuple[str, Shard], positions: set[int]) -> dict[int, bytes]:
    images = {}
    for sample in make_pipeline([shard]):
        key = sample["__key__"]
        position = int(key[1:]) if SAMPLE_KEY.fullmatch(key) else -1
        image = next((sample[extension] for extension in IMAGES if extension in sample), None)
        if position in positions and image is not None:
            images[position] = image
    if len(images) != len(positions):
        raise ShardStreamError(f"{redact(shard[0])} lacks images of its index")
    return images


class _OpenVerified:
    """Pipeline stage: open each shard as a stream that is compared with the manifest at its end."""

    def __init__(self, expected: dict[str, Shard]) -> None:
        self.expected = expected

    def __call__(self, source: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in source:
            url = item["url"]
            with open_stream(url) as raw:
                stream = io.BufferedReader(_VerifiedStream(raw, url, self.expected[url]), BLOCK)
                yield {"url": url, "stream": stream}
                # The tar reader stops at the end-of-archive mark; read the rest to reach the check.
                while stream.read(BLOCK):
                    pass


class _VerifiedStream(io.RawIOBase):
    """A shard's bytes; raises ShardStreamError at their end, or beyond it, unless they are those of the manifest."""

    def __init__(self, raw: BinaryIO, url: str, expected: Shard) -> None:
        self._raw, self._url, self._expected = raw, url, expected
        self._hash, self._size = hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        with translate_errors(self._url):
            data = self._raw.read(len(buffer))
        # Shards begin with a member's name, "s000...". tarfile would also unpack a compressed archive, of any size.
        if not self._size and not data.startswith(b"s"):
            self._refuse("it does not begin as a shard does")
        self._hash.update(data)
        self._size += len(data)
        if self._size > self._expected.size:
            self._refuse(f"it has more than {self._expected.size} bytes")
        if not data and self._size < self._expected.size:
            self._refuse(f"it is truncated ({self._size} of {self._expected.size} bytes)")
        if not data and self._hash.hexdigest() != self._expected.sha256:
            self._refuse("SHA-256 differs from the manifest")
        buffer[: len(data)] = data
        return len(data)

    def _refuse(self, reason: str) -> None:
        raise ShardStreamError(f"{redact(self._url)} cannot be used: {reason} ({self._expected.count} images)")


def _raise_user_error(error: Exception) -> bool:
    """Raise an error of a pipeline stage as it is if it is a UserError, else as one."""
    if isinstance(error, UserError):
        raise error
    # webdataset appends the name of the shard to the arguments of an error.
    shard = next((redact(argument) for argument in error.args[1:] if isinstance(argument, str)), "a shard")
    reason = error.args[0] if error.args else type(error).__name__
    raise ShardStreamError(f"{shard} is not a readable shard ({reason})")
