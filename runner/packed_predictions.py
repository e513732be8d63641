"""Pack what was predicted for single images of a target into text, and unpack it."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLAIN, DEFLATED = "bits:", "zlib:"
"""Prefixes of what is stored of single images: bytes in base64, or the same bytes deflated."""


def pack_bits(correct: NDArray[np.bool_]) -> str:
    """Encode whether each of N images was classified correctly, the first in the highest bit of the first byte."""
    return _encode(np.packbits(np.asarray(correct, bool)).tobytes())


def unpack_bits(text: str, total: int) -> NDArray[np.bool_]:
    """Decode the result of `pack_bits` for `total` images. Raises ValueError if it is damaged or of other images."""
    bits = np.unpackbits(np.frombuffer(_decode(text, -(-total // 8)), np.uint8)).astype(bool)
    if bits[total:].any():
        raise ValueError(f"per-image answers are not those of {total} images")
    return bits[:total]


def pack_labels(labels: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int) -> str:
    """Encode true and predicted labels of the wrong ones of N images; a label has as many bytes as the classes need."""
    wrong = labels != predicted
    return _encode(np.stack([labels[wrong], predicted[wrong]]).astype(_label_type(num_classes)).tobytes())


def unpack_labels(text: str, wrong: int, num_classes: int) -> NDArray[np.int64]:
    """Decode the result of `pack_labels` as [2, wrong]. Raises ValueError if it is damaged or of other images."""
    kind = _label_type(num_classes)
    return np.frombuffer(_decode(text, 2 * wrong * kind.itemsize), kind).reshape(2, wrong).astype(np.int64)


def _label_type(num_classes: int) -> np.dtype[Any]:
    return np.min_scalar_type(num_classes - 1).newbyteorder("<")


def _encode(data: bytes) -> str:
    deflated = zlib.compress(data, 9)
    prefix, encoded = (DEFLATED, deflated) if len(deflated) < len(data) else (PLAIN, data)
    return prefix + base64.b64encode(encoded).decode("ascii")


def _decode(text: str, length: int) -> bytes:
    """Decode `length` bytes. Raises ValueError if the text is damaged or of another length."""
    prefix, data = text[: len(PLAIN)], base64.b64decode(text[len(PLAIN) :], validate=True)
    if prefix not in (PLAIN, DEFLATED):
        raise ValueError(f"per-image answers begin with {PLAIN} or {DEFLATED}")
    if prefix == DEFLATED:
        # Limit the output, because a few damaged bytes could expand to gigabytes.
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(data, length + 1)
        except zlib.error as error:
            raise ValueError(f"per-image answers cannot be unpacked ({error})") from error
        if not inflater.eof or inflater.unused_data:
            raise ValueError("per-image answers are cut off or followed by something else")
    if len(data) != length:
        raise ValueError(f"per-image answers have {len(data)} bytes, not {length}")
    return data
