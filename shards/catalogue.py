"""The data sets this program knows by name: what they hold and where their images come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from shards import digits
from shards.errors import unknown_name
from shards.world import FAMILIES, Family


@dataclass(frozen=True)
class Dataset:
    """One row of the catalogue.

    template: the hand-written prompt of the CoOp family, one `{}` and a full stop.
    templates: the prompts that initialise learned tokens, one `{}` each, without full stop.
    counts: images per split; a `test_only` set has no other split than "test".
    source: "world" is drawn from numbers, "scans" ships with scikit-learn, "folder" is read from raw files of the user.
    """

    name: str
    classes: int
    counts: Mapping[str, int]
    template: str
    templates: tuple[str, ...]
    source: Literal["world", "scans", "folder"]
    licence: str
    description: str
    classnames: tuple[str, ...] = field(default=(), repr=False)
    aliases: tuple[str, ...] = ()

    @property
    def test_only(self) -> bool:
        return set(self.counts) == {"test"}


ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({"coloured-shapes": ("colored-shapes",)})


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
        aliases=ALIASES.get(family.name, ()),
    )


_DIGITS = Dataset(
    name="digits",
    classes=len(digits.CLASSNAMES),
    counts=digits.COUNTS,
    template="a photo of the digit {}.",
    templates=("a photo of the digit {}", "a scan of the digit {}"),
    source="scans",
    licence="CC BY 4.0 (Alpaydin and Kaynak 1998, UCI Machine Learning Repository; shipped with scikit-learn)",
    description="real scans of handwritten digits, 8 x 8 pixels; split 50/20/30 per class",
    classnames=digits.CLASSNAMES,
    aliases=("digit-scans", "scikit-learn-digits"),
)

CATALOGUE: Mapping[str, Dataset] = MappingProxyType(
    {dataset.name: dataset for dataset in (*map(_generated, FAMILIES.values()), _DIGITS)}
)


def find(name: str) -> Dataset:
    """The data set of that name or alias, whatever its case and with `_` or blanks for `-`.

    Raises DataUsageError with the nearest names when there is none.
    """
    wanted = "-".join(name.lower().replace("_", " ").split())
    for dataset in CATALOGUE.values():
        if wanted in (dataset.name, *dataset.aliases):
            return dataset
    spellings = [spelling for dataset in CATALOGUE.values() for spelling in (dataset.name, *dataset.aliases)]
    raise unknown_name("data set", name, spellings, sorted(CATALOGUE))
