"""List the images of class folders, or of class folders in folders of splits, and what else lies there.

All images below a class folder, at any depth, belong to its class, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from procap.errors import UserError
from shards.names import first_few, unsafe_path
from shards.raw.folders import is_image_name, list_folder
from shards.raw.published import SPLITS

JUNK_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx"))
JUNK_EXTENSIONS = frozenset(("txt", "md", "csv", "tsv", "json", "xml", "yaml", "yml", "html", "log", "pdf"))
"""Names that operating systems, archives and notes leave in folders of images; different files there are a problem."""

SPLIT_WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""Names that folders of a split commonly have."""

# Folders below a folder of a user that are searched for class folders: how deep, and how many of a level.
MAX_DEPTH = 3
MAX_FOLDERS = 200


class ListedImage(BaseModel):
    """One image: its path, its label as the data give it (text or number), and its split or ""."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str
    label: str | int
    split: str = ""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if reason := unsafe_path(path):
            raise ValueError(reason)
        return path

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str | int) -> str | int:
        if label == "" or (isinstance(label, int) and label < 0):
            raise ValueError("is neither text nor a number of 0 or more")
        return label

    @field_validator("split")
    @classmethod
    def _name_split(cls, text: str) -> str:
        word = text.strip().lower()
        if not word:
            return ""
        for split, words in SPLIT_WORDS.items():
            if word in words:
                return split
        raise ValueError(f"is none of {', '.join(SPLITS)}")


def list_class_folders(folder: Path) -> list[str]:
    """List the subfolders that are not hidden or left by an archive."""
    return [name for name, entry in list_folder(folder).items() if entry == "folder" and name.lower() not in JUNK_NAMES]


def find_class_roots(root: Path) -> list[str]:
    """Find the nearest folders below `root`, or `root` itself, that hold class folders or folders of splits.

    Returns relative paths. A folder holds class folders if two of its subfolders hold images, directly or all in a
    subfolder of the same name (`<class>/images`, as in Tiny ImageNet), or if no deeper folder does and one holds some.
    """
    for fewest in (2, 1):
        level = [""]
        for _ in range(MAX_DEPTH + 1):
            roots = [path for path in level if count_class_folders(root / path) >= fewest]
            if roots:
                split_words = {word for words in SPLIT_WORDS.values() for word in words}
                parents = (
                    posixpath.dirname(path) if posixpath.basename(path).lower() in split_words else path
                    for path in roots
                )
                return list(dict.fromkeys(parents))
            subfolders = [posixpath.join(path, name) for path in level for name in list_class_folders(root / path)]
            level = subfolders[:MAX_FOLDERS]
    return []


def count_class_folders(folder: Path) -> int:
    """Count the subfolders that hold images, directly or all in a subfolder of the same name."""
    subfolders = [folder / name for name in list_class_folders(folder)[:MAX_FOLDERS]]
    direct = sum(_has_images(subfolder) for subfolder in subfolders)
    inner = {tuple(list_class_folders(subfolder)) for subfolder in subfolders}
    if direct or len(subfolders) < 2 or len(inner) != 1 or len(names := inner.pop()) != 1:
        return direct
    return sum(_has_images(subfolder / names[0]) for subfolder in subfolders)


def _has_images(folder: Path) -> bool:
    return any(entry == "file" and is_image_name(name) for name, entry in list_folder(folder).items())


def find_split_folders(root: Path) -> dict[str, str]:
    """Find the folders of splits by their common names; empty unless one of them holds class folders.

    A class can be called "train". Without a folder for test, that for val has the test images.
    """
    names = {name.lower(): name for name in list_class_folders(root)}
    folders = {split: next((names[w] for w in words if w in names), "") for split, words in SPLIT_WORDS.items()}
    folders = {split: name for split, name in folders.items() if name}
    if not any(count_class_folders(root / name) for name in folders.values()):
        return {}
    if "test" not in folders and "val" in folders:
        folders["test"] = folders.pop("val")
    return folders


def scan_folders(root: Path, splits: Mapping[str, str] | None = None) -> tuple[list[ListedImage], list[str], list[str]]:
    """List the images of class folders, or of class folders in train, val and test, sorted by code point.

    Returns the images, problems, with which they are not packed, and notes of what was left out.

    splits: the folder of each split; by default a folder called train, val or test that contains folders is one.
    """
    if not root.is_dir():
        state = "a file" if root.exists() else "not there"
        raise UserError(f"folder: {root} is {state}; name the folder of the images")
    folders = list_class_folders(root)
    if not folders:
        raise UserError(f"folder: {root} has no class folders: it needs one folder of images per class")
    if not splits:
        present = {split: split for split in SPLITS if split in folders}
        splits = present if any(list_class_folders(root / split) for split in present) else {"": ""}
    elif absent := [name for name in splits.values() if not (root / name).is_dir()]:
        raise UserError(f"splits: {root} has no folder {first_few(absent)}; it has {first_few(folders)}")
    if "" not in splits and (others := [name for name in folders if name not in splits.values()]):
        both = f"{', '.join(splits.values())} with classes inside and also {first_few(others)}"
        rename = "; splits: {train: ..., test: ...} names the folders of splits"
        raise UserError(f"folder: {root} holds {both}: only folders of splits may lie there{rename}")
    images: list[ListedImage] = []
    problems: list[str] = []
    left_out: list[str] = []
    for split, prefix in splits.items():
        for name in list_class_folders(root / prefix):
            paths, others = _scan_class(root, posixpath.join(prefix, name))
            images += [ListedImage(path=path, label=name, split=split) for path in paths]
            unknown = [path for path in others if not _is_junk(path)]
            left_out += [path for path in others if _is_junk(path)]
            if unknown:
                what = f"{first_few(unknown)}, {len(unknown):,} in all, no images of a known format: move them away"
                problems.append(f"folder: {root} holds {what}")
            elif not paths:
                problems.append(f"folder: {root / prefix / name} holds no image: remove the folder, or add its images")
    for folder in {"", *splits.values()}:
        entries = list_folder(root / folder).items()
        left_out += [posixpath.join(folder, name) for name, entry in entries if entry == "file"]
    notes = [f"left out: {len(left_out):,} files: {first_few(left_out)}"] if left_out else []
    return images, problems, notes


def _scan_class(root: Path, folder: str) -> tuple[list[str], list[str]]:
    """Return the paths of all images below a class folder, sorted, and of the files that are no images."""
    images: list[str] = []
    others: list[str] = []
    for path, entry in _walk(root, folder):
        (images if entry == "file" and is_image_name(path) and not unsafe_path(path) else others).append(path)
    return sorted(images), others


def _walk(root: Path, folder: str) -> Iterator[tuple[str, str]]:
    """Yield each file below a folder that is not hidden, and what it is; links are followed."""
    for name, entry in list_folder(root / folder).items():
        path = posixpath.join(folder, name)
        if entry != "folder":
            yield path, entry
        # A link to a folder that it lies in has no end.
        elif not os.path.realpath(root / folder).startswith(os.path.realpath(root / path)):
            yield from _walk(root, path)


def _is_junk(path: str) -> bool:
    name = posixpath.basename(path).lower()
    return name in JUNK_NAMES or name.rpartition(".")[2] in JUNK_EXTENSIONS
