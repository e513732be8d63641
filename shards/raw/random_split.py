"""Make a random split by CoOp's rules if the official split file is missing. Nothing is written.

CoOp draws such a split from global random numbers, in the order the disk lists files, and keeps it under the official
name. Here files are sorted by name and the draw has a seed and a random stream of its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

from shards.dataset import Dataset
from shards.raw.classfolders import strays_among
from shards.raw.classnames import published_classnames
from shards.raw.folders import UNCHANGED, Listing, RawProblem, Rows, entries, files_exist, image_names, unsafe_path
from shards.raw.lists import read_lines, read_mat, required_list
from shards.raw.locations import RawLocation, folder_names, raw_layout

Images = list[tuple[str, int]]

TRAIN, VAL = 0.5, 0.2
VAL_OF_TRAINVAL = 0.2


def random_split(location: RawLocation, seed: int) -> Listing:
    """Split the existing images at random; class names and labels are the published ones.

    Raises RawProblem when a list is missing or broken, or when a class has too few images for its parts.
    """
    images, dataset = location.require_images(), location.dataset
    names = published_classnames(dataset)
    rule = raw_layout(dataset).random_split
    draw = random.Random(seed)
    problems: tuple[RawProblem, ...] = ()
    if rule == "trainval":
        trainval, test = (list(_there(images, _official(location, part))) for part in ("trainval", "test"))
        train, val = _split_trainval(trainval, draw)
        splits = {"train": train, "val": val, "test": test}
        _refuse_empty(dataset, splits)
    elif rule == "labels":
        splits = _split_folders(dataset, list(_there(images, _flower_images(location))), draw)
    else:
        found, problems = _folder_images(location, images)
        splits = _split_folders(dataset, found, draw)
    rows = {split: Rows([path for path, _ in part], [label for _, label in part]) for split, part in splits.items()}
    return Listing(images, names, rows, f"random split of {_RULES[rule]}, seed {seed}", True, problems)


_RULES = {
    "folders": "the class folders",
    "labels": "the labelled images",
    "trainval": "the official training list",
}


def _there(images: Path, listed: Images) -> Iterator[tuple[str, int]]:
    present = files_exist(images, [path for path, _ in listed])
    return (image for image, is_there in zip(listed, present, strict=True) if is_there)


def _by_class(listed: Images) -> dict[int, list[str]]:
    """Group items by class, in order of first appearance."""
    classes: dict[int, list[str]] = {}
    for path, label in listed:
        classes.setdefault(label, []).append(path)
    return classes


def _split_folders(dataset: Dataset, listed: Images, draw: random.Random) -> dict[str, Images]:
    """Split every class: 50 % train, 20 % val, the rest test."""
    splits: dict[str, Images] = {"train": [], "val": [], "test": []}
    for label, paths in _by_class(listed).items():
        draw.shuffle(paths)
        train = round(TRAIN * len(paths))
        val = train + round(VAL * len(paths))
        for split, part in (("train", paths[:train]), ("val", paths[train:val]), ("test", paths[val:])):
            splits[split] += [(path, label) for path in part]
    _refuse_empty(dataset, splits)
    return splits


def _split_trainval(listed: Images, draw: random.Random) -> tuple[Images, Images]:
    """Move 20 % of each class of the official training list to val."""
    train: Images = []
    val: Images = []
    for label, paths in _by_class(listed).items():
        draw.shuffle(paths)
        part = round(VAL_OF_TRAINVAL * len(paths))
        val += [(path, label) for path in paths[:part]]
        train += [(path, label) for path in paths[part:]]
    return train, val


def _refuse_empty(dataset: Dataset, splits: dict[str, Images]) -> None:
    names = published_classnames(dataset)
    for split, part in splits.items():
        empty = sorted(set(range(len(names))) - {label for _, label in part})
        if empty:
            example = f"class {empty[0]}, {names[empty[0]]!r}"
            many = f"{len(empty)} classes, the first is {example}" if len(empty) > 1 else example
            what = f"a random split of {dataset.title} has no {split} images of {many}"
            raise RawProblem(what, "more images of each class are needed for a random split")


def _folder_images(location: RawLocation, images: Path) -> tuple[Images, tuple[RawProblem, ...]]:
    """List the images of class folders in label order, that is by folder name with capitals first."""
    labels = {folder: label for label, folder in enumerate(folder_names(location.dataset))}
    ignored = raw_layout(location.dataset).ignored
    listed: Images = []
    strays: list[str] = []
    for entry in entries(images):
        if entry.name in labels:
            names, others = image_names(images / entry.name)
            listed += [(f"{entry.name}/{name}", labels[entry.name]) for name in names]
            strays += [f"{entry.name}/{name}" for name in others]
        elif entry.name not in ignored and images != location.folder:
            strays.append(entry.name)
    return listed, tuple(strays_among(location.raw_root, images, strays))


def _flower_images(location: RawLocation) -> Images:
    """Read `imagelabels.mat`, which holds the classes of `image_00001.jpg` and so on, counted from 1."""
    file = required_list(location, "imagelabels.mat")
    try:
        labels = [int(label) - 1 for label in read_mat(file, "labels").ravel()]
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RawProblem(f"{file} holds no list of numbers", UNCHANGED) from error
    return _known(location, file, [(f"image_{number:05d}.jpg", label) for number, label in enumerate(labels, 1)])


def _official(location: RawLocation, part: str) -> Images:
    readers = {
        "oxford-pets": _pets,
        "stanford-cars": _cars,
        "sun397": _scenes,
        "ucf101": _actions,
    }
    return readers[location.dataset.base](location, part)


def _pets(location: RawLocation, part: str) -> Images:
    """Read lines of image name, class number from 1, species and breed number."""
    file = required_list(location, f"annotations/{part}.txt")
    found = []
    for number, line in read_lines(file):
        name, _, rest = line.strip().partition(" ")
        label = rest.split(" ")[0]
        if not re.fullmatch("[0-9]{1,9}", label):
            raise RawProblem(f"{file}, line {number}: {line[:80]!a} has no class number", UNCHANGED)
        found.append((f"{name}.jpg", int(label) - 1))
    listed = _known(location, file, found)
    names = published_classnames(location.dataset)
    for number, (path, class_) in enumerate(listed, 1):
        if path.rpartition("_")[0].lower() != names[class_]:
            raise RawProblem(f"{file}, entry {number}: {path!a} is listed as class {class_ + 1}", UNCHANGED)
    return listed


def _cars(location: RawLocation, part: str) -> Images:
    """Read annotations with a file name and a class number from 1."""
    names = {
        "trainval": ("devkit/cars_train_annos.mat", "cars_train"),
        "test": ("cars_test_annos_withlabels.mat", "cars_test"),
    }
    name, folder = names[part]
    file = required_list(location, name)
    try:
        rows = read_mat(file, "annotations").ravel()
        found = [(f"{folder}/{row['fname'].item()!s}", int(row["class"].item()) - 1) for row in rows]
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise RawProblem(f"{file} holds no annotations with 'fname' and 'class'", UNCHANGED) from error
    return _known(location, file, found)


def _scenes(location: RawLocation, part: str) -> Images:
    """Read lines like `/a/apse/indoor/sun_x.jpg`; a class name lists its folders from the innermost outwards."""
    file = required_list(location, {"trainval": "Training_01.txt", "test": "Testing_01.txt"}[part])
    labels = {name: label for label, name in enumerate(published_classnames(location.dataset))}
    found = []
    for number, line in read_lines(file):
        path = line.strip().removeprefix("/")
        name = " ".join(reversed(path.split("/")[1:-1]))
        found.append((path, _label(labels, name, file, number)))
    return _known(location, file, found)


def _actions(location: RawLocation, part: str) -> Images:
    """Read lines like `YoYo/v_YoYo_g01_c01.avi 1`; the folder of its frame is the class name, `Yo_Yo`."""
    file = required_list(location, f"ucfTrainTestlist/{'train' if part == 'trainval' else part}list01.txt")
    labels = {name: label for label, name in enumerate(published_classnames(location.dataset))}
    found = []
    for number, line in read_lines(file):
        action, _, video = line.split()[0].partition("/")
        name = "_".join(re.findall("[A-Z][^A-Z]*", action))
        found.append((f"{name}/{video.removesuffix('.avi')}.jpg", _label(labels, name, file, number)))
    return _known(location, file, found)


def _label(labels: dict[str, int], name: str, file: Path, number: int) -> int:
    if name not in labels:
        raise RawProblem(f"{file}, line {number}: there is no class {name[:80]!a}", UNCHANGED)
    return labels[name]


def _known(location: RawLocation, file: Path, listed: Images) -> Images:
    """Check that untrusted lists name plain paths, each once, with labels of the data set."""
    for number, (path, label) in enumerate(listed, 1):
        reason = unsafe_path(path) or (
            "" if 0 <= label < location.dataset.classes else f"has the unknown class {label + 1}"
        )
        if reason:
            raise RawProblem(f"{file}, entry {number}: {path[:80]!a} {reason}", UNCHANGED)
    if len({path for path, _ in listed}) != len(listed):
        raise RawProblem(f"{file} lists an image twice", UNCHANGED)
    return listed
