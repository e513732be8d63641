"""What to type when images are not where they should be: archives that were not unpacked, folders unpacked too deep."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from shards.catalogue import CATALOGUE
from shards.dataset import Dataset
from shards.raw.folders import is_file
from shards.raw.places import Place, inner_folders, sheet, too_deep

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
ARCHIVES = (*_TAR, ".zip", ".7z", ".rar")
# Archives that come beside those of the images.
_LISTS = re.compile(r"annot|partition|devkit|label|list|segment|setid", re.IGNORECASE)


def unpack_advice(dataset: Dataset, raw_root: Path, place: Place | None) -> str:
    """A command that brings images in their place, or "" when nothing is there to be moved or unpacked."""
    folder = place.folder if place else raw_root / sheet(dataset).folders[0]
    buried = too_deep(dataset, place.folder) if place else None
    if buried and sheet(dataset).layout == "numbered-folders" and not _is_named(dataset, buried):
        # Class numbers alone look the same in every selection of ImageNetV2; only its folder's name tells which it is.
        wanted = sheet(dataset).images[0]
        return f"{buried} may be another selection of images than {wanted}: get {sheet(dataset).get}"
    if buried:
        return _move(dataset, folder, buried)
    # An archive inside an unpacked one comes first: the outer one would only bring it again.
    inner = reversed(list(inner_folders(folder, depth=2))) if place else ()
    archives = [archive for within in (*inner, *([folder] if place else [])) for archive in _archives(within)]
    archives += [archive for archive in _archives(raw_root) if _owner(archive.name) == dataset.name]
    of_images = next((archive for archive in archives if not _LISTS.search(archive.name)), None)
    return _unpack(of_images, folder) if of_images else ""


def _is_named(dataset: Dataset, folder: Path) -> bool:
    return folder.name in (*sheet(dataset).images, *sheet(dataset).folders)


def _move(dataset: Dataset, folder: Path, buried: Path) -> str:
    images = sheet(dataset).images[0]
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
    """The data set that an archive's name begins with, by the longest of the names that folders of it have."""
    name = _squeezed(archive)
    best = ("", "")
    for dataset in CATALOGUE.values():
        if dataset.raw:
            known = max((key for key in _keys(dataset) if name.startswith(key)), key=len, default="")
            best = max(best, (known, dataset.name), key=lambda found: len(found[0]))
    return best[1]


def _keys(dataset: Dataset) -> Iterable[str]:
    raw = sheet(dataset)
    spellings = (
        dataset.name,
        *dataset.aliases,
        *raw.folders,
        *(part for images in raw.images for part in images.split("/")),
    )
    return {key for key in map(_squeezed, spellings) if len(key) > 2 and key not in ("images", "data", "val")}


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
