"""Guess the YAML file of a folder of images: class folders, folders of splits, or a table."""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from procap.errors import UsageError, UserError
from shards.catalogue import GROUPS, find, find_or_none
from shards.names import first_few, require_text
from shards.raw.class_folders import SPLIT_WORDS, find_class_root, find_split_folders, list_class_folders, scan_folders
from shards.raw.description import read_description
from shards.raw.folders import describe_unread, list_folder, split_sizes, walk_files
from shards.raw.published import SPLITS, imagenet_wnids, published_classnames
from shards.raw.tables import Table, find_base, may_name_split, read_lines, read_tables, split_of

HEADER = """\
# Guessed by `procap data pack {folder}`: {what}.
# Edit it and pack this file again; docs/data.md lists all keys.
"""
RULES = ({"train": 0.5, "val": 0.2, "test": 0.3}, {"train": 0.5, "test": 0.5})
"""Fractions of a random split; the second is for classes of two or three images."""
SEED = 1
MAX_SIDE = 512
"""Pixels that are kept of the short side: backbones read 224 to 336 of them, cameras write 3,000."""
CONTENTS = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels", "annotations", "data", "set"}
"""Words that, like those of splits, name folders of files but no class."""
TABLE = re.compile(r".*\.(csv|tsv|jsonl)|.*(label|annotation).*\.(txt|json|xlsx?|ods|parquet)")
"""Names, in lower case, of files that may label the images next to them."""


def find_description_file(folder: Path, max_side: int | None = None) -> tuple[Path, str]:
    """Return the YAML file of a folder, and its guessed content, "" if the file exists and describes the folder.

    It lies next to the folder, or in the working directory if nothing can be written there.
    max_side: as in the file; 0 keeps images as they are, None is `MAX_SIDE`.
    Raises UsageError for a file that describes different images or has another `max_side`, UserError if no layout fits.
    """
    folder = folder.resolve()
    require_text(folder)
    if not folder.name:
        raise UsageError(f"{folder} is no folder of images")
    file = folder.with_name(f"{folder.name}.yaml")
    if not file.exists() and not os.access(folder.parent, os.W_OK):
        file = Path.cwd() / file.name
    if file.exists():
        written = read_description(file)
        images = (file.parent / text for text in (written.folder, written.images, *written.tables.values()) if text)
        if not any(path.resolve().is_relative_to(folder) for path in images):
            hint = "pack it by its name, or move it away"
            raise UsageError(f"{file} is there already and describes other images than {folder}; {hint}")
        if max_side is not None and max_side != (written.max_side or 0):
            raise UsageError(f"{file} is there already: change max_side in it, and pack it again")
        return file, ""
    keys, what, labels = guess_keys(folder)
    if len(labels) < 2:
        layout = "put the images of each class into a folder, or add a table labels.csv of path,label"
        unread = _describe_files(folder)
        raise UserError(f"{folder} has one class, {first_few([*map(str, labels)])}{unread}: {layout}; or write {file}")
    if file.parent != folder.parent:

        def locate(value: Any) -> Any:
            if isinstance(value, dict):
                return {split: locate(table) for split, table in value.items()}
            return str(folder.parent / value)

        keys |= {key: locate(keys[key]) for key in ("folder", "table", "images") if key in keys}
    # A name has at most 64 letters, and `my-` may come in front.
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())[:60].strip("-") or "images"
    name = f"my-{name}" if find_or_none(name) or name in GROUPS else name
    keys = {"name": name, "template": "a photo of a {}."} | keys
    if names := _guess_names(labels):
        keys["classes"] = names
        what += "\n# Note: numbers or WordNet ids of class folders do not go into prompts, see classes"
    if side := MAX_SIDE if max_side is None else max_side:
        keys["max_side"] = side
        what += f"\n# Larger JPEG and PNG images are stored with {side} pixels on the short side, see max_side"
    text = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=120)
    return file, HEADER.format(folder=folder.name, what=what) + text


def guess_keys(folder: Path) -> tuple[dict[str, Any], str, set[str | int]]:
    """Guess how the images of a folder are labelled and split: the keys of its YAML file, the guess, the labels."""
    keys: dict[str, Any]
    tables, base = _find_tables(folder)
    if tables:
        images = read_tables({split: folder / name for split, name in tables.items()}, folder / base)
        named = {split: f"{folder.name}/{name}" for split, name in tables.items()}
        keys = {"table": named.get("", named), "images": posixpath.join(folder.name, base).rstrip("/")}
        keys |= {} if images[0].split else _guess_split(image.label for image in images)
        how = "with its splits" if images[0].split else "split at random"
        listed = {image.path for image in images}
        unlisted = [path for path, entry in walk_files(folder / base) if entry == "image" and path not in listed]
        how += f", without {len(unlisted):,} images that it does not list ({first_few(unlisted)})" if unlisted else ""
        if "" in tables:
            how += _note_unread(Table(read_lines(folder / tables[""]), folder / base).unread_splits)
        what = f"the table{'s' * (len(tables) > 1)} {' and '.join(tables.values())}"
        return keys, f"{what}, {how}", {image.label for image in images}
    root = find_class_root(folder)
    names = list_class_folders(folder / root)
    keys = {"folder": posixpath.join(folder.name, root).rstrip("/")}
    splits = find_split_folders(folder / root)
    for prefix in splits.values() or [""]:
        _check_class_folders(folder / root / prefix)
    images = scan_folders(folder / root)[0]
    labels = {image.label for image in images}
    if splits:
        words = ", ".join(f"{split} from {name}/" for split, name in splits.items())
        return keys, f"folders of class folders, {words}", labels
    # An empty folder is reported later.
    labels = labels if len(labels) > 1 else {*names}
    split = _guess_split(image.label for image in images)
    lists = [name for name, entry in list_folder(folder).items() if entry == "file" and may_name_split(name)]
    return keys | split, f"{len(names)} class folders, split at random{_note_unread(lists)}", labels


