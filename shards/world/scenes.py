"""Paint shapes, coloured shapes, textures, flowers and characters, with one painter per family.

A painter takes a class name, random draws for B images and a `Look`, and returns a `Picture`. Shapes: B images, H = W =
SIZE pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from shards.world.counter_rng import Draws, Floats
from shards.world.distance_fields import (
    PALETTE,
    SHAPES,
    Picture,
    cover,
    flat,
    grid,
    nearby,
    over,
    polygons,
    rotate,
    spread,
)
from shards.world.distortions import Look, backdrop, draw_pose
from shards.world.textures import cell, texture
from shards.world.tiles import TILES

FORMS = ("circle", "square", "triangle", "star", "cross")
# Colours of object and background; the two of a pair always differ in brightness.
COLOUR_PAIRS = (
    ("black", "white"), ("blue", "white"), ("red", "white"), ("purple", "yellow"),
    ("green", "white"), ("brown", "white"), ("white", "black"), ("yellow", "blue"),
    ("orange", "black"), ("pink", "purple"), ("yellow", "green"), ("white", "red"),
)  # fmt: skip
HUES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
PETAL_HUES = ("white", "yellow", "pink", "purple", "red", "blue")
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono",
    "STIXGeneral", "cmss10", "cmr10", "STIXGeneralBol",
)  # fmt: skip
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = ("A", "E", "F", "H", "K", "M", "R", "T", "X", "Y")


EDGES: dict[str, Callable[[Floats], Floats]] = {
    "four round petals": lambda angle: 0.3 + 0.52 * np.sqrt(np.abs(np.cos(2 * angle))),
    "five pointed petals": lambda angle: 0.3 + 0.58 * (1 - 2 * np.abs(cell(angle * (5 / (2 * np.pi))))),
    "many thin petals": lambda angle: 0.55 + 0.3 * np.clip(np.cos(13 * angle) * 2, -1, 1),
    "a big dark center": lambda angle: 0.72 + 0.07 * np.cos(6 * angle),
}
"""The outline of a flower: its distance from the centre by the angle."""
BLOOMS = tuple(EDGES)


def _colour_pair(draw: Draws) -> tuple[Floats, Floats]:
    """Draw two colours that differ in brightness, each [B, 3]."""
    which = draw.integers("pair", len(COLOUR_PAIRS))
    first = np.array([PALETTE[a] for a, _ in COLOUR_PAIRS], np.float32)[which]
    second = np.array([PALETTE[b] for _, b in COLOUR_PAIRS], np.float32)[which]
    return nearby(draw, "first", first), nearby(draw, "second", second)


def _paint_object(distance: Floats, size: Floats, colour: Floats, ground: Floats, draw: Draws, look: Look) -> Picture:
    """Paint one object, given by its signed `distance` in local units, on its background, as `look` describes."""
    scale = spread(size)
    mask = cover(distance, scale)
    if look.odd:
        colour, ground = draw.uniform("odd-ink", 0, 1, (3,)), draw.uniform("odd-ground", 0, 1, (3,))
        # Object and background get a different brightness; otherwise not even a person could see the object.
        flip = np.sign(colour.sum(-1) - ground.sum(-1))[:, None]
        colour, ground = np.clip(colour + 0.25 * flip, 0, 1), np.clip(ground - 0.25 * flip, 0, 1)
    if look.outline:
        ground = np.full_like(ground, 0.96)
        width = spread(draw.uniform("pencil", 0.03, 0.06))
        stroke = cover(np.abs(distance) * scale - width) * (0.65 + 0.35 * draw.clouds("pressure", 12))
        return over(flat(ground), np.full_like(colour, 0.12), stroke), mask
    image = over(backdrop(flat(ground), draw, look), colour, mask)
    if look.surface:
        x, y = grid()
        # A texture takes the coordinates of each image, [B, H, W], in which one unit is a period.
        names = ("diagonal stripes", "polka dots", "checkerboard", "zigzag")
        chosen = draw.integers("surface", len(names))
        for k, name in enumerate(names):
            pattern = texture(name, np.repeat(x[None], len(draw), 0) * 4, np.repeat(y[None], len(draw), 0) * 4, draw)
            image = over(image, 1 - colour, pattern * mask * 0.55 * spread((chosen == k).astype(np.float32)))
    if look.occlude:
        x, y = grid()
        tilt = draw.uniform("bar-turn", 0, np.pi)
        across = x * spread(np.cos(tilt)) + y * spread(np.sin(tilt))
        bar = np.abs(across - spread(draw.uniform("bar", -0.3, 0.3))) - 0.07
        image = over(image, draw.uniform("bar-colour", 0, 1, (3,)), cover(bar))
    return image, mask


def paint_shape(name: str, draw: Draws, look: Look) -> Picture:
    """Paint a shape of any colour on a light, grey or dark background."""
    x, y, size = draw_pose(draw, look)
    colour, ground = _colour_pair(draw)
    return _paint_object(SHAPES[name](x, y), size, colour, ground, draw, look)


def paint_coloured_shape(name: str, draw: Draws, look: Look) -> Picture:
    """Paint "red circle": the first word is the colour."""
    hue, form = name.split(" ")
    x, y, size = draw_pose(draw, look)
    level = draw.uniform("ground", 0.72, 0.98)[:, None]
    ground = np.clip(level + draw.uniform("ground-tint", -0.03, 0.03, (3,)), 0, 1)
    return _paint_object(SHAPES[form](x, y), size, nearby(draw, "ink", PALETTE[hue]), ground, draw, look)


def paint_texture(name: str, draw: Draws, look: Look) -> Picture:
    """Paint a surface in two colours that fills the picture; one period is about a fifth of its side."""
    x, y = rotate(*grid(), draw.uniform("turn", -look.turn, look.turn) * (np.pi / 180))
    rate, phase = spread(draw.uniform("rate", 2.1, 2.9)), draw.uniform("phase", 0, 1, (2,))
    mask = texture(name, x * rate + spread(phase[:, 0]), y * rate + spread(phase[:, 1]), draw)
    colour, ground = _colour_pair(draw)
    return over(flat(ground), colour, mask), mask


def paint_flower(name: str, draw: Draws, look: Look) -> Picture:
    """Paint "red flower with four round petals" on leaves."""
    hue, bloom = name.split(" flower with ")
    x, y, size = draw_pose(draw, look)
    ground = nearby(draw, "leaf", (0.16, 0.42, 0.16), 0.06)
    image = backdrop(flat(ground), draw, look)
    radius, angle = np.sqrt(x * x + y * y), np.arctan2(y, x) + spread(draw.uniform("spin", 0, 2 * np.pi))
    # Where the outline is oblique, the distance to it is shorter than that along the radius.
    distance = (radius - EDGES[bloom](angle)) * 0.7
    mask = cover(distance, spread(size))
    petal = nearby(draw, "petal", PALETTE[hue])
    shaded = petal[:, :, None, None] * (0.78 + 0.25 * np.clip(radius, 0, 1))[:, None]
    image = over(image, np.clip(shaded, 0, 1), mask)
    dark = bloom == "a big dark center"
    heart = nearby(draw, "heart", (0.12, 0.08, 0.06) if dark else (0.93, 0.72, 0.12))
    return over(image, heart, cover(radius - (0.36 if dark else 0.17), spread(size))), mask


@cache
def _glyph_distances(character: str, font: str) -> Floats:
    """Compute the signed distance of a character, centred and 1.3 tall, on a 96 x 96 grid over [-1.2, 1.2]^2."""
    import matplotlib
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    # Fonts that matplotlib brings, not those of the system: the same pictures on every machine.
    file = f"{matplotlib.get_data_path()}/fonts/ttf/{font}.ttf"
    outline = TextPath((0, 0), character, size=100, prop=FontProperties(fname=file))
    # The last corner of a loop is its first one again, and `polygons` closes loops itself.
    loops = [np.asarray(loop)[:-1] for loop in outline.to_polygons(closed_only=True)]
    points = np.concatenate(loops)
    low, high = points.min(0), points.max(0)
    scale = 1.3 / float(high[1] - low[1])
    # Fonts have y upwards, the canvas downwards.
    placed = [((loop - (low + high) / 2) * (scale, -scale)).tolist() for loop in loops]
    line = np.linspace(-1.2, 1.2, 96, dtype=np.float32)
    x, y = np.meshgrid(line, line)
    return polygons(x, y, *placed)


def _interpolate(table: Floats, x: Floats, y: Floats) -> Floats:
    """Interpolate per-image tables [B, 96, 96] bilinearly at canvas coordinates."""
    # Below 95, so that the neighbours to the right and below exist.
    u, v = np.clip((x + 1.2) * (95 / 2.4), 0, 94.99), np.clip((y + 1.2) * (95 / 2.4), 0, 94.99)
    i, j = v.astype(np.int64), u.astype(np.int64)
    a, b = v - np.floor(v), u - np.floor(u)
    flat_table = table.reshape(len(table), -1)
    start = (i * 96 + j).reshape(len(table), -1)

    def corner(offset: int) -> Floats:
        return np.take_along_axis(flat_table, start + offset, 1).reshape(x.shape)

    top = corner(0) * (1 - b) + corner(1) * b
    return top * (1 - a) + (corner(96) * (1 - b) + corner(97) * b) * a


def paint_glyph(name: str, draw: Draws, look: Look) -> Picture:
    """Paint "digit three" or "letter A" in one of several fonts, thinned or thickened a little."""
    word = name.split(" ")[1]
    character = str(DIGITS.index(word)) if word in DIGITS else word
    x, y, size = draw_pose(draw, look)
    tables = np.stack([_glyph_distances(character, font) for font in FONTS])
    slant = spread(draw.uniform("slant", -0.15, 0.15))
    stretch = spread(draw.uniform("stretch", 0.9, 1.1))
    distance = _interpolate(tables[draw.integers("font", len(FONTS))], (x + slant * y) * stretch, y)
    distance = distance - spread(draw.uniform("weight", -0.015, 0.06))
    colour, ground = _colour_pair(draw)
    return _paint_object(distance, size, colour, ground, draw, look)


PAINTERS: dict[str, Callable[[str, Draws, Look], Picture]] = {
    "shapes": paint_shape,
    "coloured-shapes": paint_coloured_shape,
    "textures": paint_texture,
    "petals": paint_flower,
    "tiles": lambda name, draw, look: TILES[name](draw),
    "glyphs": paint_glyph,
}
