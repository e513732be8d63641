"""Miniature raw folders of the fifteen published data sets, in the layouts that their archives and CoOp give them.


Class names, folders and file names are the real ones; images are drawn. The split files are small, so a miniature is
not the published set, and only tests pack it (`available`). Oddities of the real sets are there too: hidden files,
README.txt, images whose content is not what their name says, CMYK and grey JPEGs, names with slashes and apostrophes.
"""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from shards.catalogue import Dataset, find
from shards.raw.published import (
    find_location,
    imagenet_wnids,
    published_classnames,
    read_published,
)
from shards.source import Source
from shards.world.generate import CLASSNAMES, paint, sample_seed

# Of a thousand classes these: neighbours in the order of text and of numbers, and the two pairs that share a name.
FEW_OF_A_THOUSAND = (0, 1, 2, 10, 100, 657, 744, 836, 837, 999)
# Class folders that have another name than their class.
RENAMED = {
    "caltech101": {"face": "Faces", "leopard": "Leopards", "motorbike": "Motorbikes", "airplane": "airplanes"},
    "eurosat": {"Annual Crop Land": "AnnualCrop", "Herbaceous Vegetation Land": "HerbaceousVegetation"},
}
FAMILY = {"dtd": "textures", "eurosat": "tiles", "oxford-flowers": "petals", "imagenet-sketch": "shapes-sketch"}
# Drawing takes most of the time: pictures are drawn once each and cut differently for every file.
PICTURES_PER_CLASS = 4


