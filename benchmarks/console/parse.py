"""Parse comma lists, numbers and key=value flags; errors name the flag, the wrong part and the nearest known name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.console.output import quoted
from procap.errors import UsageError


def split_names(text: str) -> list[str]:
    """Split a comma list; duplicates are dropped and the order is kept."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_integers(text: str, flag: str, example: str = "1,2,3") -> list[int]:
    """Parse a comma list of whole numbers. Raises UsageError naming the flag and the invalid part."""
    parts = split_names(text)
    for part in parts:
        if not part.isascii() or not part.isdigit():
            raise UsageError(f"{flag}: '{part}' is not a whole number of 0 or more; for example {flag} {example}")
    return list(dict.fromkeys(map(int, parts)))


def parse_shot_count(text: str) -> int:
    """Parse the number of training images per class, 0 for all of them."""
    if text.lower() in ("full", "all"):
        return 0
    parts = split_names(text)
    if len(parts) != 1 or not (parts[0].isascii() and parts[0].isdigit()):
        raise UsageError(f"--shots {text}: one number of images per class is needed, or full for all of them")
    return int(parts[0])


def parse_shot_counts(text: str) -> tuple[int, ...]:
    """Parse a comma list of shots without duplicates; "all" (0) must stand alone, an empty text gives none."""
    if len(split_names(text)) < 2:
        return (parse_shot_count(text),) if text else ()
    parts = split_names(text)
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--shots {text}: numbers of 1 or more are needed, as in --shots 1,2,4; full stands alone")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_methods(text: str) -> list[str]:
    """Parse methods; "all" is every installed method. Raises UsageError with the nearest known name."""
    from procap.methods import method_class, method_paths

    known = list(method_paths())
    if not split_names(text):
        raise UsageError(f"--methods is missing; for example --methods procap; known: {', '.join(known)}")
    chosen = known if text == "all" else split_names(text)
    for name in chosen:
        method_class(name)
    return chosen


def parse_datasets(text: str, data: Path | None = None) -> list[str]:
    """Parse the data sets to train on, without duplicates.

    "all" is every one of the catalogue with training images that needs no raw files, "paper" the eleven that the paper
    trains on, which must be packed in `data`. Other names are those of the catalogue and of what is packed in `data`.
    Raises UsageError or DataUsageError for an unknown name, a test set, and a set of the paper that is not packed.
    """
    from shards.catalogue import CATALOGUE
    from shards.resolve import resolve_dataset

    able = [name for name, dataset in CATALOGUE.items() if not dataset.test_only and dataset.source != "folder"]
    if not split_names(text):
        raise UsageError(f"--datasets is missing; for example --datasets shapes; known: {', '.join(able)}")
    groups = {"all": lambda: able, "paper": lambda: paper_datasets(data)}
    chosen = [
        resolve_dataset(name, data)
        for part in split_names(text)
        for name in (groups[part]() if part in groups else [part])
    ]
    for dataset in chosen:
        if dataset.test_only:
            raise UsageError(
                f"'{dataset.name}' has test images only, nothing can be trained on it; "
                f"test on it with `procap eval --targets {dataset.name}`, train on one of: {', '.join(able)}"
            )
    return list(dict.fromkeys(dataset.name for dataset in chosen))


def paper_datasets(data: Path | None) -> list[str]:
    """List the eleven data sets of the paper. Raises UsageError naming those that are not packed in `data`."""
    from shards.catalogue import CATALOGUE
    from shards.resolve import is_packed

    paper = [name for name, dataset in CATALOGUE.items() if dataset.source == "folder" and not dataset.test_only]
    missing = [name for name in paper if data is None or not is_packed(data, name)]
    if missing:
        where = f" --data {quoted(data)}" if data else ""
        raise UsageError(
            f"'paper' is the {len(paper)} training sets of the paper; {len(missing)} are not packed: "
            f"{', '.join(missing)}; pack them: procap data pack {' '.join(missing)} --raw FOLDER{where}"
        )
    return paper


def parse_options(given: Iterable[str], methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse options per method from `key=value` (for every chosen method) and `method.key=value`.

    A value is parsed as JSON if possible (4, 0.5, false, null, [1, 2]), else it is the text itself.
    """
    options: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--option {item}: write it as key=value, for example --option n_ctx=4")
        value = parse_value(text)
        owner, dot, field = key.strip().partition(".")
        if dot and owner not in options:
            raise UsageError(f"--option {item}: method '{owner}' is not among the chosen: {', '.join(options)}")
        for method in [owner] if dot else options:
            options[method][field if dot else owner] = value
    return options


def parse_value(text: str) -> Any:
    """Parse JSON, or return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
