"""Find the raw files of a published data set below a raw root."""

from __future__ import annotations

import os
import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shards.catalogue import Dataset, RawLayout
from shards.raw.classnames import imagenet_wnids, published_classnames
from shards.raw.folders import RawProblem, list_folder

# Subfolders by which a folder of images is recognised, for sets without class folders or a flat list of images there.
_TOP_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "imagenet": ("train", "val"),
    "stanford-cars": ("cars_train", "cars_test"),
    "sun397": tuple(string.ascii_lowercase),
}
# File names of images that lie in one folder; trimaps and segmentations of the same sets have other names.
_FLAT: Mapping[str, re.Pattern[str]] = {
    "oxford-pets": re.compile(r"[^.].*_[0-9]+\.jpg"),
    "oxford-flowers": re.compile(r"image_[0-9]{5}\.jpg"),
    "fgvc-aircraft": re.compile(r"[0-9]{7}\.jpg"),
}


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

    def find_list(self, name: str) -> Path | None:
        return next((folder / name for folder in self.lists if os.path.isfile(folder / name)), None)

    def require_list(self, name: str) -> Path:
        """Find a list. Raises RawProblem naming the place where the file belongs."""
        file = self.find_list(name)
        if file is None:
            raise RawProblem(f"{self.folder / name} is missing", f"put it there: get {self.raw.get}")
        return file


def raw_layout(dataset: Dataset) -> RawLayout:
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} has no raw files")
    return dataset.raw


def find_folder(dataset: Dataset, raw_root: Path) -> Path | None:
    """Find the folder of a data set below a raw root: the first with images, else the first that exists, else None."""
    raw = raw_layout(dataset)
    folders = [raw_root / name for name in raw.folders if os.path.isdir(raw_root / name)]
    holding = (folder for folder in folders if any(has_images(dataset, folder / images) for images in raw.images))
    return next(holding, folders[0] if folders else None)


def find_location(dataset: Dataset, raw_root: Path) -> RawLocation:
    """Find the images of a data set. Raises RawProblem with the place where they belong."""
    raw, folder = raw_layout(dataset), find_folder(dataset, raw_root)
    if folder is not None:
        images = next((folder / images for images in raw.images if has_images(dataset, folder / images)), None)
        if images is not None:
            folders = (raw_root / name for name in raw.folders if os.path.isdir(raw_root / name))
            lists = tuple(dict.fromkeys((folder, *folders, folder.parent, raw_root)))
            return RawLocation(dataset, raw, folder, images, lists)
        what = f"no images in {' or '.join(str(folder / images) for images in raw.images[:2])}"
    else:
        what = f"there is no folder {raw.folders[0]} in {raw_root}"
        if not os.path.isdir(raw_root):
            raise RawProblem(f"{raw_root} is no folder", f"name the folder that holds {raw.folders[0]}/")
        if raw_root.resolve().name in raw.folders or any(
            has_images(dataset, raw_root / images) for images in raw.images
        ):
            raise RawProblem(what, f"name the folder above it: {shlex.quote(str(raw_root.resolve().parent))}")
    # Report a folder without read permission, which otherwise looks empty.
    list_folder(folder or raw_root)
    place = (folder or raw_root / raw.folders[0]) / raw.images[0]
    raise RawProblem(what, f"get {raw.get}; the images belong into {place}")


def has_images(dataset: Dataset, folder: Path) -> bool:
    """Whether at least one image or class folder of the data set lies in `folder` as its layout has them."""
    try:
        found = list_folder(folder)
    except RawProblem:
        return False
    if dataset.base in _FLAT:
        return any(_FLAT[dataset.base].fullmatch(name) for name in found)
    tops = _TOP_FOLDERS.get(dataset.base) or class_folder_names(dataset)
    return any(found.get(name) == "folder" for name in tops)


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
