"""Find the raw files of a published data set below a raw root, and suggest a command if they lie elsewhere.

Folders are CoOp's or those that archives unpack to; advice covers archives that were not unpacked and folders that were
unpacked too deep.
"""

from __future__ import annotations

import os
import re
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shards.catalogue import CATALOGUE
from shards.dataset import Dataset, RawLayout
from shards.raw.classnames import imagenet_wnids, published_classnames
from shards.raw.folders import RawProblem, entries, is_file, is_folder

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

# Limits of the search for images that were unpacked too deep: levels below a folder, and folders that are listed.
_DEPTH = 4
_FOLDERS_SEARCHED = 500


@dataclass(frozen=True)
class RawLocation:
    """A data set found below a raw root.

    folder: the data set's own. images: what paths are relative to, None when no images were found.
    lists: the folders where a list may lie, in the order they are looked at.
    """

    dataset: Dataset
    raw_root: Path
    folder: Path
    images: Path | None
    lists: tuple[Path, ...]

    def find_list(self, name: str) -> Path | None:
        return next((folder / name for folder in self.lists if os.path.isfile(folder / name)), None)

    def require_images(self) -> Path:
        if self.images is None:
            raise ValueError(f"{self.folder} was found without images")
        return self.images


def raw_layout(dataset: Dataset) -> RawLayout:
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} has no raw files")
    return dataset.raw


def find_location(dataset: Dataset, raw_root: Path) -> RawLocation | None:
    """Find the folder that holds the images, CoOp's names first; else the first existing folder; else None."""
    raw = raw_layout(dataset)
    folders = [raw_root / folder for folder in raw.folders if os.path.isdir(raw_root / folder)]
    found = (
        (folder, folder / images) for folder in folders for images in raw.images if has_images(dataset, folder / images)
    )
    folder, images = next(found, (folders[0] if folders else None, None))
    if folder is None:
        return None
    return RawLocation(
        dataset, raw_root, folder, images, tuple(dict.fromkeys((folder, *folders, folder.parent, raw_root)))
    )


def has_images(dataset: Dataset, folder: Path) -> bool:
    """Whether at least one image or class folder of the data set lies in `folder` as its layout has them."""
    try:
        with os.scandir(folder) as found:
            if dataset.base in _FLAT:
                return any(_FLAT[dataset.base].fullmatch(entry.name) for entry in found)
            tops = class_folders(dataset)
            return any(entry.name in tops and is_folder(entry) for entry in found)
    except OSError:
        return False


