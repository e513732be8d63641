"""Resolve names of data sets: those of the catalogue, sets derived from them, and sets packed in a data root."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Literal

from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards.catalogue import CATALOGUE, Dataset, find, find_or_none, parse_name
from shards.manifest import FILE, read_manifest
from shards.mirror import is_mirror, refresh
from shards.names import OWN_NAME


def resolve_dataset(name: str, data_root: Path | None) -> Dataset:
    """Find a data set by name: in the catalogue, derived from a set of it, or packed in `data_root` only.

    Splits, sizes and variant of a packed set are those of its manifest. None stands for the catalogue alone.
    """
    try:
        dataset = find(name)
    except UsageError as error:
        own = name.strip().lower()
        if os.sep in name:
            stem = Path(name).stem
            pack = "" if data_root and is_packed(data_root, stem) else f", once packed: procap data pack {quote(name)}"
            raise UsageError(f"unknown data set '{name}': give its name, not a path: {stem}{pack}") from None
        if data_root is not None and OWN_NAME.fullmatch(own) and is_packed(data_root, own):
            manifest = read_manifest(data_root / own, own)
            return Dataset(
                name=manifest.dataset,
                classes=len(manifest.classnames),
                counts={split: entry.count for split, entry in manifest.splits.items()},
                template=manifest.template,
                templates=manifest.templates,
                source="packed",
                licence="",
                description=f"packed from: {manifest.source.partition(', lists ')[0]}",
                classnames=manifest.classnames,
                variant=manifest.variant,
            )
        if data_root is None or find_or_none(parse_name(name)[0]):
            raise
        if OWN_NAME.fullmatch(own) and Path(name).is_dir():
            raise UsageError(
                f"unknown data set '{name}': pack the folder here first: procap data pack {name}"
            ) from None
        if not data_root.is_dir():
            raise UsageError(f"there is no folder {data_root}; {error}") from None
        dataset = find(name, [each for each in packed_names(data_root) if each not in CATALOGUE])
    if data_root is None or not is_packed(data_root, dataset.name):
        return dataset
    try:
        manifest = read_manifest(data_root / dataset.name, dataset.name)
    except UserError:
        # The name and the prompts are those of the catalogue; the error is reported when images are read.
        return dataset
    counts = {split: entry.count for split, entry in manifest.splits.items()}
    variant = manifest.variant or dataset.variant
    return replace(dataset, counts=counts, classes=len(manifest.classnames), variant=variant)


def is_packed(data_root: Path, name: str) -> bool:
    """Whether `data_root`, or the server that it mirrors, holds a data set of that exact name; also a broken one."""
    if not is_mirror(data_root):
        return (data_root / name / FILE).is_file()
    try:
        refresh(data_root, name)
    except (NotFound, UsageError):
        return False
    except Unreachable:
        raise
    except UserError:
        # A broken data set.
        pass
    return True


def packed_names(data_root: Path) -> list[str]:
    """List the packed data sets of a data root, sorted; of a mirror those that were opened already."""
    if not data_root.is_dir():
        return []
    return sorted(file.parent.name for file in data_root.glob(f"*/{FILE}") if OWN_NAME.fullmatch(file.parent.name))


def base_name(name: str) -> str:
    """Return the published set that a set derives from, which selects recipes and prompts; else its own name."""
    dataset = find_or_none(name)
    return dataset.base if dataset else name


def kind_of_name(name: str) -> Literal["published", "generated", "own"]:
    """Return 'published', 'generated' (by this program, or shipped with it) or 'own' (the user's).

    An own set cannot have a name of the catalogue, so the name decides, wherever a set is packed.
    """
    dataset = find_or_none(name)
    if dataset is None:
        return "own"
    return "published" if dataset.source == "folder" else "generated"
