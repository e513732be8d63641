"""Find published data sets below a raw root, and read their official lists: split files, variant lists, class folders.

The order of the lists is kept, because few-shot samples rest on it. The files are untrusted: they are read strictly and
without building objects. Class folders have no order of their own: CoOp takes that of the file system, here files are
sorted by name, so that few-shot draws are reproducible.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shards.catalogue import Dataset, RawLayout
from shards.errors import DataError, describe_invalid
from shards.files import read_file
from shards.names import first_few, unsafe_path
from shards.raw.classnames import imagenet_wnids, published_classnames
from shards.raw.folders import Images, Listing, is_image_name, list_folder, small_classes, split_classes

SPLITS = ("train", "val", "test")
FRACTIONS = {"train": 0.5, "val": 0.2, "test": 0.3}
"""CoOp's random split."""
SplitFile = TypeAdapter(dict[str, list[tuple[str, int, str]]])
UNCHANGED = "put an unchanged copy of the published file there"


@dataclass(frozen=True)
class RawLocation:
    """Where a data set lies below a raw root.

    images: what paths are relative to. lists: the folders where a list may lie, in the order they are looked at.
    """

    dataset: Dataset
    raw: RawLayout
    folder: Path
    images: Path
    lists: tuple[Path, ...]

    def find_list(self, name: str) -> Path:
        """Find a list; if it is nowhere, return the place where it belongs."""
        places = [folder / name for folder in self.lists]
        return next(filter(os.path.isfile, places), self.folder / name)


def raw_layout(dataset: Dataset) -> RawLayout:
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} has no raw files")
    return dataset.raw


def find_folder(dataset: Dataset, raw_root: Path) -> Path | None:
    """Find the folder of a data set below a raw root: the first with a folder of images, else the first, else None."""
    raw = raw_layout(dataset)
    folders = [raw_root / name for name in raw.folders if os.path.isdir(raw_root / name)]
    inner = [images for images in raw.images if images != "."]
    holding = (folder for folder in folders if any(os.path.isdir(folder / images) for images in inner))
    return next(holding, folders[0] if folders else None)


def find_location(dataset: Dataset, raw_root: Path) -> RawLocation:
    """Find the images of a data set. Raises DataError with the place where they belong."""
    raw, folder = raw_layout(dataset), find_folder(dataset, raw_root)
    # Report a folder without read permission, which otherwise looks empty.
    list_folder(folder or raw_root)
    place = (folder or raw_root / raw.folders[0]) / raw.images[0]
    if folder is None:
        what = f"there is no folder {raw.folders[0]} in {raw_root}"
        raise DataError(f"{what}; get {raw.get}; the images belong into {place}")
    images = next((folder / images for images in raw.images if os.path.isdir(folder / images)), None)
    if images is None:
        raise DataError(f"there is no folder {place}; get {raw.get}; the images belong there")
    folders = (raw_root / name for name in raw.folders if os.path.isdir(raw_root / name))
    return RawLocation(dataset, raw, folder, images, tuple(dict.fromkeys((folder, *folders, folder.parent, raw_root))))


