"""Draw a contact sheet: a few images of every class on one page, to check a data set before training on it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from shards.errors import DataError
from shards.files import replace_at_end
from shards.reader import Split, open_dataset

# Inches: an image, and the height of a class name above its images.
IMAGE, NAME = 0.72, 0.26
# Pixels of an image on the page, and the white space between two.
PIXELS, SEAM = 112, 4
MAX_CLASSES = 120


def contact_sheet(data_root: Path, name: str, split: str, out: Path, *, per_class: int = 6) -> None:
    """Write a PNG with the first `per_class` images of each class that has any."""
    # matplotlib takes a second to import, and a Figure of its own leaves the global state of pyplot alone.
    from matplotlib.figure import Figure

    shards = open_dataset(data_root, name)
    images = shards.split(split)
    counts = np.bincount(images.labels, minlength=len(shards.classnames))
    labels = np.flatnonzero(counts)[:MAX_CLASSES].tolist()
    per_class = min(per_class, int(counts.max()))
    # As many classes side by side as bring the page near to 4 : 3.
    strip = per_class * IMAGE
    columns = math.ceil(math.sqrt(4 / 3 * len(labels) * (IMAGE + NAME) / strip))
    rows = math.ceil(len(labels) / columns)
    figure = Figure(figsize=(max(columns * strip * 1.1, 6), (rows + 0.5) * (IMAGE + NAME)), layout="constrained")
    # A dollar sign in a name is a plain character, not the beginning of a formula.
    title = f"{name}   {split}: {len(images):,} images, {len(labels):,} of {len(counts):,} classes"
    figure.suptitle(title, weight="bold", parse_math=False)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, label in zip(grid.T.flat, labels, strict=False):
        axes.imshow(_strip(images, label, per_class), interpolation="nearest")
        # A letter is about 0.07 inches wide.
        text = shards.classnames[label].replace("_", " ")[: max(4, int(strip / 0.07))]
        axes.set_title(text, loc="left", size=8.5, pad=3, parse_math=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replace_at_end(out) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{out} cannot be written ({reason}); name another file with --out") from error


def _strip(images: Split, label: int, count: int) -> NDArray[np.uint8]:
    """Draw the first `count` images of a class, cut to their centre square, side by side."""
    strip = np.full((PIXELS, count * PIXELS, 3), 255, np.uint8)
    for k, i in enumerate(np.flatnonzero(images.labels == label)[:count]):
        image = images.image(int(i))
        # Tiny scans stay crisp pixels, photos are reduced smoothly.
        method = Image.Resampling.NEAREST if min(image.size) < 32 else Image.Resampling.LANCZOS
        square = ImageOps.fit(image, (PIXELS - SEAM, PIXELS - SEAM), method)
        strip[SEAM:, k * PIXELS : (k + 1) * PIXELS - SEAM] = np.asarray(square)
    return strip