@dataclass
class Mini:
    """A data set being written: `images` counts per class, `labels` are the classes that get any."""

    dataset: Dataset
    folder: Path
    images: Path
    per_class: int
    labels: tuple[int, ...]
    names: tuple[str, ...]
    drawn: bool = True
    rows: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: {"train": [], "val": [], "test": []})

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Split, label and number of each image, class by class: a fifth val, three tenths test, the rest train."""
        val = self.per_class - max(1, round(0.3 * self.per_class))
        train = val - max(1, round(0.2 * self.per_class))
        for label in self.labels:
            for i in range(self.per_class):
                yield ("train" if i < train else "val" if i < val else "test"), label, i

    def write(self, path: str, label: int, i: int, image_format: str = "") -> None:
        file = self.images / path
        file.parent.mkdir(parents=True, exist_ok=True)
        picture = encoded(self.dataset.name, label, i, image_format or "JPEG") if self.drawn else b""
        file.write_bytes(picture)


def build(name: str, root: Path, per_class: int = 6, classes: int | None = None, drawn: bool = True) -> Path:
    """Write the miniature of one data set below `root` and return its folder.

    per_class: images of each class over all splits (ImageNet: in train; val has two), at least 3.
    classes: the first so many; by default all of them, or ten labels of the sets that have a thousand classes.
    drawn: False leaves the images empty, for listing alone.
    Read it with `available`: the split file is small, and images are few.
    """
    dataset = find(name)
    assert dataset.raw and per_class >= 3
    few = classes is None and dataset.num_classes == 1000
    labels = FEW_OF_A_THOUSAND if few else tuple(range(classes or dataset.num_classes))
    folder = root / dataset.raw.folders[0]
    images = folder / dataset.raw.images[0]
    images.mkdir(parents=True)
    names = published_classnames(dataset)
    mini = Mini(dataset, folder, images, per_class, labels, names, drawn)
    WRITERS[dataset.name](mini)
    if dataset.raw.split_file:
        rows = {split: [[path, label, names[label]] for path, label in part] for split, part in mini.rows.items()}
        (folder / dataset.raw.split_file).write_text(json.dumps(rows, indent=4))
    return folder


def available(name: str, root: Path) -> Source:
    """The images of a miniature that are there, without the problems that it is not the published set."""
    dataset = find(name)
    listing = read_published(find_location(dataset, root))
    return listing.make_source(name, dataset.template, dataset.templates)


def build_all(root: Path, per_class: int = 6, classes: int | None = None) -> Path:
    for name in WRITERS:
        build(name, root, per_class, min(classes, find(name).num_classes) if classes else None)
    return root


def _imagenet(mini: Mini) -> None:
    wnids = imagenet_wnids()
    for label in mini.labels:
        for i in range(mini.per_class):
            # n02105855_2933.JPEG of the real set is a PNG, and some two dozen files are CMYK.
            odd = {0: "PNG", 1: "CMYK"}.get(i, "") if label == mini.labels[0] else ""
            mini.write(f"train/{wnids[label]}/{wnids[label]}_{i * 37 + 1}.JPEG", label, i, odd)
        for i in range(2):
            mini.write(f"val/{wnids[label]}/ILSVRC2012_val_{label * 50 + i + 1:08d}.JPEG", label, mini.per_class + i)
    (mini.images / "train" / "README").write_text("plain files beside the class folders are ignored\n")
    (mini.images / "val" / ".DS_Store").write_bytes(b"\0")
    _hide(mini, f"train/{wnids[mini.labels[0]]}/.DS_Store")


def _caltech(mini: Mini) -> None:
    _class_folders(mini, "{folder}/image_{number:04d}.jpg")
    for ignored in ("BACKGROUND_Google", "Faces_easy"):
        mini.write(f"{ignored}/image_0001.jpg", 0, 0)
    _hide(mini, "Faces/.DS_Store")


def _pets(mini: Mini) -> None:
    for split, label, i in mini.parts():
        name = mini.names[label]
        # Cats are written with capitals, dogs without; four files of the real set are PNGs and six are GIFs.
        stem = f"{'_'.join(map(str.capitalize, name.split('_'))) if label % 3 == 0 else name}_{i + 1}"
        mini.write(f"{stem}.jpg", label, i, {0: "PNG", 1: "GIF"}.get(i, "") if label == 0 else "")
        mini.rows[split].append((f"{stem}.jpg", label))
    _hide(mini, "Thumbs.db")


def _cars(mini: Mini) -> None:
    for number, (split, label, i) in enumerate(mini.parts(), 1):
        path = f"{'cars_test' if split == 'test' else 'cars_train'}/{number:05d}.jpg"
        mini.write(path, label, i, "GREY" if label == 0 and i == 0 else "")
        mini.rows[split].append((path, label))


def _flowers(mini: Mini) -> None:
    # Image numbers go round the classes from the last one on, so that labels first appear out of order.
    numbers: dict[int, list[tuple[int, str, int]]] = {}
    for split, label, i in mini.parts():
        numbers.setdefault(i, []).append((label, split, i))
    ordered = [image for i in sorted(numbers) for image in reversed(numbers[i])]
    for number, (label, split, i) in enumerate(ordered, 1):
        mini.write(f"image_{number:05d}.jpg", label, i)
        mini.rows[split].append((f"image_{number:05d}.jpg", label))


def _aircraft(mini: Mini) -> None:
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    # By image number, as in the real lists, which is no order of classes.
    for number, (split, label, i) in enumerate(reversed(list(mini.parts())), 34309):
        mini.write(f"{number:07d}.jpg", label, i)
        lists[split].append(f"{number:07d} {mini.names[label]}")
    for split, lines in lists.items():
        _lines(mini.folder / f"images_variant_{split}.txt", lines)
    _lines(mini.folder / "variants.txt", [mini.names[label] for label in mini.labels])


def _scenes(mini: Mini) -> None:
    for split, label, i in mini.parts():
        path = f"{scene_folder(mini.names[label])}/sun_a{label * 100 + i:015d}.jpg"
        mini.write(path, label, i)
        mini.rows[split].append((path, label))


def scene_folder(name: str) -> str:
    """`indoor apse` lies in `a/apse/indoor`."""
    levels = list(reversed(name.split(" ")))
    return "/".join((levels[0][0], *levels))


def _actions(mini: Mini) -> None:
    for split, label, i in mini.parts():
        name = mini.names[label]
        video = name.replace("_", "").replace("HandstandPushups", "HandStandPushups")
        path = f"{name}/v_{video}_g{i + 1:02d}_c01.jpg"
        mini.write(path, label, i)
        mini.rows[split].append((path, label))


def _v2(mini: Mini) -> None:
    for label in mini.labels:
        for i in range(mini.per_class):
            mini.write(f"{label}/{label * 1000 + i:x}.jpeg", label, i)


def _sketch(mini: Mini) -> None:
    for label in mini.labels:
        for i in range(mini.per_class):
            mini.write(f"{imagenet_wnids()[label]}/sketch_{i}.JPEG", label, i, "GREY" if i % 2 else "")


def _adversarial(mini: Mini) -> None:
    assert mini.dataset.raw
    for label in mini.labels:
        wnid = imagenet_wnids()[mini.dataset.raw.indices[label]]
        for i in range(mini.per_class):
            mini.write(f"{wnid}/0.{i:06d}_{mini.names[label].replace('/', ' ')} _ {label}_0.5.jpg", label, i)
    (mini.images / "README.txt").write_text("as the archive has it\n")


def _renditions(mini: Mini) -> None:
    assert mini.dataset.raw
    for label in mini.labels:
        wnid = imagenet_wnids()[mini.dataset.raw.indices[label]]
        for i in range(mini.per_class):
            mini.write(f"{wnid}/{('art', 'cartoon', 'tattoo')[i % 3]}_{i}.jpg", label, i, "PNG" if i == 1 else "")
    (mini.images / "README.txt").write_text("as the archive has it\n")


WRITERS: dict[str, Callable[[Mini], None]] = {
    "imagenet": _imagenet, "caltech101": _caltech, "oxford-pets": _pets, "stanford-cars": _cars,
    "oxford-flowers": _flowers, "food101": lambda mini: _class_folders(mini, "{folder}/{number}.jpg"),
    "fgvc-aircraft": _aircraft, "sun397": _scenes,
    "dtd": lambda mini: _class_folders(mini, "{folder}/{folder}_{number:04d}.jpg"),
    "eurosat": lambda mini: _class_folders(mini, "{folder}/{folder}_{number}.jpg"), "ucf101": _actions,
    "imagenetv2": _v2, "imagenet-sketch": _sketch, "imagenet-a": _adversarial, "imagenet-r": _renditions,
}  # fmt: skip


def _class_folders(mini: Mini, pattern: str) -> None:
    assert mini.dataset.raw
    folders = RENAMED.get(mini.dataset.name, {})
    for split, label, i in mini.parts():
        path = pattern.format(folder=folders.get(mini.names[label], mini.names[label]), number=i + 1)
        mini.write(path, label, i)
        mini.rows[split].append((path, label))


def _hide(mini: Mini, path: str) -> None:
    (mini.images / path).write_bytes(b"\0\0")


def _lines(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


_PICTURES: dict[tuple[str, int], np.ndarray] = {}


def encoded(name: str, label: int, i: int, image_format: str) -> bytes:
    """One image file of 64 to 96 pixels a side: the same arguments always give the same picture.

    image_format: JPEG, PNG, GIF, or CMYK and GREY, which are JPEGs too.
    """
    family = FAMILY.get(name, "shapes-art")
    if (name, label) not in _PICTURES:
        if next(iter(_PICTURES), (name, 0))[0] != name:
            _PICTURES.clear()
        classes = np.full(PICTURES_PER_CLASS, label % len(CLASSNAMES[family]))
        seeds = np.array([sample_seed(name, str(label), number) for number in range(PICTURES_PER_CLASS)], np.int64)
        _PICTURES[name, label] = paint(family, classes, seeds)[0]
    width, height = (64, 64) if name == "eurosat" else (64 + (i * 13 + label) % 33, 64 + (i * 7 + 2 * label) % 33)
    picture = Image.fromarray(_PICTURES[name, label][i % PICTURES_PER_CLASS]).resize((width, height))
    picture.putpixel((0, 0), (i % 256, i // 256 % 256, label % 256))
    if image_format in ("CMYK", "GREY"):
        picture = picture.convert({"CMYK": "CMYK", "GREY": "L"}[image_format])
    buffer = io.BytesIO()
    picture.save(buffer, format=image_format if image_format in ("PNG", "GIF") else "JPEG", quality=90)
    return buffer.getvalue()
