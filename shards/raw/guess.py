"""Guess the YAML file of a folder of images: class folders, folders of splits, or a table."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from procap.errors import UsageError, UserError
from shards.catalogue import find_or_none
from shards.raw.class_folders import (
    ListedImage,
    find_class_root,
    find_split_folders,
    list_class_folders,
    scan_folders,
)
from shards.raw.description import read_description
from shards.raw.folders import list_folder, split_sizes
from shards.raw.tables import read_columns, read_table

HEADER = """\
# Guessed by `procap data pack {folder}`: {what}.
# Edit it and pack this file again; docs/data.md lists all keys.
"""
RULES = ({"train": 0.5, "val": 0.2, "test": 0.3}, {"train": 0.5, "test": 0.5})
"""Fractions of a random split; the second is for classes of two or three images."""
SEED = 1


def find_description(folder: Path) -> tuple[Path, str]:
    """Return the YAML file next to a folder, and its guessed content, "" if the file exists and describes the folder.

    Raises UsageError for a file that describes different images, UserError if no layout fits.
    """
    folder = folder.resolve()
    file = folder.with_name(f"{folder.name}.yaml")
    if file.exists():
        written = read_description(file)
        images = (file.parent / text for text in (written.folder, written.images, written.table) if text)
        if not any(path.resolve().is_relative_to(folder) for path in images):
            hint = "pack it by its name, or move it away"
            raise UsageError(f"{file} is there already and describes other images than {folder}; {hint}")
        return file, ""
    keys, what = guess_keys(folder)
    # A name has at most 64 letters, and `my-` may come in front.
    name = re.sub(r"[^a-z0-9.]+", "-", folder.name.lower()).strip("-.")[:60] or "images"
    name = f"my-{name}" if find_or_none(name) else name
    keys = {"name": name, "template": "a photo of a {}."} | keys
    # With None, PyYAML writes a mapping of texts alone on one line, also the outermost.
    flow = None if any(isinstance(value, dict) for value in keys.values()) else False
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=120)
    return file, HEADER.format(folder=folder.name, what=what) + text


def guess_keys(folder: Path) -> tuple[dict[str, Any], str]:
    """Guess how the images of a folder are labelled and split: the keys of its YAML file, and the guess in words."""
    tables = [name for name, entry in list_folder(folder).items() if entry == "file" and _is_table(folder / name)]
    if len(tables) > 1:
        raise UserError(f"{folder} holds several tables ({', '.join(tables)}): name one of them in a YAML file")
    if tables:
        return _guess_table(folder, tables[0])
    root = find_class_root(folder)
    if not list_class_folders(folder / root):
        needed = "it needs a folder of images per class, or a table labels.csv of path,label (docs/data.md)"
        raise UserError(f"{folder} holds no class folders with images: {needed}")
    keys: dict[str, Any] = {"folder": posixpath.join(folder.name, root).rstrip("/")}
    if splits := find_split_folders(folder / root):
        words = ", ".join(f"{split} from {name}/" for split, name in splits.items())
        return keys, f"folders of class folders, {words}"
    images = scan_folders(folder / root)[0]
    count = len({image.label for image in images})
    return keys | _guess_split(images), f"{count} class folder{'s' * (count != 1)}, split at random"


def _guess_split(images: Iterable[ListedImage]) -> dict[str, Any]:
    """Return the key of the random split that the smallest class allows."""
    # A class of one image, which is reported later, does not change the split of the others.
    sizes = [count for count in Counter(image.label for image in images).values() if count > 1] or [0]
    rule = next((rule for rule in RULES if all(split_sizes(count, rule) for count in sizes)), RULES[0])
    return {"split": {**rule, "seed": SEED}}


def _guess_table(folder: Path, table: str) -> tuple[dict[str, Any], str]:
    """Find the folder that the paths of a table are relative to, and whether it has splits."""
    images = read_table(folder / table)
    subfolders = ["", *list_class_folders(folder)]
    subfolder = next((name for name in subfolders if (folder / name / images[0].path).is_file()), "")
    keys = {"table": f"{folder.name}/{table}", "images": posixpath.join(folder.name, subfolder).rstrip("/")}
    if images[0].split:
        return keys, f"the table {table}, with its splits"
    return keys | _guess_split(images), f"the table {table}, split at random"


def _is_table(file: Path) -> bool:
    """Whether a file is a CSV or TSV with columns for paths and labels."""
    if file.suffix.lower() not in (".csv", ".tsv"):
        return False
    # No more than the header: a file without line ends can be of any size.
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        return {"path", "label"} <= {*read_columns(stream.readline(10_000))[1]}
