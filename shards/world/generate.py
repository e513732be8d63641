"""Generate small labelled image data sets, so that every command of the benchmark also works offline.

A picture is a function of (family, label, seed, style), a family being a data set: a painter draws what the class name
describes, then the picture is distorted as its family is (style "own"), or not ("plain": the embedded CLIP was trained
on that). Shapes: B images; pictures are uint8 [B, 64, 64, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shards.world.counter_rng import SIZE, Draws, Floats, mix, salt
from shards.world.distance_fields import SHAPES
from shards.world.distortions import LOOKS, Look, distort
from shards.world.scenes import BLOOMS, DIGITS, FORMS, HUES, LETTERS, PAINTERS, PETAL_HUES, paint_shape
from shards.world.textures import TEXTURES
from shards.world.tiles import TILES

Style = Literal["own", "plain"]

# Increment it with every change of a picture, so that data sets packed before are packed again.
VERSION = 1

# Images that are painted at a time: the arrays of a chunk fit into the processor's cache.
CHUNK = 32


def _combine(first: tuple[str, ...], second: tuple[str, ...], glue: str) -> tuple[str, ...]:
    """Return all pairs, ordered so that the base and the novel half of the labels each have every word of both lists.

    So base-to-novel generalisation is to new combinations of words, not to new words.
    """
    pairs = sorted(product(range(len(first)), range(len(second))), key=lambda pair: (sum(pair) % 2, pair))
    return tuple(f"{first[a]}{glue}{second[b]}" for a, b in pairs)


CLASSNAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "coloured-shapes": _combine(HUES, FORMS, " "),
        "textures": tuple(TEXTURES),
        "petals": _combine(PETAL_HUES, BLOOMS, " flower with "),
        "tiles": tuple(TILES),
        "glyphs": (*(f"digit {word}" for word in DIGITS), *(f"letter {letter}" for letter in LETTERS)),
        **dict.fromkeys(("shapes", "shapes-v2", "shapes-sketch", "shapes-hard", "shapes-art"), tuple(SHAPES)),
    }
)
"""The class names of each family in label order; its other facts are in the catalogue (`datasets.toml`)."""


def sample_seed(family: str, split: str, index: int, seed: int = 0) -> int:
    """Return the seed of one image: a non-negative 63-bit number. seed: of other images than those of the data sets."""
    return salt("world", family, split, index, seed) >> 1


def image_draws(family: str, label: int, seeds: NDArray[np.int64], style: Style) -> Draws:
    """Make the random draws of the images of one class."""
    return Draws(mix(seeds.astype(np.uint64) ^ np.uint64(salt("image", family, style, label))))


def paint(
    family: str, labels: NDArray[np.int64], seeds: NDArray[np.int64], style: Style = "own"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Paint pictures uint8 [B, 64, 64, 3] and masks uint8 [B, 64, 64], 255 at pixels of the named object."""
    # The shifted sets have the painter of "shapes" and other distortions.
    painter = PAINTERS.get(family, paint_shape)
    look = Look() if style == "plain" else LOOKS[family]
    labels, seeds = np.asarray(labels, np.int64), np.asarray(seeds, np.int64)
    pictures = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    masks = np.empty((len(labels), SIZE, SIZE), np.uint8)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            draw = image_draws(family, int(label), seeds[chunk], style)
            image, mask = painter(CLASSNAMES[family][label], draw, look)
            # [B, 3, H, W] to [B, H, W, 3].
            pictures[chunk] = _bytes(distort(image, draw, look)).transpose(0, 2, 3, 1)
            masks[chunk] = _bytes(mask)
    return pictures, masks


def _bytes(values: Floats) -> NDArray[np.uint8]:
    # `astype` truncates, so this rounds.
    return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)
