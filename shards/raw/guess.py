"""Guess the YAML file of a folder of images: class folders, or folders of splits."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import yaml

from procap.errors import UsageError, UserError
from shards.catalogue import find_or_none
from shards.raw.class_folders import find_class_root, find_split_folders, list_class_folders
from shards.raw.description import read_description

HEADER = """\
# Guessed by `procap data pack {folder}`: {what}.
# Edit it and pack this file again; docs/data.md lists all keys.
"""
RANDOM_SPLIT = {"split": {"train": 0.5, "val": 0.2, "test": 0.3, "seed": 1}}


def find_description(folder: Path) -> tuple[Path, str]:
    """Return the YAML file beside a folder, and its guessed content, "" if the file exists and describes the folder.

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
    name = re.sub(r"[^a-z0-9.]+", "-", folder.name.lower()).strip("-.")[:60] or "images"
    name = f"my-{name}" if find_or_none(name) else name
    keys = {"name": name, "template": "a photo of a {}."} | keys
    # With None, PyYAML writes a mapping of texts alone on one line, also the outermost.
    flow = None if any(isinstance(value, dict) for value in keys.values()) else False
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=120)
    return file, HEADER.format(folder=folder.name, what=what) + text


def guess_keys(folder: Path) -> tuple[dict[str, Any], str]:
    """Guess how the images of a folder are labelled and split: the keys of its YAML file, and the guess in words."""
    root = find_class_root(folder)
    if not list_class_folders(folder / root):
        needed = "it needs a folder of images per class; a YAML file describes a table of path,label (docs/data.md)"
        raise UserError(f"{folder} holds no class folders with images: {needed}")
    keys: dict[str, Any] = {"folder": posixpath.join(folder.name, root).rstrip("/")}
    if splits := find_split_folders(folder / root):
        words = ", ".join(f"{split} from {name}/" for split, name in splits.items())
        return keys, f"folders of class folders, {words}"
    return keys | RANDOM_SPLIT, "class folders, split at random"
