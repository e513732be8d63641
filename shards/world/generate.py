"""Generate small labelled image data sets, so that every command of the benchmark also works offline.

A data set is called a family. A picture depends only on its family, label, seed and style: "own" has the family's
distortions (`looks.OWN`), "plain" has none.

Shapes: B images; pictures are uint8 [B, 64, 64, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shards.world.draws import SIZE, Draws, Floats, mix, salt
from shards.world.fields import SHAPES
from shards.world.looks import OWN, PLAIN, Look, finish
from shards.world.scenes import (
    BLOOMS,
    DIGITS,
    FORMS,
    HUES,
    LETTERS,
    PAIRS,
    PETAL_HUES,
    Picture,
    paint_coloured_shape,
    paint_flower,
    paint_glyph,
    paint_shape,
    paint_texture,
)
from shards.world.textures import TEXTURES
from shards.world.tiles import TILES, paint_tile

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
    splits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"train": 40, "val": 10, "test": 30}))


def _checkered(first: tuple[str, ...], second: tuple[str, ...], glue: str) -> tuple[str, ...]:
    """Return all pairs, ordered so that base and novel half of the labels each hold every word of both lists."""
    pairs = list(product(range(len(first)), range(len(second))))
    ordered = sorted(pairs, key=lambda p: (sum(p) % 2, p))
    return tuple(f"{first[a]}{glue}{second[b]}" for a, b in ordered)


def _few(test: int, train: int = 40, val: int = 10) -> Mapping[str, int]:
    return MappingProxyType({"train": train, "val": val, "test": test})


def _shifted(name: str, description: str) -> Family:
    return Family(
        name=name,
        classnames=tuple(SHAPES),
        template="a photo of a {}.",
        templates=("a picture of a {}", "a drawing of a {}"),
        description=description,
        splits=MappingProxyType({"test": 30}),
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family(
                "shapes",
                tuple(SHAPES),
                "a photo of a {}.",
                ("a picture of a {}", "a drawing of a {}"),
                "twenty flat shapes of any colour; the source of the shifted sets",
            ),
            Family(
                "coloured-shapes",
                _checkered(HUES, FORMS, " "),
                "a photo of a {}.",
                ("a picture of a {}", "a drawing of a {}"),
                "eight colours times five shapes",
                _few(test=20),
            ),
            Family(
                "textures",
                tuple(TEXTURES),
                "{} texture.",
                ("a photo of a {} texture", "a surface covered with {}"),
                "two-coloured surfaces",
            ),
            Family(
                "petals",
                _checkered(PETAL_HUES, BLOOMS, " flower with "),
                "a photo of a {}, a type of flower.",
                ("a close photo of a {}", "a picture of a {} in a garden"),
                "flowers that differ in colour, petals and center",
            ),
            Family(
                "tiles",
                tuple(TILES),
                "a centered satellite photo of {}.",
                ("a satellite photo of {}", "an aerial view of {}"),
                "land use seen from above",
                _few(test=40),
            ),
            Family(
                "glyphs",
                (*(f"digit {d}" for d in DIGITS), *(f"letter {letter}" for letter in LETTERS)),
                "a photo of the {}.",
                ("a picture of the {}", "the {} in print"),
                "digits and capital letters in eight fonts",
            ),
            _shifted("shapes-v2", "shapes drawn afresh by a slightly different hand"),
            _shifted("shapes-sketch", "pencil outlines of the shapes"),
            _shifted("shapes-hard", "small, half hidden shapes of odd colours among clutter"),
            _shifted("shapes-art", "renditions of the shapes: patterns, palettes, a trembling hand"),
        )
    }
)


def sample_seed(family: str, split: str, index: int, world_seed: int = 0) -> int:
    """Return the seed of one image: a non-negative 63-bit number, distinct for every family, split and index."""
    return salt("world", family, split, index, world_seed) >> 1


def _keys(family: str, label: int, seeds: NDArray[np.int64], style: Style) -> NDArray[np.uint64]:
    return mix(seeds.astype(np.uint64) ^ np.uint64(salt("image", family, style, label)))


def _paint(family: str, kind: str, draw: Draws, look: Look) -> Picture:
    if family.startswith("shapes"):
        return paint_shape(kind, draw, look)
    painters = {
        "coloured-shapes": paint_coloured_shape,
        "textures": paint_texture,
        "petals": paint_flower,
        "tiles": paint_tile,
        "glyphs": paint_glyph,
    }
    return painters[family](kind, draw, look)


def paint(
    family: str, labels: NDArray[np.int64], seeds: NDArray[np.int64], style: Style = "own", look: Look | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Paint pictures uint8 [B, 64, 64, 3] and masks uint8 [B, 64, 64], 255 at pixels of the named object.

    look: used instead of the look of `style`.
    """
    names = FAMILIES[family].classnames
    look = look or (PLAIN if style == "plain" else OWN[family])
    labels, seeds = np.asarray(labels, np.int64), np.asarray(seeds, np.int64)
    pictures = np.empty((len(labels), SIZE, SIZE, 3), np.uint8)
    masks = np.empty((len(labels), SIZE, SIZE), np.uint8)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            draw = Draws(_keys(family, int(label), seeds[chunk], style))
            image, mask = _paint(family, names[label], draw, look)
            pictures[chunk] = _bytes(finish(image, draw, look)).transpose(0, 2, 3, 1)
            masks[chunk] = _bytes(mask)
    return pictures, masks


def _bytes(values: Floats) -> NDArray[np.uint8]:
    return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)


def render(family: str, labels: NDArray[np.int64], seeds: NDArray[np.int64], style: Style = "own") -> NDArray[np.uint8]:
    """Paint pictures uint8 [B, 64, 64, 3]; picture i depends on (family, labels[i], seeds[i], style) only."""
    return paint(family, labels, seeds, style)[0]


def captions(family: str, label: int, seed: int) -> str:
    """Describe one plain picture in a sentence: the class, and the colours that the class does not determine."""
    name = FAMILIES[family].classnames[label]
    if family not in ("shapes", "textures", "glyphs"):
        return FAMILIES[family].template.format(name)
    draw = Draws(_keys(family, label, np.array([seed], np.int64), "plain"))
    first, second = PAIRS[int(draw.pick("pair", len(PAIRS))[0])]
    if family == "textures":
        return f"{name} texture in {first} and {second}."
    return f"a {first} {name} on a {second} background."
