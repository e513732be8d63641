"""Catalogue of data sets: their classes, sizes and prompts, and where their images come from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from shards.errors import DataUsageError, unknown_name
from shards.world.distortions import tuples_for_lists
from shards.world.generate import CLASSNAMES

Layout = Literal["split-file", "imagenet", "wnid-folders", "numbered-folders", "variant-lists"]


@dataclass(frozen=True)
class RawLayout:
    """How the raw files of a published data set lie on a disk.

    folders: possible names of the data set's folder below the raw root: CoOp's first, then those of unpacked archives.
    images: possible folders of the images below that, CoOp's first; "." is the folder itself.
    get: where to get images and lists, one sentence.
    split_file: the official list of train, val and test. split_digests: digests of its splits, if known.
    random_split: whether the images lie in class folders, from which a random split can be drawn.
    ignored: entries among the class folders that are no class. renamed: class folder to class name.
    indices: ImageNet's numbers of the classes, for a set with a part of them; () means all of them in order.
    """

    layout: Layout
    folders: tuple[str, ...]
    images: tuple[str, ...]
    get: str
    split_file: str = ""
    classnames_digest: str = ""
    split_digests: Mapping[str, str] = field(default_factory=dict)
    random_split: bool = False
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    indices: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Dataset:
    """One row of the catalogue.

    template: the hand-written prompt of the CoOp family, one `{}` and a full stop.
    templates: the prompts that initialise learned tokens, one `{}` each, without full stop.
    counts: images per split; a `test_only` set has no other split than "test".
    source: "world" is drawn from numbers, "scans" ships with scikit-learn, "folder" is read from raw files of the user,
        "packed" is known from its packed shards alone.
    title: its name as papers print it.
    base: the set that a derived one comes from, else its own name. variant: how it differs from that, "" when it is it.
    random_split: the seed of a random split. subset: only the files that are there. resize: pixels of the shorter side.
    """

    name: str
    classes: int
    counts: Mapping[str, int]
    template: str
    templates: tuple[str, ...]
    source: Literal["world", "scans", "folder", "packed"]
    licence: str
    description: str
    classnames: tuple[str, ...] = field(default=(), repr=False)
    aliases: tuple[str, ...] = ()
    title: str = ""
    base: str = ""
    variant: str = ""
    random_split: int | None = None
    subset: bool = False
    resize: int | None = None
    raw: RawLayout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)
        object.__setattr__(self, "base", self.base or self.name)

    @property
    def test_only(self) -> bool:
        return set(self.counts) == {"test"}


def _load_catalogue() -> dict[str, Dataset]:
    datasets = {}
    for fields in tomllib.loads((Path(__file__).parent / "datasets.toml").read_text(encoding="utf-8"))["dataset"]:
        if raw := fields.pop("raw", None):
            fields |= {"source": "folder", "raw": RawLayout(**tuples_for_lists(raw))}
        fields.setdefault("classnames", CLASSNAMES.get(fields["name"], ()))
        datasets[fields["name"]] = Dataset(**tuples_for_lists(fields))
    return datasets


CATALOGUE: Mapping[str, Dataset] = MappingProxyType(_load_catalogue())
PUBLISHED = tuple(dataset for dataset in CATALOGUE.values() if dataset.source == "folder")

# Words for several data sets on the command line; no data set may have such a name.
GROUPS = ("all", "paper", "world")

# The names of derived sets: caltech101-split7, dtd-subset, food101-256px, caltech101-split7-224px.
DERIVED = re.compile(
    r"(?P<base>.+?)(-split(?P<random_split>[0-9]{1,99})|-(?P<subset>subset))?(-(?P<resize>[0-9]{1,9})px)?"
)


def find(name: str, own: Iterable[str] = ()) -> Dataset:
    """Find a data set, or derive one, by name or alias, ignoring case, `-`, `_` and blanks.

    own: names of other data sets, for the error.
    """
    if dataset := _find_exactly(name):
        return dataset
    base_name, changes = parse_name(name)
    if (base := _find_exactly(base_name)) and base.source == "folder":
        return derive_dataset(base, **changes)
    spellings = [spelling for dataset in CATALOGUE.values() for spelling in (dataset.name, *dataset.aliases)]
    raise unknown_name("data set", name, [*spellings, *own], [*sorted(CATALOGUE), *own])


def find_or_none(name: str) -> Dataset | None:
    """Find a data set as `find` does; None for a name that is not of the catalogue."""
    try:
        return find(name)
    except DataUsageError:
        return None


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
        raise DataUsageError(
            f"'{dataset.name}' has no class folders, or an official split in them: no random split is made"
        )
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
