"""List the images of class folders, or of class folders in folders of splits, and what else lies there.

All images below a class folder, at any depth, belong to its class, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import posixpath
import unicodedata
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from procap.errors import UserError
from shards.names import first_few, unsafe_path
from shards.raw.folders import describe_left_out, describe_unread, is_image_name, list_folder, walk_files
from shards.raw.published import SPLITS

SPLIT_WORDS = {
    "training": "train", "train": "train", "dev": "val", "validation": "val", "valid": "val", "val": "val",
    "testing": "test", "test": "test",
}  # fmt: skip
"""Names that folders of a split commonly have, with the split; several for one split are refused."""


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
        # Systems store accents in different ways; equal names are one class.
        return unicodedata.normalize("NFC", label) if isinstance(label, str) else label

    @field_validator("split")
    @classmethod
    def _name_split(cls, text: str) -> str:
        word = text.strip().lower()
        if word and word not in SPLIT_WORDS:
            raise ValueError(f"is none of {', '.join(SPLITS)}")
        return SPLIT_WORDS.get(word, "")


def list_class_folders(folder: Path) -> list[str]:
    """List the subfolders that are not hidden and no `LEAVINGS`."""
    return [name for name, entry in list_folder(folder).items() if entry == "folder"]


def find_class_root(folder: Path) -> str:
    """Return the relative path of the folder that holds the class folders or the folders of splits.

    It is `folder`, or what an archive has put around it: a folder that is alone, and holds folders itself.
    """
    path = ""
    while len(names := list_class_folders(folder / path)) == 1 and list_class_folders(folder / path / names[0]):
        # A single folder of images, without folders in it, is a class and ends the loop.
        path = posixpath.join(path, names[0])
    return path


def find_split_folders(root: Path) -> dict[str, str]:
    """Find the folders of splits by their common names; empty unless one of them holds folders.

    A class can be called "train". Without a folder for test, that for val has the test images.
    """
    names = {name.lower(): name for name in list_class_folders(root)}
    folders = {split: names[word] for word, split in SPLIT_WORDS.items() if word in names}
    if not any(list_class_folders(root / name) for name in folders.values()):
        return {}
    if "test" not in folders and "val" in folders:
        folders["test"] = folders.pop("val")
    return folders


def scan_folders(root: Path) -> tuple[list[ListedImage], list[str], list[str]]:
    """List the images of class folders, or of class folders in folders of splits, sorted by code point.

    Returns the images, problems, with which they are not packed, and notes of the files that are no images by name.
    """
    folders = list_class_folders(root)
    if not folders:
        raise UserError(f"folder: {root} has no class folders: it needs one folder of images per class")
    # The empty name stands for no split: class folders then lie in the root itself.
    splits = find_split_folders(root) or {"": ""}
    if "" not in splits and (class_folders := [name for name in folders if name not in splits.values()]):
        both = f"{', '.join(splits.values())} with classes inside and also {first_few(class_folders)}"
        raise UserError(f"folder: {root} holds {both}: one folder for each split, and no other, may lie there")
    images, problems = list[ListedImage](), list[str]()
    # What is not packed, and what `list_folder` says of it.
    unpacked: dict[str, str] = {}
    for split, prefix in splits.items():
        for name in list_class_folders(root / prefix):
            entries = dict(sorted(walk_files(root, posixpath.join(prefix, name))))
            # What is no file is listed too, and then reported or left out as an unreadable image.
            paths = [path for path, entry in entries.items() if entry in ("image", "other") and not unsafe_path(path)]
            images += [ListedImage(path=path, label=name, split=split) for path in paths]
            unpacked |= {path: entries[path] for path in entries.keys() - {*paths}}
            if not paths:
                hint = "remove the folder, or add its images"
                unread = [path for path, entry in entries.items() if entry != "leavings"]
                problems.append(f"folder: {root / prefix / name} holds no image{describe_unread(unread)}: {hint}")
    # Files next to the folders are left out as well, and named.
    for folder in dict.fromkeys(("", *splits.values())):
        for name, entry in list_folder(root / folder).items():
            if entry == "other" and not is_image_name(name):
                # It may stand for the images of a class.
                what = "is a link without a target, or no regular file"
                problems.append(f"folder: {root / folder / name} {what}: remove it, or mend it")
            elif entry != "folder":
                unpacked[posixpath.join(folder, name)] = entry
    leavings = sorted(path for path, entry in unpacked.items() if entry == "leavings")
    left_out = sorted(unpacked.keys() - {*leavings})
    notes = [describe_left_out(left_out, len(images))] if left_out else []
    notes += [f"not packed, because systems leave such folders: {first_few(leavings)}"] if leavings else []
    return images, problems, notes
