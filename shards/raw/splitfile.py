"""CoOp's split files: `split_zhou_<Name>.json`, lists of [relative path, label, class name] for train, val and test.

The order of the lists is kept: few-shot draws rest on it. The file is untrusted and read strictly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shards.raw.folders import UNCHANGED, RawProblem, Rows, unsafe_path

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class SplitFile:
    """A split file that holds what it should: class names in label order, and the images of each split."""

    classnames: tuple[str, ...]
    splits: dict[str, Rows]


def read_split_file(file: Path) -> SplitFile:
    """Raises RawProblem, naming the entry, for anything that is not such a list.

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
