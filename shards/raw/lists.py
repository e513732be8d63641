"""Read the official lists of the published data sets: split files, variant lists, class folders, train lists, labels.

The order of the lists is kept, because few-shot samples rest on it. The files are untrusted: they are read strictly and
without building objects. Class folders have no order of their own: CoOp takes that of the file system, here files are
sorted by name, so that few-shot draws are reproducible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shards.names import first_few, unsafe_path
from shards.raw.classnames import published_classnames
from shards.raw.folders import Images, Listing, RawProblem, is_image_name, list_folder
from shards.raw.locations import RawLocation, class_folder_names

SPLITS = ("train", "val", "test")
UNCHANGED = "put an unchanged copy of the published file there"


def read_published(location: RawLocation) -> Listing:
    """Read the lists or class folders of a data set. Raises RawProblem if a list is missing or broken."""
    layout = location.raw.layout
    if layout == "split-file":
        return _read_split_file(location)
    if layout == "variant-lists":
        return _read_variant_lists(location)
    prefixes = {"train": "train/", "test": "val/"} if layout == "imagenet" else {"test": ""}
    found = {split: scan_published_folders(location, prefix) for split, prefix in prefixes.items()}
    origin = {"imagenet": "ImageNet", "wnid-folders": "class", "numbered-folders": "numbered"}[layout]
    return Listing(
        location.images,
        published_classnames(location.dataset),
        {split: images for split, (images, _) in found.items()},
        f"{origin} folders, files sorted by name",
        True,
        tuple(problem for _, problems in found.values() for problem in problems),
    )


def scan_published_folders(location: RawLocation, prefix: str = "") -> tuple[Images, list[RawProblem]]:
    """List the images of the class folders below `location.images / prefix`, and what is wrong there."""
    root = location.images / prefix
    labels = {name: label for label, name in enumerate(class_folder_names(location.dataset))}
    found = list_folder(root) if root.is_dir() else {}
    folders = [name for name, kind in found.items() if kind == "folder"]
    images: Images = []
    strays: list[str] = []
    for name in sorted((name for name in folders if name in labels), key=labels.__getitem__):
        for file, kind in list_folder(root / name).items():
            path = f"{prefix}{name}/{file}"
            if kind == "file" and is_image_name(file) and not unsafe_path(file):
                images.append((path, labels[name]))
            else:
                strays.append(path)
    # The folder of the data set itself may hold others than those of the classes.
    if location.images != location.folder:
        strays = [f"{prefix}{name}" for name in folders if name not in (*labels, *location.raw.ignored)] + strays
    problems = []
    if strays:
        what = f"{location.images} holds {first_few(strays)}, neither class folders nor images"
        problems.append(RawProblem(what, "move them out of there"))
    if prefix and found and not folders:
        what = f"{root} holds {len(found):,} files and no class folder"
        sort = "unpack each archive into a folder of its name, or sort the validation images with valprep.sh of "
        problems.append(RawProblem(what, f"{sort}https://github.com/soumith/imagenetloader.torch"))
    return images, problems


def _read_split_file(location: RawLocation) -> Listing:
    name = location.raw.split_file
    file = location.find_list(name)
    if file is None:
        own = "or split the images yourself with --random-split SEED, which no published figure compares with"
        what = f"the official split file {location.folder / name} is missing"
        raise RawProblem(what, f"get {location.raw.get}; {own}")
    try:
        document = json.loads(file.read_bytes(), object_pairs_hook=_refuse_repeated_keys)
        if not isinstance(document, dict) or sorted(document) != sorted(SPLITS):
            raise ValueError("it should hold the lists train, val and test alone")
        if not document["train"] or not document["test"]:
            raise ValueError("its lists train and test should not be empty")
        classnames, splits = parse_split_lists(document)
    except OSError as error:
        raise RawProblem(f"{file} cannot be read ({error.strerror or error})", UNCHANGED) from error
    except (ValueError, RecursionError) as error:
        raise RawProblem(f"{file}: {' '.join(str(error).split())[:300]}", UNCHANGED) from error
    return Listing(location.images, classnames, splits, f"CoOp split {name}")


def _refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is given twice")
    return document


def parse_split_lists(document: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Images]]:
    """Parse CoOp's lists of `[path, label, class name]` per split: class names in label order, and the images.

    Raises ValueError, naming the entry, for impossible labels, a second name or image, and unsafe paths.
    """
    names: dict[int, str] = {}
    listed: set[str] = set()
    splits: dict[str, Images] = {}
    for split in SPLITS:
        if not isinstance(document.get(split, []), list):
            raise ValueError(f"'{split}' is no list of images")
        splits[split] = []
        for number, row in enumerate(document.get(split, []), 1):
            where = f"{split} entry {number}"
            if not isinstance(row, list) or list(map(type, row)) != [str, int, str]:
                raise ValueError(f"{where} is not [path, label, class name]")
            path, label, name = row
            reason = unsafe_path(path) or ("is listed twice" if path in listed else "")
            if reason:
                raise ValueError(f"{where}: {path[:80]!a} {reason}")
            if not name or name != name.strip() or not name.isprintable():
                raise ValueError(f"{where}: class name {name[:80]!a} is empty, or has outer blanks or line breaks")
            if label < 0 or names.setdefault(label, name) != name:
                raise ValueError(f"{where}: label {label} is negative, or {name!a} is its second name")
            listed.add(path)
            splits[split].append((path, label))
    absent = next((label for label in range(len(names)) if label not in names), None)
    if absent is not None:
        raise ValueError(f"no image has label {absent}, but labels go up to {max(names)}")
    return tuple(names[label] for label in range(len(names))), splits


def _read_variant_lists(location: RawLocation) -> Listing:
    """Read `variants.txt`, whose line number is the label, and `images_variant_<split>.txt`."""
    names_file = location.require_list("variants.txt")
    classnames = tuple(line.strip() for _, line in _read_lines(names_file))
    labels = {name: label for label, name in enumerate(classnames)}
    if len(labels) != len(classnames):
        raise RawProblem(f"{names_file} names a variant twice", UNCHANGED)
    splits: dict[str, Images] = {}
    listed: set[str] = set()
    for split in SPLITS:
        file, images = location.require_list(f"images_variant_{split}.txt"), []
        for number, line in _read_lines(file):
            image, _, name = line.strip().partition(" ")
            images.append((f"{image}.jpg", _find_label(labels, name, file, number)))
        splits[split] = _check_images(file, images, len(classnames), listed)
    return Listing(location.images, classnames, splits, "official variant lists")


def read_labelled_images(location: RawLocation) -> Images:
    """Read Flowers102's `imagelabels.mat`: the classes of `image_00001.jpg` and so on, counted from 1."""
    file = location.require_list("imagelabels.mat")
    try:
        labels = [int(label) - 1 for label in _read_mat(file, "labels").ravel()]
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RawProblem(f"{file} holds no list of numbers", UNCHANGED) from error
    images = [(f"image_{number:05d}.jpg", label) for number, label in enumerate(labels, 1)]
    return _check_images(file, images, location.dataset.classes)


