"""Catalogue of data sets: their classes, sizes and prompts, and where their images come from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shards.dataset import Dataset, RawLayout
from shards.errors import DataUsageError, unknown_name
from shards.world.generate import CLASSNAMES


def _load_catalogue() -> dict[str, Dataset]:
    def freeze(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    datasets = {}
    for fields in tomllib.loads((Path(__file__).parent / "datasets.toml").read_text(encoding="utf-8"))["dataset"]:
        if raw := fields.pop("raw", None):
            fields |= {"source": "folder", "raw": RawLayout(**freeze(raw))}
        fields.setdefault("classnames", CLASSNAMES.get(fields["name"], ()))
        datasets[fields["name"]] = Dataset(**freeze(fields))
    return datasets


CATALOGUE: Mapping[str, Dataset] = MappingProxyType(_load_catalogue())
PUBLISHED = tuple(dataset for dataset in CATALOGUE.values() if dataset.source == "folder")

# Words for several data sets on the command line; no data set may have such a name.
GROUPS = ("all", "paper", "world")

# The names of derived sets: caltech101-split7, dtd-subset, food101-256px, caltech101-split7-224px.
DERIVED = re.compile(
    r"(?P<base>.+?)(-split(?P<random_split>[0-9]{1,99})|-(?P<subset>subset))?(-(?P<resize>[0-9]{1,9})px)?"
)


def find(name: str) -> Dataset:
    """Find a data set, or derive one, by name or alias, ignoring case, `-`, `_` and blanks."""
    if dataset := _find_exactly(name):
        return dataset
    base_name, changes = parse_name(name)
    base = _find_exactly(base_name)
    if base and base.source == "folder":
        return derive_dataset(base, **changes)
    spellings = [spelling for dataset in CATALOGUE.values() for spelling in (dataset.name, *dataset.aliases)]
    raise unknown_name("data set", name, spellings, sorted(CATALOGUE))


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """Parse a name like `caltech101-split7-224px`: the base, and the changes that `derive_dataset` makes to it.

    A name without such endings is its own base.
    """
    parts = DERIVED.fullmatch("-".join(name.lower().replace("_", " ").split()))
    if parts is None:
        return name, {}
    numbers = {key: int(parts[key]) for key in ("random_split", "resize") if parts[key]}
    return parts["base"], {"subset": bool(parts["subset"]), **numbers}


def derive_dataset(
    dataset: Dataset, random_split: int | None = None, subset: bool = False, resize: int | None = None
) -> Dataset:
    """Derive a set from a published one, under another name: with another split, fewer images, or smaller ones.

    Raises DataUsageError if that cannot be made.
    """
    if random_split is None and not subset and resize is None:
        return dataset
    if dataset.source != "folder" or dataset.variant:
        raise DataUsageError(
            f"'{dataset.name}' is packed as it is: random splits, subsets and sizes are for raw folders"
        )
    if random_split is not None and subset:
        raise DataUsageError("--random-split takes the images that are there: leave out --subset")
    if random_split is not None and not (dataset.raw and dataset.raw.random_split):
        raise DataUsageError(f"'{dataset.name}' has an official split in its folders or lists: no random split is made")
    if resize is not None and resize < 16:
        raise DataUsageError(f"--resize {resize}: at least 16 pixels on the shorter side")
    changes: dict[str, str] = {}
    if random_split is not None:
        changes[f"-split{random_split}"] = f"random split, seed {random_split}"
    if subset:
        changes["-subset"] = "subset of the images"
    if resize is not None:
        changes[f"-{resize}px"] = f"resized to {resize} pixels on the shorter side"
    return replace(
        dataset,
        name=dataset.name + "".join(changes),
        title=dataset.title + "".join(changes),
        aliases=(),
        variant=", ".join(changes.values()),
        random_split=random_split,
        subset=subset,
        resize=resize,
    )


def _find_exactly(name: str) -> Dataset | None:
    for dataset in CATALOGUE.values():
        if _normalize(name) in map(_normalize, (dataset.name, *dataset.aliases)):
            return dataset
    return None


def _normalize(name: str) -> str:
    return re.sub(r"[-_\s]+", "", name.lower())
