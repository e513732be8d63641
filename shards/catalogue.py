"""Catalogue of data sets: their classes, sizes and prompts, and where their images come from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shards.dataset import Dataset, PublicShards, RawLayout
from shards.errors import DataUsageError, unknown_name
from shards.sources import DIGIT_COUNTS, DIGIT_NAMES
from shards.world.generate import FAMILIES, Family


def _generated(family: Family) -> Dataset:
    classes = len(family.classnames)
    return Dataset(
        name=family.name,
        classes=classes,
        counts={split: each * classes for split, each in family.splits.items()},
        template=family.template,
        templates=tuple(family.templates),
        source="world",
        licence="same as this program: drawn by it",
        description=family.description,
        classnames=tuple(family.classnames),
        aliases=("colored-shapes",) if family.name == "coloured-shapes" else (),
    )


_DIGITS = Dataset(
    name="digits",
    classes=len(DIGIT_NAMES),
    counts=DIGIT_COUNTS,
    template="a photo of the digit {}.",
    templates=("a photo of the digit {}", "a scan of the digit {}"),
    source="scans",
    licence="CC BY 4.0 (Alpaydin and Kaynak 1998, UCI Machine Learning Repository; shipped with scikit-learn)",
    description="real scans of handwritten digits, 8 x 8 pixels; split 50/20/30 per class",
    classnames=DIGIT_NAMES,
    aliases=("digit-scans", "scikit-learn-digits"),
)


def _load_published() -> tuple[Dataset, ...]:
    """Load the fifteen data sets of the CoOp benchmark from `published.toml`."""

    def freeze(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    datasets = []
    for fields in tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))["dataset"]:
        raw = freeze(fields.pop("raw"))
        public = PublicShards(**raw.pop("public", {}))
        datasets.append(Dataset(**freeze(fields), source="folder", raw=RawLayout(**raw, public=public)))
    return tuple(datasets)


PUBLISHED = _load_published()
CATALOGUE: Mapping[str, Dataset] = MappingProxyType(
    {dataset.name: dataset for dataset in (*map(_generated, FAMILIES.values()), _DIGITS, *PUBLISHED)}
)

# Words for several data sets on the command line; no data set may have such a name.
GROUPS = ("all", "paper", "world")

# The names of derived sets: caltech101-split7, dtd-subset, food101-256px, caltech101-split7-224px.
DERIVED = re.compile(r"(?P<base>.+?)(-split(?P<seed>[0-9]{1,99})|-(?P<subset>subset))?(-(?P<resize>[0-9]{1,9})px)?")


def find(name: str) -> Dataset:
    """Find a data set by name or alias, ignoring case, `-`, `_` and blanks.

    A derived set is found by its name too. Raises DataUsageError with the nearest names when there is none.
    """
    if dataset := _find_exactly(name):
        return dataset
    change = parse_name(name)
    base = _find_exactly(change.base)
    if base and base.source == "folder":
        return derive_dataset(base, random_split=change.random_split, subset=change.subset, resize=change.resize)
    spellings = [spelling for dataset in CATALOGUE.values() for spelling in (dataset.name, *dataset.aliases)]
    raise unknown_name("data set", name, spellings, sorted(CATALOGUE))


@dataclass(frozen=True)
class Change:
    """The parts of a derived set's name: the set it comes from, and the arguments of `derive_dataset`."""

    base: str
    random_split: int | None
    subset: bool
    resize: int | None


def parse_name(name: str) -> Change:
    """Read a name like `caltech101-split7-224px`; a name without such endings is its own base."""
    parts = DERIVED.fullmatch("-".join(name.lower().replace("_", " ").split()))
    if parts is None:
        return Change(name, None, False, None)
    seed, resize = (int(parts[key]) if parts[key] else None for key in ("seed", "resize"))
    return Change(parts["base"], seed, bool(parts["subset"]), resize)


def derive_dataset(
    dataset: Dataset, random_split: int | None = None, subset: bool = False, resize: int | None = None
) -> Dataset:
    """Derive a set from a published one, under another name: with another split, fewer images, or smaller ones.

    random_split: the seed of a random split. subset: only the files that are there. resize: pixels of the shorter
    side. Raises DataUsageError if that cannot be made.
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
    name, title = dataset.name + "".join(changes), dataset.title + "".join(changes)
    return replace(dataset, name=name, title=title, aliases=(), base=dataset.name, variant=", ".join(changes.values()))


def _find_exactly(name: str) -> Dataset | None:
    for dataset in CATALOGUE.values():
        if _normalize(name) in map(_normalize, (dataset.name, *dataset.aliases)):
            return dataset
    return None


def _normalize(name: str) -> str:
    return re.sub(r"[-_\s]+", "", name.lower())
