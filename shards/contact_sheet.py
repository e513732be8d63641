"""Draw a contact sheet: a few images of every class on one page, to check a data set before training on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shards.errors import DataError, DataUsageError
from shards.files import replace_at_end
from shards.reader import Split, open_dataset

# Inches. One class is a strip of square images under its name; strips fill the page in columns.
IMAGE = 0.72
NAME = 0.26
GAP = 0.28
TITLE = 0.62
# Pixels of an image on the page, and the white seam between two.
PIXELS, SEAM = 112, 4
PAPER, INK, FAINT = "#ffffff", "#1f2430", "#6b7280"


def contact_sheet(
    data_root: Path,
    name: str,
    split: str = "test",
    out: Path | None = None,
    *,
    per_class: int = 6,
    max_classes: int = 120,
) -> Path:
    """Write a PNG with the first `per_class` images of each class and return its path (default: `<name>-<split>.png`).

    Classes without an image in the split are left out.

    Raises DataError when the data set is not packed or broken or the file cannot be written.
    """
    if per_class < 1 or max_classes < 1:
        raise DataUsageError("a contact sheet needs at least one image of one class")
    shards = open_dataset(data_root, name)
    images = shards.split(split)
    counts = np.bincount(images.labels, minlength=len(shards.classnames))
    shown = np.flatnonzero(counts)[:max_classes].tolist()
    target = out or Path(f"{name}-{split}.png")
    subtitle = f"{split}: {len(images):,} images, {len(shown):,} of {len(counts):,} classes"
    classnames = {label: shards.classnames[label] for label in shown}
    try:
        _draw(images, classnames, name, subtitle, min(per_class, counts.max()), target)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{target} cannot be written ({reason}); name another file with --out") from error
    return target


def _draw(
    images: Split, classnames: Mapping[int, str], title: str, subtitle: str, per_class: int, target: Path
) -> None:
    # matplotlib takes a second to import, and a Figure of its own leaves the global state of pyplot alone.
    from matplotlib.figure import Figure

    strip = per_class * IMAGE

    def stretch(columns: int) -> float:
        page = columns * (strip + GAP) / (TITLE + math.ceil(len(classnames) / columns) * (IMAGE + NAME))
        return abs(page - 4 / 3)

    # As many strips side by side as bring the page nearest to 4 : 3.
    columns = min(range(1, len(classnames) + 1), key=stretch)
    rows = math.ceil(len(classnames) / columns)
    heading = GAP + 0.135 * len(title) + 0.35
    width = max(columns * (strip + GAP) + GAP, heading + 0.08 * len(subtitle) + GAP)
    height = TITLE + rows * (IMAGE + NAME) + GAP / 2
    figure = Figure(figsize=(width, height), facecolor=PAPER)

    def text(x: float, y: float, words: str, size: float, colour: str, weight: str = "normal") -> None:
        place = x / width, 1 - y / height
        # No math parsing: a dollar sign in a class name is a plain character.
        figure.text(*place, words, size=size, color=colour, weight=weight, va="baseline", parse_math=False)

    text(GAP, TITLE - 0.26, title, 15, INK, "bold")
    text(heading, TITLE - 0.26, subtitle, 9, FAINT)
    for k, (label, classname) in enumerate(classnames.items()):
        left = GAP + (k // rows) * (strip + GAP)
        top = TITLE + (k % rows) * (IMAGE + NAME) + NAME
        name = classname.replace("_", " ")
        room = max(4, int(strip / 0.068))
        text(left, top - 0.07, name if len(name) <= room else f"{name[: room - 1]}…", 8.5, INK)
        axes = figure.add_axes((left / width, 1 - (top + IMAGE) / height, strip / width, IMAGE / height))
        axes.imshow(_strip(images, label, per_class), interpolation="nearest", aspect="auto")
        axes.set_axis_off()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_at_end(target) as temporary:
        figure.savefig(temporary, format="png", dpi=150, facecolor=PAPER)


def _strip(images: Split, label: int, count: int) -> NDArray[np.uint8]:
    """Draw the first `count` images of a class, cut to their centre square, side by side."""
    strip = np.full((PIXELS, count * PIXELS, 3), 255, np.uint8)
    for k, i in enumerate(np.flatnonzero(images.labels == label)[:count]):
        image = images.image(int(i))
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # Tiny scans stay crisp pixels, photos are reduced smoothly.
        smooth = Image.Resampling.NEAREST if side < 32 else Image.Resampling.LANCZOS
        square = image.resize((PIXELS - SEAM, PIXELS - SEAM), smooth, (left, top, left + side, top + side))
        strip[SEAM:, k * PIXELS : (k + 1) * PIXELS - SEAM] = np.asarray(square)
    return strip
