"""The index of a split: an array with the place and label of each image, and a text file with a path per line.

`index.npy` is a plain NumPy file and `paths.txt` has one path per line, both in list order: a split of a million images
opens in milliseconds, and its paths take no memory until they are needed. Shapes: N images of a split.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

INDEX_FILE = "index.npy"
PATHS_FILE = "paths.txt"

INDEX = np.dtype([("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<i4")])
"""One image: the number of its shard, the bytes it has there and where they begin, and its label."""


def index_bytes(rows: NDArray[np.void]) -> bytes:
    """Encode rows [N] of dtype INDEX as the content of `index.npy`; the same rows always give the same bytes."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return buffer.getvalue()


def index_rows(data: bytes) -> NDArray[np.void]:
    """Decode the rows [N] in the content of an `index.npy`. Raises ValueError for other content."""
    rows = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(rows, np.ndarray) or rows.dtype != INDEX or rows.ndim != 1:
        raise ValueError("it is no array of shard, size, offset and label")
    return rows


class Paths:
    """The paths of a split by position; `load` is called when the first is needed and returns the lines of text."""

    def __init__(self, load: Callable[[], bytes], count: int) -> None:
        self._load, self._count = load, count
        self._lines: tuple[bytes, NDArray[np.int64]] | None = None

    def __getstate__(self) -> dict[str, object]:
        # Do not pickle the loaded lines; another process loads them if it needs a path.
        return {"_load": self._load, "_count": self._count, "_lines": None}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> str:
        if self._lines is None:
            text = self._load()
            ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
            self._lines = text, np.concatenate(([0], ends + 1))
        text, starts = self._lines
        return text[starts[position] : starts[position + 1] - 1].decode()
