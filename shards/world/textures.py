"""Paint textures: a texture is a function of coordinates (u, v) that is positive at painted points.

One unit of u or v is one period of the pattern. Shapes: B images, H = W = SIZE pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shards.world.counter_rng import Draws, Floats
from shards.world.distance_fields import PIXEL, ink, spread

TAU = float(2 * np.pi)


def wave(phase: Floats) -> Floats:
    """Compute a triangle wave of period 1 in [-1, 1]; it is cheaper than a sine."""
    return 4 * np.abs(phase - np.floor(phase + 0.5)) - 1


def cell(coordinate: Floats) -> Floats:
    """Return the position inside unit cells, in [-0.5, 0.5)."""
    return coordinate - np.floor(coordinate + 0.5)


def parity(coordinate: Floats) -> Floats:
    """Return 0 in even unit cells and 1 in odd ones."""
    index = np.floor(coordinate)
    return index - 2 * np.floor(index * 0.5)


def _checks(u: Floats, v: Floats, draw: Draws) -> Floats:
    # The distance to the nearest line of the grid, positive in every second square.
    edge = np.minimum(0.5 - np.abs(cell(u + 0.5)), 0.5 - np.abs(cell(v + 0.5)))
    return np.where(parity(u) == parity(v), edge, -edge)


def _bricks(u: Floats, v: Floats, draw: Draws) -> Floats:
    row = v * 1.25
    along = cell(u * 0.6 + 0.5 * parity(row))
    return np.minimum(0.5 - np.abs(cell(row + 0.5)) - 0.09, (0.5 - np.abs(along) - 0.06) * 1.6)


def _honeycomb(u: Floats, v: Floats, draw: Draws) -> Floats:
    tall = float(3**0.5)

    def hexagon(x: Floats, y: Floats) -> Floats:
        return 0.5 - np.maximum(np.abs(x), np.abs(x) * 0.5 + np.abs(y) * (tall / 2))

    # The centres of a honeycomb are two grids of rectangles, of which one is shifted by half a period both ways.
    first = hexagon(cell(u), cell(v / tall) * tall)
    second = hexagon(cell(u + 0.5), cell(v / tall + 0.5) * tall)
    return 0.09 - np.maximum(first, second)


def _polar(u: Floats, v: Floats, draw: Draws) -> tuple[Floats, Floats]:
    """Return the distance from a centre that is drawn, and the angle about it."""
    shift = draw.uniform("centre", -0.5, 0.5, (2,))
    x, y = u - spread(shift[:, 0]), v - spread(shift[:, 1])
    return np.sqrt(x * x + y * y), np.arctan2(y, x)


def _spiral(u: Floats, v: Floats, draw: Draws) -> Floats:
    radius, angle = _polar(u, v, draw)
    return wave(radius * 0.7 + angle / TAU) * 0.3


def _sunburst(u: Floats, v: Floats, draw: Draws) -> Floats:
    radius, angle = _polar(u, v, draw)
    return wave(angle * (10 / TAU)) * (radius * 0.16 + 0.02)


def _scales(u: Floats, v: Floats, draw: Draws) -> Floats:
    result = np.full(u.shape, -1.0, np.float32)
    row = np.floor(v * 1.6)
    # Paint from bottom to top: each row of scales overlaps the one below it, as on a roof.
    for step in (0.0, -1.0):
        centre = row + step
        down, along = v * 1.6 - centre, cell(u * 0.8 + 0.5 * parity(centre))
        radius = np.sqrt((along * 2) ** 2 + down * down)
        result = np.where(radius < 1.12, 0.12 - np.abs(radius - 1.0), result)
    return result


def _plaid(u: Floats, v: Floats, draw: Draws) -> Floats:
    bands = ink(0.22 - np.abs(cell(u * 0.7)), 0.06) + ink(0.22 - np.abs(cell(v * 0.7)), 0.06)
    lines = ink(0.04 - np.abs(cell(u * 0.7 + 0.5)), 0.06) + ink(0.04 - np.abs(cell(v * 0.7 + 0.5)), 0.06)
    return (bands * 0.5 + lines * 0.5 - 0.5) * 0.25


def _lattice(u: Floats, v: Floats, draw: Draws) -> Floats:
    a, b = (u + v) * 0.62, (u - v) * 0.62
    return 0.1 - np.minimum(0.5 - np.abs(cell(a)), 0.5 - np.abs(cell(b)))


def _crosses(u: Floats, v: Floats, draw: Draws) -> Floats:
    x, y = np.abs(cell(u * 0.8)), np.abs(cell(v * 0.8))
    return np.maximum(np.minimum(0.34 - x, 0.11 - y), np.minimum(0.11 - x, 0.34 - y))


def _wood(u: Floats, v: Floats, draw: Draws) -> Floats:
    bend = draw.clouds("bend", 3)
    return wave(u * 0.9 + 1.6 * bend + 0.06 * v) * 0.25 + (draw.clouds("fibre", 20) - 0.5) * 0.16


def _marble(u: Floats, v: Floats, draw: Draws) -> Floats:
    bend = draw.clouds("bend", 4) + 0.4 * draw.clouds("fine", 10)
    return 0.1 - np.abs(wave(0.25 * (u + v) + 1.5 * bend))


def _weave(u: Floats, v: Floats, draw: Draws) -> Floats:
    a, b = np.abs(cell(u * 1.1)), np.abs(cell(v * 1.1))
    warp = parity(u * 1.1 + 0.5) == parity(v * 1.1 + 0.5)
    return np.where(warp, 0.28 - np.minimum(a, 0.5), 0.28 - np.minimum(b, 0.5)) * 0.8


def _cracks(u: Floats, v: Floats, draw: Draws) -> Floats:
    """Paint the borders of Voronoi cells: points whose nearest and second nearest seed are about equally far."""
    seeds = draw.uniform("seeds", -3.0, 3.0, (11, 2))
    first = second = np.full(u.shape, 99.0, np.float32)
    for k in range(11):
        radius = np.sqrt((u - spread(seeds[:, k, 0])) ** 2 + (v - spread(seeds[:, k, 1])) ** 2)
        second = np.minimum(second, np.maximum(first, radius))
        first = np.minimum(first, radius)
    return 0.09 - (second - first)


def _bubbles(u: Floats, v: Floats, draw: Draws) -> Floats:
    places, sizes = draw.uniform("bubbles", -2.7, 2.7, (9, 2)), draw.uniform("sizes", 0.35, 0.9, (9,))
    best = np.full(u.shape, -1.0, np.float32)
    for k in range(9):
        radius = np.sqrt((u - spread(places[:, k, 0])) ** 2 + (v - spread(places[:, k, 1])) ** 2)
        best = np.maximum(best, 0.1 - np.abs(radius - spread(sizes[:, k])))
    return best


# The canvas shows about five periods.
TEXTURES: dict[str, Callable[[Floats, Floats, Draws], Floats]] = {
    "horizontal stripes": lambda u, v, draw: wave(v) * 0.25,
    "checkerboard": _checks,
    "polka dots": lambda u, v, draw: 0.3 - np.sqrt(cell(u) ** 2 + cell(v) ** 2),
    "bricks": _bricks,
    "zigzag": lambda u, v, draw: wave(v + 0.45 * wave(u)) * 0.25,
    "rings": lambda u, v, draw: wave(_polar(u, v, draw)[0] * 1.1) * 0.25,
    "clouds": lambda u, v, draw: draw.clouds("big", 4) * 0.7 + draw.clouds("small", 9) * 0.3 - 0.5,
    "diagonal stripes": lambda u, v, draw: wave((u + v) * 0.7) * 0.25,
    "honeycomb": _honeycomb,
    "plaid": _plaid,
    "cracks": _cracks,
    "wood grain": _wood,
    "vertical stripes": lambda u, v, draw: wave(u) * 0.25,
    "grid": lambda u, v, draw: 0.1 - np.minimum(np.abs(cell(u * 0.9)), np.abs(cell(v * 0.9))),
    "speckles": lambda u, v, draw: draw.clouds("speckle", 30) * 0.85 + draw.clouds("grain", 16) * 0.15 - 0.62,
    "scales": _scales,
    "waves": lambda u, v, draw: wave(v + 0.3 * np.sin(TAU * u * 0.45)) * 0.25,
    "spiral": _spiral,
    "marble": _marble,
    "lattice": _lattice,
    "plus signs": _crosses,
    "sunburst": _sunburst,
    "bubbles": _bubbles,
    "basket weave": _weave,
}


def texture(name: str, u: Floats, v: Floats, draw: Draws) -> Floats:
    """Compute the painted coverage [B, H, W] of the named texture."""
    return ink(TEXTURES[name](u, v, draw), PIXEL * 3.2)
