"""Generate small labelled image data sets, so that every command of the benchmark also works offline.

A data set is called a family. A picture is a function of (family, label, seed, style): a painter draws what the class
name describes, then the picture is distorted (`looks`). Style "own" has the distortions of its family, which a method
can learn from few images; style "plain" has none, and the embedded CLIP was trained on it.

Shapes: B images; pictures are uint8 [B, 64, 64, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shards.world.draws import SIZE, Draws, Floats, mix, salt
from shards.world.fields import SHAPES
from shards.world.looks import OWN, PLAIN, distort
from shards.world.scenes import BLOOMS, COLOUR_PAIRS, DIGITS, FORMS, HUES, LETTERS, PAINTERS, PETAL_HUES, paint_shape
from shards.world.textures import TEXTURES
from shards.world.tiles import TILES

Style = Literal["own", "plain"]

# Increment it with every change of a picture, so that data sets packed before are packed again.
VERSION = 1

# Images that are painted at a time: the arrays of a chunk fit into the processor's cache.
CHUNK = 32


@dataclass(frozen=True)
class Family:
    """One generated data set.

    template: the prompt of zero-shot CLIP; has one `{}` and ends in a full stop.
    templates: two prompts without a full stop, which initialise learned tokens.
    splits: images per class of each split; the shifted sets have only "test".
    """

    name: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, str]
    description: str
    splits: Mapping[str, int]


def _combine(first: tuple[str, ...], second: tuple[str, ...], glue: str) -> tuple[str, ...]:
    """Return all pairs, ordered so that the base and the novel half of the labels each have every word of both lists.

    So base-to-novel generalisation is to new combinations of words, not to new words.
    """
    pairs = sorted(product(range(len(first)), range(len(second))), key=lambda pair: (sum(pair) % 2, pair))
    return tuple(f"{first[a]}{glue}{second[b]}" for a, b in pairs)


_PHOTO = ("a photo of a {}.", ("a picture of a {}", "a drawing of a {}"))
_FULL = {"train": 40, "val": 10, "test": 30}
_SHIFTED = {"test": 30}
_CHARACTERS = (*(f"digit {word}" for word in DIGITS), *(f"letter {letter}" for letter in LETTERS))

_FAMILIES = (
    Family(
        "shapes",
        tuple(SHAPES),
        *_PHOTO,
        "twenty flat shapes of any colour; the source of the shifted sets",
        _FULL,
    ),
    Family(
        "coloured-shapes",
        _combine(HUES, FORMS, " "),
        *_PHOTO,
        "eight colours times five shapes",
        _FULL | {"test": 20},
    ),
    Family(
        "textures",
        tuple(TEXTURES),
        "{} texture.",
        ("a photo of a {} texture", "a surface covered with {}"),
        "two-coloured surfaces",
        _FULL,
    ),
    Family(
        "petals",
        _combine(PETAL_HUES, BLOOMS, " flower with "),
        "a photo of a {}, a type of flower.",
        ("a close photo of a {}", "a picture of a {} in a garden"),
        "flowers that differ in colour, petals and center",
        _FULL,
    ),
    Family(
        "tiles",
        tuple(TILES),
        "a centered satellite photo of {}.",
        ("a satellite photo of {}", "an aerial view of {}"),
        "land use seen from above",
        _FULL | {"test": 40},
    ),
    Family(
        "glyphs",
        _CHARACTERS,
        "a photo of the {}.",
        ("a picture of the {}", "the {} in print"),
        "digits and capital letters in eight fonts",
        _FULL,
    ),
    Family("shapes-v2", tuple(SHAPES), *_PHOTO, "shapes drawn afresh by a slightly different hand", _SHIFTED),
    Family("shapes-sketch", tuple(SHAPES), *_PHOTO, "pencil outlines of the shapes", _SHIFTED),
    Family("shapes-hard", tuple(SHAPES), *_PHOTO, "small, half hidden shapes of odd colours among clutter", _SHIFTED),
    Family(
        "shapes-art",
        tuple(SHAPES),
        *_PHOTO,
        "renditions of the shapes: patterns, palettes, a trembling hand",
        _SHIFTED,
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _FAMILIES})


def sample_seed(family: str, split: str, index: int, world_seed: int = 0) -> int:
    """Return the seed of one image: a non-negative 63-bit number, distinct for every family, split and index."""
    return salt("world", family, split, index, world_seed) >> 1


def _draws(family: str, label: int, seeds: NDArray[np.int64], style: Style) -> Draws:
    return Draws(mix(seeds.astype(np.uint64) ^ np.uint64(salt("image", family, style, label))))


def paint(
    family: str, labels: NDArray[np.int64], seeds: NDArray[np.int64], style: Style = "own"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Paint pictures uint8 [B, 64, 64, 3] and masks uint8 [B, 64, 64], 255 at pixels of the named object.

    Picture i depends on (family, labels[i], seeds[i], style) only.
    """
    # The shifted sets have the painter of "shapes" and other distortions.
    painter = PAINTERS.get(family, paint_shape)
    look = PLAIN if style == "plain" else OWN[family]
    labels, seeds = np.asarray(labels, np.int64), np.asarray(seeds, np.int64)
    pictures = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    masks = np.empty((len(labels), SIZE, SIZE), np.uint8)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            draw = _draws(family, int(label), seeds[chunk], style)
            image, mask = painter(FAMILIES[family].classnames[label], draw, look)
            pictures[chunk] = _bytes(distort(image, draw, look)).transpose(0, 2, 3, 1)
            masks[chunk] = _bytes(mask)
    return pictures, masks


def _bytes(values: Floats) -> NDArray[np.uint8]:
    return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)


def render(family: str, labels: NDArray[np.int64], seeds: NDArray[np.int64], style: Style = "own") -> NDArray[np.uint8]:
    """Paint pictures uint8 [B, 64, 64, 3], without their masks."""
    return paint(family, labels, seeds, style)[0]


def caption(family: str, label: int, seed: int) -> str:
    """Describe one plain picture in a sentence: the class, and the colours that the class does not determine."""
    name = FAMILIES[family].classnames[label]
    if family not in ("shapes", "textures", "glyphs"):
        return FAMILIES[family].template.format(name)
    draw = _draws(family, label, np.array([seed], np.int64), "plain")
    first, second = COLOUR_PAIRS[int(draw.integers("pair", len(COLOUR_PAIRS))[0])]
    if family == "textures":
        return f"{name} texture in {first} and {second}."
    return f"a {first} {name} on a {second} background."
