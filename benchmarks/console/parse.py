"""Parse comma lists, numbers and key=value flags; errors name the flag, the wrong part and the nearest known name."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from procap.errors import UsageError, unknown_name


def split_names(text: str) -> list[str]:
    """Split a comma list; duplicates are dropped and the order is kept."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_class_names(text: str) -> list[str]:
    """Read the lines of a file, or split a comma list as CSV is: names with commas stand between quotes."""
    is_file = os.path.isfile(text)
    lines = Path(text).read_text(encoding="utf-8-sig").splitlines() if is_file else []
    names = lines if is_file else next(csv.reader([text], skipinitialspace=True), [])
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))


def parse_integers(text: str, flag: str) -> list[int]:
    """Parse a comma list of whole numbers. Raises UsageError naming the flag and the invalid part."""
    parts = split_names(text)
    for part in parts:
        if not _is_number(part):
            raise UsageError(f"{flag}: '{part}' is not a whole number of 0 or more; for example {flag} 1,2,3")
    return list(dict.fromkeys(map(int, parts)))


def _is_number(text: str) -> bool:
    # `isdigit` accepts digits of all scripts and ², which int refuses; 20 digits may exceed 64 bits.
    return text.isascii() and text.isdigit() and len(text) < 20


def parse_shot_count(text: str) -> int:
    """Parse the number of training images per class; "full" gives 0, which stands for all of them."""
    if text.lower() in ("full", "all"):
        return 0
    if not _is_number(text.strip()) or int(text) == 0:
        raise UsageError(f"--shots {text}: one number of images per class is needed, 1 or more, or full")
    return int(text)


def parse_shot_counts(text: str) -> tuple[int, ...]:
    """Parse a comma list of shots without duplicates; an empty text gives none."""
    return tuple(dict.fromkeys(map(parse_shot_count, split_names(text))))


def parse_methods(text: str, table1: Iterable[str] = ()) -> list[str]:
    """Parse methods, without duplicates: "all" is every installed one, "table1" those given; see `METHOD_GROUPS`.

    Raises UsageError for an unknown name, and for a plug-in that cannot be loaded.
    """
    from procap.methods import METHOD_GROUPS, METHODS, method_class, method_paths

    known = list(method_paths())
    if not split_names(text):
        raise UsageError(f"--methods is missing; for example --methods procap; known: {', '.join(known)}")
    groups: dict[str, Iterable[str]] = {"all": known, "table1": table1, **METHOD_GROUPS}
    chosen = list(dict.fromkeys(name for part in split_names(text) for name in groups.get(part, [part])))
    # Methods of this program are known to work, and importing one imports torch.
    for name in (name for name in chosen if name not in METHODS):
        method_class(name)
    return chosen


def parse_datasets(text: str, data: Path | None = None) -> list[str]:
    """Parse the data sets to train on, without duplicates.

    Names are those of `dataset_groups`, the catalogue and what is packed in `data`. Raises UsageError for others.
    """
    from shards.resolve import resolve_dataset

    groups, parts = dataset_groups(), split_names(text)
    if not parts:
        raise UsageError(f"--datasets is missing; for example --datasets shapes; known: {', '.join(groups['all'])}")
    names = (name for part in parts for name in groups.get(part, [part]))
    return list(dict.fromkeys(resolve_dataset(name, data).name for name in names))


def dataset_groups() -> dict[str, list[str]]:
    """List the data sets to train on: "all" those that need no raw files, "paper" those that the paper trains on."""
    from shards.catalogue import CATALOGUE

    trained = [dataset for dataset in CATALOGUE.values() if not dataset.test_only]
    return {
        "all": [dataset.name for dataset in trained if dataset.images_from != "folder"],
        "paper": [dataset.name for dataset in trained if dataset.images_from == "folder"],
    }


def parse_assignments(texts: Iterable[str], flag: str) -> dict[str, Any]:
    """Parse `key=value` texts; a value is JSON if possible, else the text. Raises UsageError for other texts."""
    assignments: dict[str, Any] = {}
    for item in texts:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{flag} {item}: write it as KEY=VALUE")
        try:
            assignments[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            assignments[key.strip()] = text
    return assignments


def parse_options(texts: Iterable[str], methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse options per method from `key=value`, for every chosen method that has it, and `method.key=value`.

    Raises UsageError for a method that is not chosen, and an option that no chosen method has.
    """
    from procap.methods import method_class

    options: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for key, value in parse_assignments(texts, "--option").items():
        method, dot, name = key.rpartition(".")
        if dot and method not in options:
            raise UsageError(f"--option {key}: method '{method}' is not among the chosen: {', '.join(options)}")
        fields = {chosen: method_class(chosen).Options.model_fields for chosen in ([method] if dot else options)}
        owners = [method] if dot else [chosen for chosen, known in fields.items() if name in known]
        if not owners:
            known = {field for names in fields.values() for field in names}
            raise unknown_name(f"option of {', '.join(fields)}", name, known)
        for owner in owners:
            options[owner][name] = value
    return options