@cache
def _wnids(indices: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(imagenet_wnids()[index] for index in indices) or imagenet_wnids()


def wnids(dataset: Dataset) -> tuple[str, ...]:
    """Return the WordNet ids of the classes in label order."""
    return _wnids(raw_layout(dataset).indices)


def class_folders(dataset: Dataset) -> tuple[str, ...] | frozenset[str]:
    """Return the names of the folders right inside the images' folder."""
    raw = raw_layout(dataset)
    if dataset.base in _TOP_FOLDERS:
        return _TOP_FOLDERS[dataset.base]
    if raw.layout == "wnid-folders":
        return frozenset(wnids(dataset))
    if raw.layout == "numbered-folders":
        return frozenset(map(str, range(dataset.classes)))
    return frozenset(folder_names(dataset))


def folder_names(dataset: Dataset) -> dict[str, str]:
    """Map class folders to class names, for sets with a folder per class; the two names can differ."""
    names = published_classnames(dataset)
    original = {new: old for old, new in raw_layout(dataset).renamed.items()}
    return {original.get(name, name): name for name in names}


def find_nested_images(dataset: Dataset, folder: Path) -> Path | None:
    """Find a folder below `folder` that holds images of the data set, deeper than its layout has them."""
    return next((inner for inner in inner_folders(folder) if has_images(dataset, inner)), None)


def inner_folders(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the folders below one, the nearest first, up to a limit that keeps it fast; links are not followed."""
    level, seen = [folder], 0
    for _ in range(depth):
        inner: list[Path] = []
        for outer in level:
            try:
                inner += [Path(entry.path) for entry in entries(outer) if is_folder(entry) and not entry.is_symlink()]
            except RawProblem:
                continue
            seen += 1
            if seen >= _FOLDERS_SEARCHED:
                return
        yield from inner
        level = inner


_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ARCHIVES = (*_TAR, ".zip", ".7z", ".rar")
# Archives of annotations and lists, which come with the archives of the images.
_LISTS = re.compile(r"annot|partition|devkit|label|list|segment|setid", re.IGNORECASE)


def unpack_advice(dataset: Dataset, raw_root: Path, location: RawLocation | None) -> str:
    """Return a command that moves or unpacks the images to their place; "" if there is nothing to move or unpack."""
    folder = location.folder if location else raw_root / raw_layout(dataset).folders[0]
    buried = find_nested_images(dataset, location.folder) if location else None
    if buried and raw_layout(dataset).layout == "numbered-folders" and not _is_named(dataset, buried):
        # All selections of ImageNetV2 have the same class numbers; only the folder's name distinguishes them.
        wanted = raw_layout(dataset).images[0]
        return f"{buried} may be another selection of images than {wanted}: get {raw_layout(dataset).get}"
    if buried:
        return _move(dataset, folder, buried)
    # Archives inside an unpacked archive come first: unpacking the outer one again would not help.
    inner = reversed(list(inner_folders(folder, depth=2))) if location else ()
    archives = [archive for within in (*inner, *([folder] if location else [])) for archive in _archives(within)]
    archives += [archive for archive in _archives(raw_root) if _owner(archive.name) == dataset.name]
    of_images = next((archive for archive in archives if not _LISTS.search(archive.name)), None)
    return _unpack(of_images, folder) if of_images else ""


def _is_named(dataset: Dataset, folder: Path) -> bool:
    return folder.name in (*raw_layout(dataset).images, *raw_layout(dataset).folders)


def _move(dataset: Dataset, folder: Path, buried: Path) -> str:
    images = raw_layout(dataset).images[0]
    if images == "." or buried.parts[-len(Path(images).parts) :] == Path(images).parts:
        outer = buried if images == "." else Path(*buried.parts[: -len(Path(images).parts)])
        return f"the images lie too deep: mv -i {shlex.quote(str(outer))}/* {shlex.quote(str(folder))}/"
    target = shlex.quote(str(folder / images))
    return f"the images lie elsewhere: mv -i {shlex.quote(str(buried))} {target}"


def _unpack(archive: Path, folder: Path) -> str:
    name = archive.name.lower()
    # ImageNet's archives hold nothing but images and class archives.
    inner = next((part for part in ("train", "val") if name == f"ilsvrc2012_img_{part}.tar"), None)
    source, target = shlex.quote(str(archive)), shlex.quote(str(folder / "images" / inner if inner else folder))
    if name.endswith(_TAR):
        return f"{archive.name} is not unpacked: mkdir -p {target} && tar -xf {source} -C {target}"
    if name.endswith(".zip"):
        return f"{archive.name} is not unpacked: unzip -q {source} -d {target}"
    return f"{archive.name} is not unpacked: unpack it into {target}"


def _archives(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(Path(one.path) for one in found if one.name.lower().endswith(ARCHIVES) and is_file(one))
    except OSError:
        return []


def _owner(archive: str) -> str:
    """Return the data set with the longest folder name or alias that the archive's name begins with."""
    name = _squeezed(archive)
    best = ("", "")
    for dataset in CATALOGUE.values():
        if dataset.raw:
            known = max((key for key in _keys(dataset) if name.startswith(key)), key=len, default="")
            best = max(best, (known, dataset.name), key=lambda found: len(found[0]))
    return best[1]


def _keys(dataset: Dataset) -> Iterable[str]:
    raw = raw_layout(dataset)
    spellings = (
        dataset.name,
        *dataset.aliases,
        *raw.folders,
        *(part for images in raw.images for part in images.split("/")),
    )
    return {key for key in map(_squeezed, spellings) if len(key) > 2 and key not in ("images", "data", "val")}


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