def read_official_list(location: RawLocation, part: str) -> Images:
    """Read the official training list (`part` "trainval") or test list of Pets, Cars, SUN397 or UCF101."""
    train_list, test_list, read = OFFICIAL_LISTS[location.dataset.base]
    file = location.require_list(train_list if part == "trainval" else test_list)
    names = published_classnames(location.dataset)
    images = _check_images(file, list(read(file, {name: label for label, name in enumerate(names)})), len(names))
    if read is _pets:
        for number, (path, label) in enumerate(images, 1):
            if path.rpartition("_")[0].lower() != names[label]:
                raise RawProblem(f"{file}, entry {number}: {path!a} is listed as class {label + 1}", UNCHANGED)
    return images


def _pets(file: Path, labels: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Read lines of image name, class number from 1, species and breed number."""
    for number, line in _read_lines(file):
        match = re.match(r"(\S+) ([0-9]{1,9})( |$)", line.strip())
        if match is None:
            raise RawProblem(f"{file}, line {number}: {line[:80]!a} has no class number", UNCHANGED)
        yield f"{match[1]}.jpg", int(match[2]) - 1


def _cars(file: Path, labels: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Read annotations with a file name and a class number from 1; `cars_train*` is of the images in cars_train/."""
    folder = "cars_train" if file.name.startswith("cars_train") else "cars_test"
    try:
        for row in _read_mat(file, "annotations").ravel():
            yield f"{folder}/{row['fname'].item()!s}", int(row["class"].item()) - 1
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise RawProblem(f"{file} holds no annotations with 'fname' and 'class'", UNCHANGED) from error


def _scenes(file: Path, labels: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Read lines like `/a/apse/indoor/sun_x.jpg`; a class name lists its folders from the innermost outwards."""
    for number, line in _read_lines(file):
        path = line.strip().removeprefix("/")
        yield path, _find_label(labels, " ".join(reversed(path.split("/")[1:-1])), file, number)


def _actions(file: Path, labels: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Read lines like `YoYo/v_YoYo_g01_c01.avi 1`; the folder of its frame is the class name, `Yo_Yo`."""
    for number, line in _read_lines(file):
        action, _, video = line.split()[0].partition("/")
        name = "_".join(re.findall("[A-Z][^A-Z]*", action))
        yield f"{name}/{video.removesuffix('.avi')}.jpg", _find_label(labels, name, file, number)


OFFICIAL_LISTS = {
    "oxford-pets": ("annotations/trainval.txt", "annotations/test.txt", _pets),
    "stanford-cars": ("devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat", _cars),
    "sun397": ("Training_01.txt", "Testing_01.txt", _scenes),
    "ucf101": ("ucfTrainTestlist/trainlist01.txt", "ucfTrainTestlist/testlist01.txt", _actions),
}
"""Of each data set its list for training and validation, its list for testing, and the reader of both."""


def _find_label(labels: dict[str, int], name: str, file: Path, number: int) -> int:
    if name not in labels:
        raise RawProblem(f"{file}, line {number}: there is no class {name[:80]!a}", UNCHANGED)
    return labels[name]


def _check_images(file: Path, images: Images, classes: int, listed: set[str] | None = None) -> Images:
    """Check that a list names plain paths, each once, also in earlier lists (`listed`), with labels of the data set."""
    listed = set() if listed is None else listed
    for number, (path, label) in enumerate(images, 1):
        reason = unsafe_path(path) or ("is listed twice" if path in listed else "")
        reason = reason or ("" if 0 <= label < classes else f"has the unknown class {label + 1}")
        if reason:
            raise RawProblem(f"{file}, entry {number}: {path[:80]!a} {reason}", UNCHANGED)
        listed.add(path)
    return images


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Read the non-empty lines of a text file with their numbers. Raises RawProblem if it is no text file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RawProblem(f"{file} cannot be read ({reason})", UNCHANGED) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r")


def _read_mat(file: Path, name: str) -> Any:
    """Read one variable of a MATLAB file as a NumPy array. Raises RawProblem if file or variable is missing."""
    from scipy.io import loadmat

    try:
        # Structures become arrays with named fields, so the file cannot select a Python class.
        return loadmat(file, variable_names=[name], struct_as_record=True)[name]
    except KeyError as error:
        raise RawProblem(f"{file} holds no '{name}'", UNCHANGED) from error
    except Exception as error:
        # scipy's parser can raise any type of error for a damaged file.
        raise RawProblem(f"{file} is not a readable MATLAB file", UNCHANGED) from error
