"""Signed distance fields of plane shapes, and the image operations that all painters share.

A shape is a function of coordinates that gives the distance to its outline, negative inside; `cover` turns it into an
anti-aliased mask. Shapes: B images, H = W = SIZE pixels. The canvas is [-1, 1] x [-1, 1], y downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shards.world.counter_rng import SIZE, Draws, Floats

PIXEL = 2.0 / SIZE

Picture = tuple[Floats, Floats]
"""Images [B, 3, H, W] in [0, 1], and the mask [B, H, W] of the pixels that the class name describes."""

PALETTE = {
    "red": (0.86, 0.10, 0.12), "orange": (0.97, 0.55, 0.08), "yellow": (0.97, 0.88, 0.12), "green": (0.12, 0.62, 0.20),
    "blue": (0.12, 0.30, 0.88), "purple": (0.50, 0.14, 0.66), "pink": (0.98, 0.56, 0.74), "black": (0.07, 0.07, 0.08),
    "white": (0.96, 0.96, 0.96), "brown": (0.44, 0.27, 0.12), "gray": (0.52, 0.52, 0.52),
}  # fmt: skip


def grid() -> tuple[Floats, Floats]:
    """Return the canvas coordinates (x, y) of the pixel centres, each [H, W]."""
    line = (np.arange(SIZE, dtype=np.float32) + 0.5) * PIXEL - 1
    return np.meshgrid(line, line)


def rotate(x: Floats, y: Floats, turn: Floats, size: Floats | float = 1.0) -> tuple[Floats, Floats]:
    """Return coordinates [B, H, W] in which an object is turned by `turn` [B] radians and scaled by `size`."""
    c, s = spread(np.cos(turn) / size), spread(np.sin(turn) / size)
    return x * c + y * s, y * c - x * s


def spread(values: Floats) -> Floats:
    """Reshape [B] to [B, 1, 1], to broadcast over images."""
    return values[:, None, None]


def cover(distance: Floats, scale: Floats | float = 1.0) -> Floats:
    """Compute the anti-aliased coverage in [0, 1] of the inside; `scale` converts local units to canvas units."""
    return np.clip(0.5 - distance * ((1 / PIXEL) * scale), 0, 1)


def ink(value: Floats, softness: float | Floats) -> Floats:
    """Compute the coverage of `value > 0` with an edge `softness` wide in the units of `value`."""
    return np.clip(0.5 + value / softness, 0, 1)


def over(image: Floats, colour: Floats, mask: Floats) -> Floats:
    """Paint `colour` ([B, 3] or [B, 3, H, W]) over the image through `mask` [B, H, W]."""
    paint = colour[:, :, None, None] if colour.ndim == 2 else colour
    return image + (paint - image) * mask[:, None]


def flat(colour: Floats) -> Floats:
    """Make a canvas of one colour: [B, 3] to [B, 3, H, W]."""
    return np.broadcast_to(colour[:, :, None, None], (*colour.shape, SIZE, SIZE))


def nearby(draw: Draws, name: str, colour: Floats | Sequence[float], jitter: float = 0.05) -> Floats:
    """Move `colour` by at most `jitter` per channel, [B, 3]."""
    return np.clip(np.asarray(colour, np.float32) + draw.uniform(name + "/jitter", -jitter, jitter, (3,)), 0, 1)


def polygons(x: Floats, y: Floats, *loops: Sequence[tuple[float, float]]) -> Floats:
    """Compute the signed distance to closed loops of corners (Quilez); inside is by the even-odd rule."""
    nearest = np.full(x.shape, 1e9, np.float32)
    inside = np.zeros(x.shape, bool)
    for corners in loops:
        for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
            ex, ey = bx - ax, by - ay
            length = ex * ex + ey * ey
            # A corner that is repeated, as in outlines of fonts, is an edge without a direction.
            if length < 1e-12:
                continue
            px, py = x - ax, y - ay
            along = np.clip((px * ex + py * ey) * (1 / length), 0, 1)
            dx, dy = px - along * ex, py - along * ey
            np.minimum(nearest, dx * dx + dy * dy, out=nearest)
            if ey != 0:
                crosses = (py >= 0) != (y >= by)
                # Even-odd: a ray to the right changes sides at each edge that it crosses.
                inside ^= crosses & (px < py * (ex / ey))
    distance = np.sqrt(nearest)
    return np.where(inside, -distance, distance)


def ball(x: Floats, y: Floats, radius: Floats | float) -> Floats:
    """Compute the signed distance to a disc about the origin."""
    return np.sqrt(x * x + y * y) - radius


def box(x: Floats, y: Floats, width: float, height: float) -> Floats:
    """Compute the signed distance (a bound outside the corners) to a box of half sizes `width`, `height`."""
    return np.maximum(np.abs(x) - width, np.abs(y) - height)


def ngon(count: int, radius: float, inner: float | None = None) -> list[tuple[float, float]]:
    """Return the corners of a regular polygon, or of a star if `inner` is given."""
    total = count if inner is None else 2 * count
    angles = [2 * np.pi * k / total - np.pi / 2 for k in range(total)]
    radii = [inner if inner is not None and k % 2 else radius for k in range(total)]
    return [(float(r * np.cos(a)), float(r * np.sin(a))) for a, r in zip(angles, radii, strict=True)]


def _heart(x: Floats, y: Floats) -> Floats:
    # Quilez's heart: its y goes upwards, its tip is at the origin; 0.3535534 is the root of 2 over 4.
    x, y = np.abs(x) / 1.15, (0.68 - y) / 1.15
    lobe = np.sqrt((x - 0.25) ** 2 + (y - 0.75) ** 2) - 0.3535534
    reach = np.maximum(x + y, 0) * 0.5
    tip = np.sqrt(np.minimum(x**2 + (y - 1) ** 2, (x - reach) ** 2 + (y - reach) ** 2)) * np.sign(x - y)
    return np.where(x + y > 1, lobe, tip) * 1.15


def _cloud(x: Floats, y: Floats) -> Floats:
    puffs = [(-0.38, 0.1, 0.3), (0.0, -0.12, 0.38), (0.4, 0.08, 0.3)]
    field = np.maximum(box(x, y - 0.24, 0.42, 0.16), y - 0.4)
    for cx, cy, radius in puffs:
        field = np.minimum(field, ball(x - cx, y - cy, radius))
    return np.maximum(field, y - 0.4)


def _clover(x: Floats, y: Floats) -> Floats:
    x, y = np.abs(x), np.abs(y)
    return ball(x - 0.28, y - 0.28, 0.31)


def _gear(x: Floats, y: Floats) -> Floats:
    radius, angle = np.sqrt(x * x + y * y), np.arctan2(y, x)
    teeth = 0.55 + 0.12 * np.clip(np.cos(8 * angle) * 3, -1, 1)
    return np.maximum(radius - teeth, 0.2 - radius)


def _drop(x: Floats, y: Floats) -> Floats:
    bulb = ball(x, y - 0.22, 0.42)
    return np.minimum(bulb, polygons(x, y, [(0.0, -0.78), (0.39, 0.08), (-0.39, 0.08)]))


BOLT = [(0.1, -0.75), (-0.42, 0.12), (-0.05, 0.12), (-0.2, 0.75), (0.42, -0.18), (0.04, -0.18), (0.34, -0.75)]
ARROW = [(-0.7, -0.17), (0.05, -0.17), (0.05, -0.5), (0.72, 0.0), (0.05, 0.5), (0.05, 0.17), (-0.7, 0.17)]
HOUSE = [(0.0, -0.68), (0.68, -0.08), (0.48, -0.08), (0.48, 0.6), (-0.48, 0.6), (-0.48, -0.08), (-0.68, -0.08)]

# Factors behind formulas that are no distances make their slope at the outline about 1, as `cover` needs it.
# Every shape fits the disc of radius 0.8, so that a pose never cuts it.
SHAPES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "circle": lambda x, y: ball(x, y, 0.6),
    "square": lambda x, y: box(x, y, 0.52, 0.52),
    "triangle": lambda x, y: polygons(x, y, ngon(3, 0.74)),
    "star": lambda x, y: polygons(x, y, ngon(5, 0.78, 0.31)),
    "heart": _heart,
    "cross": lambda x, y: np.minimum(box(x, y, 0.66, 0.2), box(x, y, 0.2, 0.66)),
    "ring": lambda x, y: np.abs(ball(x, y, 0.5)) - 0.13,
    "crescent": lambda x, y: np.maximum(ball(x, y, 0.66), -ball(x - 0.3, y, 0.54)),
    "arrow": lambda x, y: polygons(x, y, ARROW),
    "hexagon": lambda x, y: polygons(x, y, ngon(6, 0.68)),
    "diamond": lambda x, y: (np.abs(x) * 1.5 + np.abs(y) - 0.76) * 0.6,
    "oval": lambda x, y: (np.sqrt((x / 0.74) ** 2 + (y / 0.36) ** 2) - 1) * 0.45,
    "rectangle": lambda x, y: box(x, y, 0.7, 0.32),
    "semicircle": lambda x, y: np.maximum(ball(x, y - 0.3, 0.68), y - 0.3),
    "lightning bolt": lambda x, y: polygons(x, y, BOLT),
    "drop": _drop,
    "clover": _clover,
    "house": lambda x, y: polygons(x, y, HOUSE),
    "cloud": _cloud,
    "gear": _gear,
}
