"""Read official lists of images: CoOp's split files, FGVCAircraft's variant lists, other text and MATLAB files.

The order of the lists is kept, because few-shot samples rest on it. The files are untrusted: they are read strictly and
without building objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.raw.folders import UNCHANGED, Listing, RawProblem, Rows, unsafe_path
from shards.raw.locations import RawLocation, raw_layout


def required_list(location: RawLocation, name: str) -> Path:
    """Find a list. Raises RawProblem naming the place where the file belongs."""
    file = location.find_list(name)
    if file is None:
        raise RawProblem(
            f"{location.folder / name} is missing", f"put it there: get {raw_layout(location.dataset).get}"
        )
    return file


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Read the non-empty lines of a text file with their numbers. Raises RawProblem if it is no text file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RawProblem(f"{file} cannot be read ({reason})", UNCHANGED) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r")


def read_mat(file: Path, name: str) -> Any:
    """Read one variable of a MATLAB file as a NumPy array. Raises RawProblem if file or variable is missing."""
    from scipy.io import loadmat

    try:
        # Structures become arrays with named fields, so the file cannot select a Python class.
        return loadmat(file, variable_names=[name], struct_as_record=True)[name]
    except KeyError as error:
        raise RawProblem(f"{file} holds no '{name}'", UNCHANGED) from error
    except OSError as error:
        raise RawProblem(f"{file} cannot be read ({error.strerror or error})", UNCHANGED) from error
    except Exception as error:
        # scipy's parser can raise any type of error for a damaged file.
        raise RawProblem(f"{file} is not a readable MATLAB file", UNCHANGED) from error


SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SplitFile:
    """A valid split file: class names in label order, and the images of each split."""

    classnames: tuple[str, ...]
    splits: dict[str, Rows]


def read_split_file(file: Path) -> SplitFile:
    """Read a split file. Raises RawProblem, naming the entry, for any other content.

    Labels must be 0..C-1 with one name each, no image may be listed twice, and paths must stay inside their folder.
    """
    document = _document(file)
    names: dict[int, str] = {}
    seen: set[str] = set()
    splits: dict[str, Rows] = {}
    for split in SPLITS:
        paths, labels = [], []
        for number, row in enumerate(document[split], 1):
            path, label, name = _checked_row(row, file, split, number)
            if path in seen:
                raise _broken(file, split, number, f"{path!r} is listed twice")
            if names.setdefault(label, name) != name:
                raise _broken(file, split, number, f"label {label} is {names[label]!r} and {name!r}")
            seen.add(path)
            paths.append(path)
            labels.append(label)
        splits[split] = Rows(paths, labels)
    if sorted(names) != list(range(len(names))):
        absent = next(label for label in range(len(names) + 1) if label not in names)
        raise RawProblem(f"{file}: no image has label {absent}, but labels go up to {max(names)}", UNCHANGED)
    return SplitFile(tuple(names[label] for label in range(len(names))), splits)


def _document(file: Path) -> dict[str, list[object]]:
    try:
        document = json.loads(file.read_bytes(), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise RawProblem(f"{file} cannot be read ({error.strerror or error})", UNCHANGED) from error
    except (ValueError, RecursionError) as error:
        raise RawProblem(f"{file} is not a split file: no JSON ({_one_line(error)})", UNCHANGED) from error
    if not isinstance(document, dict) or sorted(document) != sorted(SPLITS):
        raise RawProblem(f"{file} is not a split file: it should hold the lists train, val and test alone", UNCHANGED)
    for split in SPLITS:
        if not isinstance(document[split], list) or (not document[split] and split != "val"):
            raise RawProblem(f"{file} is not a split file: '{split}' should be a list of images", UNCHANGED)
    return document


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is given twice")
    return document


def _checked_row(row: object, file: Path, split: str, number: int) -> tuple[str, int, str]:
    if not isinstance(row, list) or len(row) != 3:
        raise _broken(file, split, number, "it should be [path, label, class name]")
    path, label, name = row
    if not isinstance(path, str) or not isinstance(name, str):
        raise _broken(file, split, number, "path and class name should be text")
    if type(label) is not int or label < 0:
        raise _broken(file, split, number, f"label {_short(label)} is not a whole number from 0")
    reason = unsafe_path(path)
    if reason:
        raise _broken(file, split, number, f"{_short(path)} {reason}")
    if not name or name != name.strip() or not name.isprintable():
        raise _broken(file, split, number, f"class name {_short(name)} is empty, or has outer blanks or line breaks")
    return path, label, name


def _broken(file: Path, split: str, number: int, reason: str) -> RawProblem:
    return RawProblem(f"{file}: {split} entry {number}: {reason}", UNCHANGED)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]


def read_variant_lists(location: RawLocation) -> Listing:
    """Read `variants.txt`, whose line number is the label, and `images_variant_<split>.txt`.

    Raises RawProblem for a list that is missing or has a line that it should not have.
    """
    images = location.require_images()
    names_file = required_list(location, "variants.txt")
    classnames = tuple(line.strip() for _, line in read_lines(names_file))
    labels = {name: label for label, name in enumerate(classnames)}
    if len(labels) != len(classnames):
        raise RawProblem(f"{names_file} names a variant twice", UNCHANGED)
    seen: set[str] = set()
    splits = {split: _split(required_list(location, f"images_variant_{split}.txt"), labels, seen) for split in SPLITS}
    return Listing(images, classnames, splits, "official variant lists")


def _split(file: Path, labels: dict[str, int], seen: set[str]) -> Rows:
    """`seen` holds the images of the splits that were read before."""
    paths, found = [], []
    for number, line in read_lines(file):
        image, _, name = line.strip().partition(" ")
        path = f"{image}.jpg"
        reason = unsafe_path(path) or ("" if name in labels else f"names the unknown variant {name!a}")
        reason = reason or ("is an image that was listed before" if path in seen else "")
        if reason:
            raise RawProblem(f"{file}, line {number}: {line[:80]!a} {reason}", UNCHANGED)
        seen.add(path)
        paths.append(path)
        found.append(labels[name])
    return Rows(paths, found)