def class_folder_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the class folders in label order; they can differ from the class names."""
    raw = raw_layout(dataset)
    if raw.layout == "numbered-folders":
        return tuple(map(str, range(dataset.classes)))
    if raw.layout in ("imagenet", "wnid-folders"):
        wnids = imagenet_wnids()
        return tuple(wnids[index] for index in raw.indices) or wnids
    original = {new: old for old, new in raw.renamed.items()}
    return tuple(original.get(name, name) for name in published_classnames(dataset))


def read_published(location: RawLocation) -> Listing:
    """Read the lists or class folders of a data set. Raises DataError if a list is missing or broken."""
    layout = location.raw.layout
    if layout == "split-file":
        return _read_split_file(location)
    if layout == "variant-lists":
        return _read_variant_lists(location)
    prefixes = {"train": "train/", "test": "val/"} if layout == "imagenet" else {"test": ""}
    found = {split: _scan_class_folders(location, prefix) for split, prefix in prefixes.items()}
    origin = {"imagenet": "ImageNet", "wnid-folders": "class", "numbered-folders": "numbered"}[layout]
    return Listing(
        location.images,
        published_classnames(location.dataset),
        {split: images for split, (images, _) in found.items()},
        f"{origin} folders, files sorted by name",
        True,
        tuple(problem for _, problems in found.values() for problem in problems),
    )


def make_random_split(location: RawLocation, seed: int) -> Listing:
    """Split the images of the class folders at random; class names and labels are the published ones."""
    names = published_classnames(location.dataset)
    images, problems = _scan_class_folders(location)
    for problem in small_classes(images, names, FRACTIONS):
        raise DataError(f"no random split can be made: {problem}")
    splits = split_classes(images, FRACTIONS, seed)
    origin = f"random split of the class folders, seed {seed}"
    return Listing(location.images, names, splits, origin, True, tuple(problems))


def _scan_class_folders(location: RawLocation, prefix: str = "") -> tuple[Images, list[str]]:
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
        problems.append(f"{what}; move them out of there")
    if prefix and found and not folders:
        problems.append(f"{root} holds {len(found):,} files and no class folder; sort them into class folders")
    return images, problems


def _read_split_file(location: RawLocation) -> Listing:
    """Read CoOp's lists of `[path, label, class name]` per split; labels, names and paths must fit together."""
    file = location.find_list(location.raw.split_file)
    names: dict[int, str] = {}
    listed: set[str] = set()
    try:
        document = SplitFile.validate_json(read_file(file), strict=True)
        if sorted(document) != sorted(SPLITS) or not document["train"] or not document["test"]:
            raise ValueError("it should hold the lists train, val and test alone, and images to train and test on")
        document = {split: document[split] for split in SPLITS}
        for split, rows in document.items():
            for number, (path, label, name) in enumerate(rows, 1):
                where = f"{split} entry {number}"
                if reason := unsafe_path(path) or ("is listed twice" if path in listed else ""):
                    raise ValueError(f"{where}: {path[:80]!a} {reason}")
                if not name or name != name.strip() or not name.isprintable():
                    raise ValueError(f"{where}: class name {name[:80]!a} is empty, or has outer blanks or line breaks")
                if label < 0 or names.setdefault(label, name) != name:
                    raise ValueError(f"{where}: label {label} is negative, or {name!a} is its second name")
                listed.add(path)
        if absent := [label for label in range(len(names)) if label not in names]:
            raise ValueError(f"no image has label {absent[0]}, but labels go up to {max(names)}")
    except FileNotFoundError:
        own = "; or split the images yourself with --random-split SEED" if location.raw.random_split else ""
        raise DataError(f"the official split file {file} is missing; get {location.raw.get}{own}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}); {UNCHANGED}") from error
    except ValueError as error:
        reason = describe_invalid(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{file}: {reason[:300]}; {UNCHANGED}") from error
    splits = {split: [(path, label) for path, label, _ in rows] for split, rows in document.items()}
    classnames = tuple(names[label] for label in range(len(names)))
    return Listing(location.images, classnames, splits, f"CoOp split {location.raw.split_file}")


def _read_variant_lists(location: RawLocation) -> Listing:
    """Read `variants.txt`, whose line number is the label, and `images_variant_<split>.txt`."""
    classnames = tuple(name for _, _, name in _read_lines(location, "variants.txt"))
    labels = {name: label for label, name in enumerate(classnames)}
    if len(labels) != len(classnames):
        raise DataError(f"{location.find_list('variants.txt')} names a variant twice; {UNCHANGED}")
    splits: dict[str, Images] = {split: [] for split in SPLITS}
    listed: set[str] = set()
    for split, images in splits.items():
        for file, number, line in _read_lines(location, f"images_variant_{split}.txt"):
            image, _, name = line.partition(" ")
            path = f"{image}.jpg"
            reason = unsafe_path(path) or ("is listed twice" if path in listed else "")
            reason = reason or ("" if name in labels else f"is of no class, but of {name[:80]!a}")
            if reason:
                raise DataError(f"{file}, line {number}: {path[:80]!a} {reason}; {UNCHANGED}")
            listed.add(path)
            images.append((path, labels[name]))
    return Listing(location.images, classnames, splits, "official variant lists")


def _read_lines(location: RawLocation, name: str) -> Iterator[tuple[Path, int, str]]:
    """Yield the file and the number of each line of a list that is not empty, and the line without outer blanks."""
    file = location.find_list(name)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{file} is missing; put it there: get {location.raw.get}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"{file} cannot be read ({reason}); {UNCHANGED}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield file, number, line.strip()
