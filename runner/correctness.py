"""Pack which images were classified correctly: one bit each, as a short text in the file of a result.

Shapes: N images of a target, in the order of its list.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

PLAIN, DEFLATED = "bits:", "zlib:"
"""How the text begins: eight images a byte, the first of them the highest bit; or the same bytes compressed."""


def pack_bits(right: NDArray[np.bool_]) -> str:
    """Whether each of N images was right as `bits:` or `zlib:`, whichever is shorter, and base64: N / 6 characters."""
    data = np.packbits(np.asarray(right, bool)).tobytes()
    deflated = zlib.compress(data, 9)
    form, kept = (DEFLATED, deflated) if len(deflated) < len(data) else (PLAIN, data)
    return form + base64.b64encode(kept).decode("ascii")


def unpack_bits(text: str, total: int) -> NDArray[np.bool_]:
    """Whether each of `total` images was right [N]. Raises ValueError where `text` is not that of as many images."""
    form, data = text[: len(PLAIN)], base64.b64decode(text[len(PLAIN) :], validate=True)
    if form not in (PLAIN, DEFLATED):
        raise ValueError(f"per-image answers begin with {PLAIN} or {DEFLATED}")
    length = -(-total // 8)
    if form == DEFLATED:
        data = _inflated(data, length)
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).astype(bool)
    if len(data) != length or bits[total:].any():
        raise ValueError(f"per-image answers are not those of {total} images")
    return bits[:total]


def _inflated(data: bytes, length: int) -> bytes:
    # A damaged file must not make a gigabyte out of a line.
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, length + 1)
    except zlib.error as error:
        raise ValueError(f"per-image answers cannot be unpacked ({error})") from error
    if not inflater.eof or inflater.unused_data:
        raise ValueError("per-image answers are cut off or followed by something else")
    return found
