"""Distort generated pictures: pose and background before painting, colour, light, blur and noise after it.

There is one `Look` per family (`looks.toml`), so the domain shift between two sets is a difference of numbers. Shapes:
B images, H = W = SIZE pixels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shards.world.counter_rng import SIZE, Draws, Floats
from shards.world.distance_fields import ball, cover, grid, over, rotate, spread


@dataclass(frozen=True)
class Look:
    """Parameters of the distortions; the defaults are those of plain pictures."""

    size: tuple[float, float] = (0.9, 1.08)
    move: float = 0.05  # canvas units, the canvas is 2 wide
    turn: float = 7.0  # degrees
    wobble: float = 0.0  # displacement of outlines, in canvas units
    outline: bool = False
    odd: bool = False  # random colours instead of those of the palette
    backdrop: float = 0.0  # contrast of the cloudy backdrop
    clutter: int = 0  # small discs strewn over the picture
    occlude: bool = False  # a bar across the object
    surface: bool = False  # a texture inside the object
    hue: float = 0.0  # degrees about the grey axis, the same for every image
    cast: tuple[float, float, float] = (1.0, 1.0, 1.0)  # light colour
    contrast: float = 1.0
    lift: float = 0.0  # added brightness
    grey: float = 0.0  # 1 removes colour
    shade: float = 0.0  # strength of a light gradient
    blur: float = 0.0  # sigma in pixels
    noise: float = 0.0  # standard deviation of sensor noise
    lines: float = 0.0  # contrast of scan lines


def tuples_for_lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the lists among the values of a TOML table by tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


LOOKS: Mapping[str, Look] = {
    family: Look(**tuples_for_lists(fields))
    for family, fields in tomllib.loads(Path(__file__).with_name("looks.toml").read_text(encoding="utf-8")).items()
}


def draw_pose(draw: Draws, look: Look) -> tuple[Floats, Floats, Floats]:
    """Draw the pose of the object; return its local coordinates (x, y) [B, H, W] and its size [B]."""
    x, y = grid()
    size = draw.uniform("size", *look.size)
    move = draw.uniform("move", -look.move, look.move, (2,))
    turn = draw.uniform("turn", -look.turn, look.turn) * (np.pi / 180)
    x, y = x - spread(move[:, 0]), y - spread(move[:, 1])
    if look.wobble:
        x = x + look.wobble * 2 * (draw.clouds("wobble-x", 9) - 0.5)
        y = y + look.wobble * 2 * (draw.clouds("wobble-y", 9) - 0.5)
    return *rotate(x, y, turn, size), size


def backdrop(image: Floats, draw: Draws, look: Look) -> Floats:
    """Add clouds to the flat background, and small discs that do not belong to the object."""
    if look.backdrop:
        # [B, 3, 1, 1] for colours, times patches [B, 1, H, W].
        tint = draw.uniform("backdrop-tint", -1, 1, (3,))[:, :, None, None]
        patches = draw.clouds("backdrop", 5) * 0.6 + draw.clouds("backdrop-fine", 11) * 0.4 - 0.5
        image = image + look.backdrop * (1 + 0.5 * tint) * patches[:, None]
    x, y = grid()
    places = draw.uniform("clutter", -1, 1, (look.clutter, 2))
    sizes = draw.uniform("clutter-size", 0.05, 0.14, (look.clutter,))
    paints = draw.uniform("clutter-colour", 0, 1, (look.clutter, 3))
    for k in range(look.clutter):
        disc = ball(x - spread(places[:, k, 0]), y - spread(places[:, k, 1]), 0.0) - spread(sizes[:, k])
        image = over(image, paints[:, k], cover(disc))
    return image


def _rotate_hue(image: Floats, degrees: float) -> Floats:
    """Rotate colours about the grey axis (Rodrigues); elementwise, so a batch cannot change the rounding."""
    angle = float(np.deg2rad(degrees))
    cos, sin = float(np.cos(angle)), float(np.sin(angle) / 3**0.5)
    r, g, b = image[:, 0], image[:, 1], image[:, 2]
    level = (1 - cos) / 3 * (r + g + b)
    rotated = (cos * r + sin * (b - g), cos * g + sin * (r - b), cos * b + sin * (g - r))
    return np.stack(rotated, 1) + level[:, None]


def _blur(image: Floats, sigma: float) -> Floats:
    """Blur with a separable Gaussian; pixels at the edges are repeated."""
    radius = max(1, int(np.ceil(2.5 * sigma)))
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (2, 3):
        pad = [(0, 0)] * 4
        pad[axis] = (radius, radius)
        padded = np.pad(image, pad, mode="edge")
        image = np.zeros_like(image)
        for k, weight in enumerate(weights):
            image += weight * (padded[:, :, k : k + SIZE] if axis == 2 else padded[..., k : k + SIZE])
    return image


def distort(image: Floats, draw: Draws, look: Look) -> Floats:
    """Apply the distortions that follow painting: hue, light, contrast, blur, scan lines, noise, in this order."""
    if look.hue:
        image = _rotate_hue(image, look.hue)
    if look.grey:
        # Weights of perceived brightness, as in television (ITU-R BT.601).
        level = image[:, :1] * 0.3 + image[:, 1:2] * 0.59 + image[:, 2:] * 0.11
        image = image + look.grey * (level - image)
    if look.shade:
        x, y = grid()
        angle = draw.uniform("light", 0, 2 * np.pi)
        # At most the root of 2, in the corners: 0.7 of it is about 1.
        slope = x * spread(np.cos(angle)) + y * spread(np.sin(angle))
        image = image * (1 + look.shade * 0.7 * slope[:, None])
    image = (image - 0.5) * look.contrast + 0.5 + look.lift
    image = image * np.array(look.cast, np.float32)[:, None, None]
    if look.blur:
        image = _blur(image, look.blur)
    if look.lines:
        rows = (np.arange(SIZE) % 4 < 2).astype(np.float32) - 0.5
        image = image + look.lines * rows[:, None]
    if look.noise:
        image = image + look.noise * draw.normal("noise", (3, SIZE, SIZE))
    return np.clip(image, 0, 1)
