"""Read packed shards from start to end through a webdataset pipeline, from local files or from a URL.

Evaluation reads this way; trainings on local shards use the index over the same tars (`shards.reader`). webdataset
drops the rest of a truncated tar silently, so every shard is read into memory and compared with its size and SHA-256 in
the manifest before its samples are used; one that differs raises UserError with its name.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from shards.manifest import Shard
from shards.remote import CutAnswer, read_file, repeat_cut
from shards.source import MEMBER_EXTENSIONS
from shards.tasks import prefetch, thread_pool
from shards.urls import redact

if TYPE_CHECKING:
    import webdataset

LocatedShards = Sequence[tuple[str, Shard]]
"""Shards with the URL or file that each is read from."""

# Shards that are read while images of an earlier one are used, each in a separate thread.
SHARDS_AHEAD = 2


def make_pipeline(shards: LocatedShards, *, distribute: bool = False) -> webdataset.WebDataset:
    """Make a pipeline of undecoded samples: `__key__`, `__url__`, `cls`, `json`, the image under its extension.

    distribute: give each process of torch.distributed and each worker of a DataLoader its own shards.
    """
    import webdataset

    expected = dict(shards)
    dataset = webdataset.WebDataset(
        list(expected),
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
    dataset.pipeline[opener] = partial(_open_verified, expected)
    return dataset


def stream_images(
    shards: LocatedShards, rows: NDArray[np.void], positions: NDArray[np.int64], order: Sequence[int]
) -> Generator[bytes, None, None]:
    """Yield the encoded images `order` of a selection with index rows [N] and positions [N], each of them once.

    A shard is read whole and verified when its first image is needed, up to `SHARDS_AHEAD` shards ahead. Images stay in
    memory until they are yielded, so images in list order need one shard at a time.
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
            # Shards are read in the order of their first image, so the missing image comes with one of the next shards.
            while (position := int(positions[i])) not in images:
                images |= next(reads).result()
            yield images.pop(position)


def _read_shard(located_shard: tuple[str, Shard], positions: set[int]) -> dict[int, bytes]:
    images = {}
    for sample in make_pipeline([located_shard]):
        # The number in the key, which begins with a letter (`sample_key`).
        position = int(sample["__key__"][1:])
        if position in positions:
            images[position] = next(sample[extension] for extension in MEMBER_EXTENSIONS if extension in sample)
    if len(images) != len(positions):
        raise UserError(f"{redact(located_shard[0])} has no sample for some images of its index")
    return images


def _open_verified(expected: dict[str, Shard], source: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Open shards as webdataset's own stage of the pipeline does, each after it was read and verified."""
    for item in source:
        url = item["url"]
        shard = expected[url]
        yield {"url": url, "stream": io.BytesIO(repeat_cut(partial(_read_verified, url, shard)))}


def _read_verified(url: str, shard: Shard) -> bytes:
    content = read_file(url, shard.size)
    if len(content) != shard.size:
        raise CutAnswer(f"{redact(url)} cannot be used: it has {len(content)} bytes instead of {shard.size}")
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        raise CutAnswer(f"{redact(url)} cannot be used: SHA-256 differs from the manifest")
    return content
