"""Parse comma lists, numbers and key=value flags; errors name the flag, the wrong part and the nearest known name."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from procap.errors import UsageError, unknown_name

MOST_NUMBERS = 10_000
"""Most numbers of a range: a billion would fill the memory."""


def split_names(text: str) -> list[str]:
    """Split a comma list; duplicates are dropped and the order is kept."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_class_names(text: str) -> list[str]:
    """Read the lines of a file, or split a comma list as CSV is: names with commas stand between quotes.

    Raises UsageError for fewer than two names, such as the name of a file that is not there; none is no choice.
    """
    is_file = os.path.isfile(text)
    try:
        lines = Path(text).read_text(encoding="utf-8-sig").splitlines() if is_file else []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--names {text} cannot be read ({error}): save it in UTF-8") from error
    names = lines if is_file else next(csv.reader([text], skipinitialspace=True), [])
    names = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if text and len(names) < 2:
        raise UsageError(f"--names {text}: two names or more, between commas, or a file with one a line are needed")
    return names


def expand_names(text: str, groups: Mapping[str, Iterable[str]], known: Iterable[str] = ()) -> list[str]:
    """Split a comma list and replace groups, in any case, by their members, without duplicates.

    known: names that a part may spell differently: CLIP-LoRA is cliplora, and LP++ is lppp.
    """
    by_spelling = {normalize(name): [name] for name in known} | {name: [*members] for name, members in groups.items()}
    names = (by_spelling.get(part.lower()) or by_spelling.get(normalize(part), [part]) for part in split_names(text))
    return list(dict.fromkeys(name for part in names for name in part))


def normalize(name: str) -> str:
    """Return the spelling of a method without capitals, dashes and blanks; + is p, as in lppp."""
    return re.sub(r"[-_\s]", "", name.lower().replace("+", "p"))


def expand_datasets(text: str, *, trained: bool = False) -> list[str]:
    """Expand the groups of a comma list of data sets. trained: leave out the members that have no training images."""
    from shards.catalogue import GROUPS

    groups = {
        name: [dataset.name for dataset in members if not (trained and dataset.test_only)]
        for name, members in GROUPS.items()
    }
    return expand_names(text, groups)


def parse_integers(text: str, flag: str) -> list[int]:
    """Parse a comma list of whole numbers and ranges such as 1-3. Raises UsageError naming the flag and the part."""
    numbers: list[int] = []
    for part in split_names(text):
        first, _, last = part.partition("-")
        last = last or first
        is_range = _is_number(first) and _is_number(last) and part[-1] != "-"
        if not (is_range and int(first) <= int(last)):
            raise UsageError(f"{flag}: '{part}' is not a whole number of 0 or more; for example {flag} 1,2,3 or 1-3")
        if int(last) - int(first) >= MOST_NUMBERS:
            raise UsageError(f"{flag}: '{part}' has more than {MOST_NUMBERS:,} numbers")
        numbers += range(int(first), int(last) + 1)
    return list(dict.fromkeys(numbers))


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


def expand_methods(text: str, table1: Iterable[str] = ()) -> list[str]:
    """Expand a comma list of methods: "all" is every installed one, "table1" those given; see `method_groups`."""
    from procap.methods import method_groups, method_paths

    known = list(method_paths())
    return expand_names(text, {"all": known, "table1": table1, **method_groups()}, known)


def parse_methods(text: str, table1: Iterable[str] = ()) -> list[str]:
    """Parse methods as `expand_methods`; UsageError for an unknown name and for a plug-in that cannot be loaded."""
    from procap.methods import METHODS, method_class, method_paths

    chosen = expand_methods(text, table1)
    if not chosen:
        raise UsageError(f"--methods is missing; for example --methods procap; known: {', '.join(method_paths())}")
    # Methods of this program are known to work, and importing one imports torch.
    for name in (name for name in chosen if name not in METHODS):
        method_class(name)
    return chosen


def parse_datasets(text: str, data: Path | None = None) -> list[str]:
    """Parse the data sets to train on, without duplicates.

    Names are groups, those of the catalogue and of what is packed in `data`. Raises UsageError for others.
    """
    from shards.resolve import resolve_dataset

    if not (names := expand_datasets(text, trained=True)):
        known = ", ".join(expand_datasets("all", trained=True))
        raise UsageError(f"--datasets is missing; for example --datasets shapes; known: {known}")
    return list(dict.fromkeys(resolve_dataset(name, data).name for name in names))


def parse_assignments(texts: Iterable[str], flag: str) -> dict[str, Any]:
    """Parse `key=value` texts; a value is JSON or text. Raises UsageError for others and for a key given twice."""
    assignments: dict[str, Any] = {}
    for item in texts:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{flag} {item}: write it as KEY=VALUE")
        if (name := key.strip()) in assignments:
            raise UsageError(f"{flag} {item}: {name} is given twice")
        try:
            assignments[name] = json.loads(text)
        except json.JSONDecodeError:
            assignments[name] = text
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
