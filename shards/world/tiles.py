"""Paint land seen from above, one painter per class, which draws the pose: roads and rivers cross the picture.

Shapes: B images, H = W = SIZE pixels; the canvas is [-1, 1]^2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shards.world.counter_rng import SIZE, Draws, Floats
from shards.world.distance_fields import Picture, cover, flat, grid, ink, nearby, over, rotate, spread
from shards.world.textures import cell, wave

GRASS, WOOD, SOIL = (0.42, 0.58, 0.30), (0.10, 0.30, 0.13), (0.62, 0.50, 0.32)
WATER, SAND, ASPHALT = (0.13, 0.30, 0.52), (0.88, 0.76, 0.52), (0.42, 0.42, 0.44)
ROOF, CONCRETE, PAINT = (0.72, 0.33, 0.24), (0.70, 0.69, 0.67), (0.93, 0.93, 0.90)


def _ground(draw: Draws, colour: tuple[float, float, float], grain: float = 0.12) -> Floats:
    patches = draw.clouds("ground", 6) * 0.6 + draw.clouds("ground-fine", 20) * 0.4 - 0.5
    return flat(nearby(draw, "ground", colour, 0.04)) + grain * patches[:, None]


def _white(draw: Draws) -> Floats:
    return np.tile(np.array(PAINT, np.float32), (len(draw), 1))


def _turned(draw: Draws) -> tuple[Floats, Floats]:
    """Return coordinates in a random rotation: satellite pictures have no upright direction."""
    return rotate(*grid(), draw.uniform("turn", 0, 2 * np.pi))


def _straight(draw: Draws) -> tuple[Floats, Floats]:
    """Return coordinates close to the axes, with a random quarter turn, so that streets stay recognisable."""
    turn = draw.uniform("turn", -0.2, 0.2) + draw.integers("quarter", 2).astype(np.float32) * np.float32(np.pi / 2)
    return rotate(*grid(), turn)


def _river(draw: Draws) -> Picture:
    x, y = _turned(draw)
    bend, width = spread(draw.uniform("bend", 0.15, 0.35)), spread(draw.uniform("width", 0.12, 0.24))
    stream = cover(np.abs(y + bend * np.sin(3 * x + spread(draw.uniform("phase", 0, 6.28)))) - width)
    return over(_ground(draw, GRASS), nearby(draw, "water", WATER), stream), stream


def _forest(draw: Draws) -> Picture:
    crowns = draw.clouds("crowns", 22) * 0.7 + draw.clouds("crowns-fine", 31) * 0.3
    image = flat(nearby(draw, "wood", WOOD, 0.03)) * (0.55 + 1.1 * crowns)[:, None]
    return image, crowns


def _field(draw: Draws) -> Picture:
    x, y = _turned(draw)
    split = spread(draw.uniform("split", -0.4, 0.4))
    rate = spread(draw.uniform("rate", 2.6, 3.6))
    left = x < split
    rows = ink(np.where(left, wave(x * rate), wave(y * rate)) * 0.3, 0.15)
    image = over(flat(nearby(draw, "soil", SOIL)), nearby(draw, "crop", (0.40, 0.62, 0.18)), rows)
    return image, rows


def _houses(draw: Draws) -> Picture:
    x, y = _straight(draw)
    u, v = x * 1.7 + spread(draw.uniform("u", 0, 1)), y * 1.7 + spread(draw.uniform("v", 0, 1))
    # A unit of u and v is 1 / 1.7 on the canvas.
    roofs = cover((np.maximum(np.abs(cell(u)) - 0.3, np.abs(cell(v)) - 0.24)) / 1.7)
    ridge = cover((np.abs(cell(v)) - 0.02) / 1.7) * roofs
    image = over(_ground(draw, GRASS), nearby(draw, "roof", ROOF, 0.08), roofs)
    return over(image, np.full((len(draw), 3), 0.3, np.float32), ridge), roofs


def _highway(draw: Draws) -> Picture:
    x, y = _turned(draw)
    y = y + spread(draw.uniform("aside", -0.25, 0.25))
    road = cover(np.abs(y) - 0.34)
    image = over(_ground(draw, GRASS), nearby(draw, "road", ASPHALT), road)
    for offset in (-0.17, 0.17):
        image = over(image, _white(draw), cover(np.abs(y - offset) - 0.018) * (cell(x * 3) > 0))
    return over(image, nearby(draw, "divider", (0.9, 0.8, 0.2)), cover(np.abs(y) - 0.03)), road


def _lake(draw: Draws) -> Picture:
    x, y = _turned(draw)
    radius = np.sqrt(x * x + (y * 1.25) ** 2)
    angle = np.arctan2(y, x) + spread(draw.uniform("phase", 0, 6.28))
    edge = spread(draw.uniform("radius", 0.5, 0.7)) * (1 + 0.12 * np.cos(2 * angle) + 0.1 * np.cos(3 * angle + 1))
    water = cover(radius - edge)
    shore = cover(radius - edge - 0.07)
    image = over(_ground(draw, GRASS), nearby(draw, "shore", SAND), shore)
    return over(image, nearby(draw, "water", WATER), water), water


def _parking(draw: Draws) -> Picture:
    x, y = _straight(draw)
    u, v = x * 3.2 + spread(draw.uniform("u", 0, 1)), y * 1.6 + spread(draw.uniform("v", 0, 1))
    cars = cover((np.maximum(np.abs(cell(u)) - 0.26, np.abs(cell(v)) - 0.3)) / 3.2)
    column, row = np.floor(u + 0.5) + 12, np.floor(v + 0.5) + 8
    # Neighbouring cars get different ones of 32 colours.
    index = (column * 7 + row * 13).astype(np.int64) % 32
    paints = draw.uniform("cars", 0.05, 0.95, (32, 3))
    index = index.reshape(len(draw), 1, -1)
    paint = np.take_along_axis(paints.transpose(0, 2, 1), index, 2).reshape(len(draw), 3, SIZE, SIZE)
    return over(_ground(draw, ASPHALT, 0.05), paint, cars), cars


def _orchard(draw: Draws) -> Picture:
    x, y = _straight(draw)
    u, v = x * 2.4 + spread(draw.uniform("u", 0, 1)), y * 2.4 + spread(draw.uniform("v", 0, 1))
    crowns = cover((np.sqrt(cell(u) ** 2 + cell(v) ** 2) - 0.33) / 2.4)
    return over(_ground(draw, (0.72, 0.66, 0.40)), nearby(draw, "tree", (0.14, 0.38, 0.14)), crowns), crowns


def _harbor(draw: Draws) -> Picture:
    x, y = _straight(draw)
    side = y + spread(draw.uniform("quay", 0.45, 0.65))
    image = over(flat(nearby(draw, "water", WATER)), nearby(draw, "concrete", CONCRETE), cover(side))
    u = x * 1.9 + spread(draw.uniform("u", 0, 1))
    piers = cover(np.maximum((np.abs(cell(u)) - 0.06) / 1.9, np.abs(side - 0.4) - 0.45))
    berth = (np.abs(np.abs(cell(u)) - 0.26) - 0.09) / 1.9
    boats = cover(np.maximum(berth, np.abs(wave(side * 1.1 + 0.5)) - 0.45) * 0.8)
    boats = boats * (side > 0.08) * (side < 0.9)
    image = over(image, nearby(draw, "pier", CONCRETE), piers)
    return over(image, _white(draw), boats), np.maximum(piers, boats)


def _desert(draw: Draws) -> Picture:
    _, y = _turned(draw)
    bend = draw.clouds("bend", 4)
    dunes = np.clip(wave(y * 1.8 + 1.2 * bend) * 0.5 + 0.5, 0, 1)
    return flat(nearby(draw, "sand", SAND)) * (0.74 + 0.28 * dunes)[:, None], dunes


def _crossroads(draw: Draws) -> Picture:
    x, y = _straight(draw)
    x, y = x + spread(draw.uniform("x", -0.25, 0.25)), y + spread(draw.uniform("y", -0.25, 0.25))
    roads = np.maximum(cover(np.abs(y) - 0.2), cover(np.abs(x) - 0.2))
    image = over(_ground(draw, GRASS), nearby(draw, "road", ASPHALT), roads)
    dashes = [cover(np.abs(b) - 0.022) * (cell(a * 3) > 0) for a, b in ((x, y), (y, x))]
    lines = np.where((np.abs(x) < 0.24) & (np.abs(y) < 0.24), 0, np.maximum(*dashes))
    return over(image, _white(draw), lines), roads


def _stadium(draw: Draws) -> Picture:
    x, y = _turned(draw)
    distance = np.sqrt(np.maximum(np.abs(x) - 0.32, 0) ** 2 + y * y)
    stands = cover(distance - 0.62)
    image = over(_ground(draw, CONCRETE, 0.06), nearby(draw, "track", ROOF), stands)
    image = over(image, _white(draw), cover(np.abs(distance - 0.5) - 0.02))
    return over(image, nearby(draw, "pitch", (0.25, 0.6, 0.25)), cover(distance - 0.38)), stands


TILES: dict[str, Callable[[Draws], Picture]] = {
    "river": _river,
    "crop field": _field,
    "houses": _houses,
    "desert": _desert,
    "parking lot": _parking,
    "crossroads": _crossroads,
    "forest": _forest,
    "highway": _highway,
    "lake": _lake,
    "orchard": _orchard,
    "harbor": _harbor,
    "stadium": _stadium,
}