def _note_unread(names: Sequence[str]) -> str:
    """Return a line on columns or files that may say a split, which is not followed; "" without names."""
    hint = f"if it should, write {', '.join(SPLITS)} into a column split of a table"
    what = f"{first_few(names)} may say which images are for training, and the split does not follow it: {hint}"
    return f"\n# Note: {what}" if names else ""


def _describe_files(folder: Path) -> str:
    """Describe the files in a folder of which none was understood as labels, in parentheses; "" without files."""
    return describe_unread([name for name, entry in list_folder(folder).items() if entry != "folder"])


def _check_class_folders(root: Path) -> None:
    """Raise UserError for folders called like splits or `CONTENTS`, or with the same folders inside (color/, grey/)."""
    names = list_class_folders(root)
    usual = SPLIT_WORDS.keys() | (CONTENTS if len(names) > 1 else set())
    if all({*re.split("[ _-]", name.lower())} <= usual for name in names):
        what = f"{first_few(names)}, which are names of splits or kinds of files" if names else "no folders"
        what += _describe_files(root)
        hint = "put the images of each class into a folder, such as train/CLASS, or add a table of path,label,split"
        raise UserError(f"{root} holds {what}: {hint}; for images of no class see docs/data.md")
    inner = {name: list_folder(root / name) for name in names}
    counts = Counter(sub for entries in inner.values() for sub, entry in entries.items() if entry == "folder")
    shared = [name for name, count in counts.items() if count > 1]
    if len(shared) > 1 and not any("image" in entries.values() for entries in inner.values()):
        what = f"{root}: the folders {first_few(names)} hold no images but the same folders, {first_few(shared)}"
        hint = f"pack the one that has the classes, or put the classes into folders of splits, such as train/{names[0]}"
        raise UserError(f"{what}, so it is not clear which are the classes: {hint}")


def _guess_names(labels: Collection[str | int]) -> dict[str, str]:
    """Map labels that are ImageNet's WordNet ids, or have a running number in front, to names for prompts."""
    texts = sorted(map(str, labels))
    known = dict(zip(imagenet_wnids(), published_classnames(find("imagenet")), strict=True))
    if {*texts} <= known.keys():
        counts = Counter(known[text] for text in texts)
        return {text: known[text] if counts[known[text]] == 1 else f"{known[text]} ({text})" for text in texts}
    numbered = [match for text in texts if (match := re.fullmatch(r"(\d{1,6})[._ -]+(\D.*)", text, re.ASCII))]
    numbers, names = sorted(int(match[1]) for match in numbered), {match[0]: match[2] for match in numbered}
    is_running = numbers == [*range(min(numbers, default=0), min(numbers, default=0) + len(texts))]
    return names if is_running and len({*names.values()}) == len(texts) else {}


def _guess_split(labels: Iterable[str | int]) -> dict[str, Any]:
    """Return the key of the random split that the smallest class allows."""
    # A class of one image, which is reported later, does not change the split of the others.
    sizes = [count for count in Counter(labels).values() if count > 1] or [0]
    rule = next(
        (rule for rule in RULES if all(min(split_sizes(count, rule).values()) > 0 for count in sizes)), RULES[0]
    )
    return {"split": {**rule, "seed": SEED}}


def _find_tables(folder: Path) -> tuple[dict[str, str], str]:
    """Find the tables of labels in a folder by their splits, "" if it is one; also the folder that its paths are in.

    Raises UserError for several that are not of splits, and if none says which column labels the images.
    """
    names = [name for name, entry in list_folder(folder).items() if entry == "file" and TABLE.fullmatch(name.lower())]
    # The Hub's tables lie next to the images.
    inner = (f"{name}/metadata{ending}" for name in list_class_folders(folder) for ending in (".csv", ".jsonl"))
    labelled, unclear = dict[str, str](), list[str]()
    for name in (*names, *(name for name in inner if (folder / name).is_file())):
        lines, above = read_lines(folder / name), posixpath.dirname(name)
        base = posixpath.join(above, find_base(lines, folder / above, split_of(name))).rstrip("/")
        table = Table(lines, folder / base)
        labelled |= {name: base} if table.is_labelled else {}
        unclear += [f"{name} ({table})"] if table.is_unclear else []
    if unclear and not labelled:
        raise UserError(f"{folder}: it is not clear how this labels the images: {unclear[0]}; or move the table away")
    if len(labelled) == 1:
        [(name, base)] = labelled.items()
        return {"": name}, base
    tables = {split_of(name): name for name in labelled}
    if "" in tables or len(tables) < len(labelled):
        hint = "join them, with a column split, or name one of them in a YAML file"
        raise UserError(f"{folder} holds several tables ({', '.join(labelled)}): {hint}")
    return tables, ""
