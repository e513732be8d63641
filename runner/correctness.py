"""Pack which images were classified correctly: one bit per image, as a short text in a result file.

Shapes: N images of a target, in the order of its list.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

PLAIN, DEFLATED = "bits:", "zlib:"
"""Prefixes of the text: eight images per byte, with the first in the highest bit; or the same bytes compressed."""


def pack_bits(right: NDArray[np.bool_]) -> str:
    """Encode whether each of N images was right as `bits:` or `zlib:` and base64, whichever is shorter: N / 6 bytes."""
    data = np.packbits(np.asarray(right, bool)).tobytes()
    deflated = zlib.compress(data, 9)
    prefix, encoded = (DEFLATED, deflated) if len(deflated) < len(data) else (PLAIN, data)
    return prefix + base64.b64encode(encoded).decode("ascii")


def unpack_bits(text: str, total: int) -> NDArray[np.bool_]:
    """Decode whether each of `total` images was right [N]. Raises ValueError if `text` has another number of images."""
    prefix, data = text[: len(PLAIN)], base64.b64decode(text[len(PLAIN) :], validate=True)
    if prefix not in (PLAIN, DEFLATED):
        raise ValueError(f"per-image answers begin with {PLAIN} or {DEFLATED}")
    length = -(-total // 8)
    if prefix == DEFLATED:
        # Limit the output, because a few damaged bytes could expand to gigabytes.
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(data, length + 1)
        except zlib.error as error:
            raise ValueError(f"per-image answers cannot be unpacked ({error})") from error
        if not inflater.eof or inflater.unused_data:
            raise ValueError("per-image answers are cut off or followed by something else")
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).astype(bool)
    if len(data) != length or bits[total:].any():
        raise ValueError(f"per-image answers are not those of {total} images")
    return bits[:total]
