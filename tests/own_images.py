"""Folders of small images, one folder per class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.source import png

CLASSES = ("Zebra finch", "bee_eater", "coal tit", "Ara")


def put(file, colour=(1, 2, 3)):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(np.full((4, 5, 3), colour, np.uint8)))


def put_classes(root, classes=CLASSES, each=10):
    for c, name in enumerate(classes):
        for i in range(each):
            put(root / name / f"{i:02d}.png", (c * 60, i, 0))


def put_photographs(root, each=16):
    """Put `each` random crops of six photographs that ship with scikit-image and scikit-learn, a class of each."""
    bundled, more = (Path(pytest.importorskip(name).__file__).parent for name in ("skimage", "sklearn"))
    files = {name: bundled / "data" / f"{name}.png" for name in ("astronaut", "chelsea", "coffee")}
    files |= {"rocket": bundled / "data" / "rocket.jpg"}
    files |= {name: more / "datasets" / "images" / f"{name}.jpg" for name in ("china", "flower")}
    rng = np.random.default_rng(0)
    for name, file in files.items():
        (root / name).mkdir(parents=True)
        photograph = Image.open(file).convert("RGB")
        for number in range(each):
            side = int(min(photograph.size) * rng.uniform(0.5, 0.9))
            x, y = (int(rng.integers(length - side + 1)) for length in photograph.size)
            photograph.crop((x, y, x + side, y + side)).resize((96, 96)).save(root / name / f"{number:02d}.jpg")
