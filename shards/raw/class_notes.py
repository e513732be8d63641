"""Notes on the classes of a user's images: how unequal they are, and likely mistakes in names and labels."""

from __future__ import annotations

import difflib
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from shards.raw.class_folders import Item
from shards.raw.folders import first_few, is_image_name, list_folder

UNEQUAL = 10
"""How many times as many images the largest class has if a note says so."""
RARE = 4
"""How many times fewer images a class has than the one whose name it may be a misspelling of."""
MOST_RARE = 50
"""Classes that are compared with all others."""
SIMILARITY = 0.8
AGREEMENT = 0.9
"""The share of images whose folder is called like their label, from which the others are likely mistakes."""


def describe_classes(counts: Mapping[str, int]) -> list[str]:
    """Describe unequal classes, a single class, and names that are likely two spellings of one class."""
    notes = []
    if len(counts) == 1:
        notes.append("there is one class: such a set can be evaluated, and nothing can be trained on it")
    least, most = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[least]:
        middle = statistics.median(counts.values())
        extremes = f"{counts[least]:,} ({least!r}) to {counts[most]:,} images ({most!r})"
        notes.append(f"classes are unequal: {extremes}, median {middle:g}")
    if single := [name for name, count in counts.items() if count == 1]:
        notes.append(
            f"{len(single):,} {'class has' if len(single) == 1 else 'classes have'} 1 image: {first_few(single)}"
        )
    spellings: dict[str, list[str]] = {}
    for name in counts:
        spellings.setdefault(_normalize(name), []).append(name)
    same = [names for names in spellings.values() if len(names) > 1]
    notes += [f"classes {' and '.join(map(repr, names))} differ in case, blanks or dashes alone" for names in same]
    rare = sorted(counts, key=lambda name: counts[name])[:MOST_RARE]
    for name in rare:
        larger = [other for other in counts if counts[other] >= RARE * counts[name] and _digits(other) == _digits(name)]
        if close := difflib.get_close_matches(name, larger, n=1, cutoff=SIMILARITY):
            notes.append(
                f"class {name!r} ({counts[name]:,}) may be a misspelling of {close[0]!r} ({counts[close[0]]:,} images)"
            )
    return notes


def compare_table(root: Path, items: Sequence[Item]) -> list[str]:
    """Describe the images that a table leaves out of its folders, and labels that differ from the folders' names."""
    listed = {item.path for item in items}
    folders = dict.fromkeys(item.path.rpartition("/")[0] for item in items)
    beside = [
        path
        for folder in folders
        for name, kind in list_folder(root / folder).items()
        if kind == "file" and is_image_name(name) and (path := f"{folder}/{name}".lstrip("/")) not in listed
    ]
    notes = [f"left out: {len(beside):,} images that the table does not list ({first_few(beside)})"] if beside else []
    differing = [
        item
        for item in items
        if _normalize(item.classname or str(item.label)) != _normalize(item.path.rpartition("/")[0].rpartition("/")[2])
    ]
    if differing and len(differing) <= (1 - AGREEMENT) * len(items):
        named = first_few([f"{item.path} is {item.classname or item.label}" for item in differing])
        number = "1 label differs" if len(differing) == 1 else f"{len(differing):,} labels differ"
        notes.append(f"{number} from the folder of the image: {named}")
    return notes


def _normalize(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def _digits(name: str) -> Counter[str]:
    """Count the digits of a name: classes such as `scene 1` and `scene 2` are no misspellings."""
    return Counter(letter for letter in name if letter.isdigit())
