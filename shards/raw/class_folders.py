"""List the images of class folders, or of class folders in folders of splits, and what else lies there."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from procap.errors import UserError
from shards.names import Finding, first_few, unsafe_path
from shards.raw.folders import is_image_name, list_folder
from shards.raw.published import SPLITS

TABLES = (".csv", ".tsv", ".json")
"""Endings of tables of images."""
JUNK_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx"))
JUNK_EXTENSIONS = frozenset(("txt", "md", "csv", "tsv", "json", "xml", "yaml", "yml", "html", "log", "pdf"))
"""Names that operating systems, archives and notes leave in folders of images; any other file there is a problem."""

LeftOut = dict[str, list[str]]
"""Paths that are left out and counted, by what they are."""

# Folders below a folder of a user that are searched for class folders: how deep, and how many of a level.
MAX_DEPTH = 3
MAX_FOLDERS = 200


class ListedImage(BaseModel):
    """One image: its path, its label as the data give it (text or number), and its split if given."""

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
    def _name_split(cls, given: str) -> str:
        word = given.strip().lower()
        if found := [split for split, words in SPLIT_WORDS.items() if word in words]:
            return found[0]
        if word:
            raise ValueError(f"is none of {', '.join(SPLITS)}")
        return ""


def list_class_folders(folder: Path) -> list[str]:
    """List the subfolders that are not hidden or left by an archive."""
    return [name for name, kind in list_folder(folder).items() if kind == "folder" and name.lower() not in JUNK_NAMES]


def has_class_folders(folder: Path) -> bool:
    """Whether subfolders hold images, or all have them in a subfolder of one name."""
    holds_images = any(_has_images(folder / name) for name in list_class_folders(folder)[:MAX_FOLDERS])
    return holds_images or bool(find_common_subfolder(folder))


def find_common_subfolder(folder: Path) -> str:
    """Return the name of the one subfolder in which all class folders have their images, as in Tiny ImageNet, or ""."""
    classes = list_class_folders(folder)
    names = {name for one in classes[:MAX_FOLDERS] for name in list_class_folders(folder / one) or [""]}
    name = names.pop() if len(names) == 1 and len(classes) > 1 else ""
    holds = [_has_images(folder / one / name) and not _has_images(folder / one) for one in classes if name]
    return name if any(holds) and all(holds) else ""


def _has_images(folder: Path, *, beside: bool = True) -> bool:
    """Whether a folder holds images: more than a few beside folders of images, unless not `beside`."""
    count = sum(kind == "file" and is_image_name(name) for name, kind in list_folder(folder).items())
    inner = list_class_folders(folder)[:MAX_FOLDERS] if beside and count else []
    return count > 0 and count >= sum(_has_images(folder / name, beside=False) for name in inner)


def find_class_roots(root: Path) -> list[str]:
    """Find the nearest folders below `root` that hold class folders, or folders of splits; relative paths."""
    level = [""]
    for _ in range(MAX_DEPTH):
        level = [posixpath.join(path, name) for path in level for name in list_class_folders(root / path)][:MAX_FOLDERS]
        found = [path for path in level if has_class_folders(root / path)]
        if found:
            split_words = {word for words in SPLIT_WORDS.values() for word in words}
            is_split = [posixpath.basename(path).lower() in split_words for path in found]
            return list(dict.fromkeys(posixpath.dirname(p) if s else p for p, s in zip(found, is_split, strict=True)))
    return []


SPLIT_WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
"""Names that folders of a split commonly have."""


def find_split_folders(root: Path) -> dict[str, str]:
    """Find the folders of splits by their common names; empty unless one of them holds class folders.

    A class can be called "train". Without a folder for test, that for val has the test images.
    """
    names = {name.lower(): name for name in list_class_folders(root)}
    found = {split: next((names[w] for w in words if w in names), "") for split, words in SPLIT_WORDS.items()}
    found = {split: name for split, name in found.items() if name}
    if not any(has_class_folders(root / name) for name in found.values()):
        return {}
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    return found


def find_nested_folders(root: Path) -> list[str]:
    """List the folders that hold class folders while others hold images; none of folders of splits."""
    flat = {name: _has_images(root / name) for name in list_class_folders(root)[:MAX_FOLDERS]}
    if not any(flat.values()) or find_split_folders(root):
        return []
    return [name for name, is_flat in flat.items() if not is_flat and has_class_folders(root / name)]


def scan_folders(
    root: Path, splits: Mapping[str, str] | None = None, given: str = ""
) -> tuple[list[ListedImage], list[str], list[str]]:
    """List the images of class folders, or of class folders in train, val and test, sorted by code point.

    Returns the images, problems, with which they are not packed, and notes of what was left out.

    splits: the folder of each split; by default a folder called train, val or test that contains folders is one.
    given: the folder as the user wrote it, for messages. Hidden files and what lies beside class folders are noted.
    """
    if not root.is_dir():
        state = "a file" if root.exists() else "not there"
        raise UserError(f"folder: {root} is {state}; name the folder of the images")
    folders = list_class_folders(root)
    if not folders:
        raise UserError(f"folder: {root} holds no class folders: it needs one folder of images per class")
    items: list[ListedImage] = []
    problems: list[str] = []
    if not splits:
        present = {split: split for split in SPLITS if split in folders}
        splits = present if any(list_class_folders(root / split) for split in present) else {"": ""}
    elif absent := [name for name in splits.values() if not (root / name).is_dir()]:
        raise UserError(f"splits: {root} has no folder {first_few(absent)}; it has {first_few(folders)}")
    if "" not in splits and (others := [name for name in folders if name not in splits.values()]):
        beside = f"{', '.join(splits.values())} with classes inside and also {first_few(others)}"
        rename = "; splits: {train: ..., test: ...} names the folders of splits"
        raise UserError(f"folder: {root} holds {beside}: nothing may lie beside the folders of splits{rename}")
    left_out: LeftOut = {}
    strays: list[str] = []
    for split, prefix in splits.items():
        inner = find_common_subfolder(root / prefix)
        for name in list_class_folders(root / prefix):
            folder = posixpath.join(prefix, name)
            paths, others = _scan(root, posixpath.join(folder, inner).rstrip("/"), left_out)
            if inner:
                _scan_beside(root, folder, left_out)
            items.extend(ListedImage(path=path, label=name, split=split) for path in paths)
            strays += others
            if not paths and not others:
                problems.append(f"folder: {root / folder} holds no image: remove the folder, or add its images")
    for folder in {"", *splits.values()}:
        _scan_beside(root, folder, left_out)
    if not items and (roots := find_class_roots(root)):
        choices = " or ".join(posixpath.normpath(posixpath.join(given, path)) for path in roots[:3])
        raise UserError(f"folder: {root} holds no images in its class folders: did you mean folder: {choices}?")
    if strays:
        end = f", {len(strays):,} in all, no images of a known kind, or folders: move them away"
        problems.append(Finding.make(f"folder: {root} holds ", [*map(ascii, strays)], end))
    notes: list[str] = [
        Finding.make(f"left out: {what}: {len(names):,} (", [*map(ascii, names)], ")")
        for what, names in sorted(left_out.items())
    ]
    if tables := [ascii(name) for name in list_folder(root) if name.lower().endswith(TABLES)]:
        notes.append(Finding.make("warning: labels are those of the folders, and not read from ", tables))
    return items, problems, notes


def _scan(root: Path, folder: str, left_out: LeftOut) -> tuple[list[str], list[str]]:
    """Return the paths of a folder's images and of its other entries; what is known to be none goes to `left_out`."""
    images: list[str] = []
    others: list[str] = []
    for name, kind in list_folder(root / folder, hidden=True).items():
        path = posixpath.join(folder, name)
        is_image = is_image_name(name) and not unsafe_path(path)
        if name.startswith("."):
            left_out.setdefault("hidden images" if is_image else "hidden entries", []).append(path)
        elif name.lower() in JUNK_NAMES or name.rpartition(".")[2].lower() in JUNK_EXTENSIONS:
            left_out.setdefault("files that are no images", []).append(path)
        else:
            (images if kind == "file" and is_image else others).append(path)
    return images, others


def _scan_beside(root: Path, folder: str, left_out: LeftOut) -> None:
    """Add the files beside class folders to `left_out`."""
    images, others = _scan(root, folder, left_out)
    files = [path for path in others if not (root / path).is_dir()]
    for what, paths in (("images beside the class folders", images), ("files that are no images", files)):
        if paths:
            left_out.setdefault(what, []).extend(paths)
