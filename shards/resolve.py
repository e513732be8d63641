"""Resolve names of data sets: those of the catalogue, and those packed in a data root."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Literal

from procap.errors import NotFound, UsageError, UserError
from shards.catalogue import CATALOGUE, Dataset, find, find_or_none
from shards.manifest import MANIFEST_FILE, is_mirror, read_manifest
from shards.mirror import refresh
from shards.names import NAME, PACKED_NAME


def resolve_dataset(name: str, data_root: Path | None) -> Dataset:
    """Find a data set: in the catalogue, or in `data_root`, if any; sizes of a packed set are those of its manifest."""
    if dataset := find_or_none(name):
        if data_root is not None and is_packed(data_root, dataset.name):
            # The name and the prompts are those of the catalogue; an error is reported when images are read.
            with suppress(UserError):
                manifest = read_manifest(data_root / dataset.name)
                return replace(dataset, counts=manifest.counts, num_classes=len(manifest.classnames))
        return dataset
    packed_name = name.strip().lower()
    if data_root is None:
        return find(name)
    if PACKED_NAME.fullmatch(packed_name) and is_packed(data_root, packed_name):
        return _packed_dataset(data_root / packed_name)
    if os.path.isdir(name):
        raise UsageError(f"unknown data set '{name}': pack the folder first: procap data pack {quote(name)}")
    if PACKED_NAME.fullmatch(packed_name) and is_mirror(data_root):
        try:
            refresh(data_root, packed_name)
        except NotFound as error:
            raise UsageError(f"unknown data set '{name}': {error}") from error
    # This always raises: `find_or_none` above knows no such name. The error suggests near ones.
    return find(name, [other for other in packed_names(data_root) if other not in CATALOGUE])


def _packed_dataset(folder: Path) -> Dataset:
    manifest = read_manifest(folder)
    return Dataset(
        name=manifest.dataset,
        num_classes=len(manifest.classnames),
        counts=manifest.counts,
        template=manifest.template,
        templates=manifest.templates,
        images_from="own",
        licence="",
        description=f"packed from: {manifest.source.partition(', lists ')[0]}",
        classnames=manifest.classnames,
    )


def is_packed(data_root: Path, name: str) -> bool:
    """Whether `data_root`, or the server that it mirrors, holds a data set of that exact name."""
    if not is_mirror(data_root):
        return (data_root / name / MANIFEST_FILE).is_file()
    with suppress(NotFound):
        return bool(NAME.fullmatch(name) and refresh(data_root, name))
    return False


def packed_names(data_root: Path) -> list[str]:
    """List the packed data sets of a data root, sorted; of a mirror those that were opened already."""
    if not data_root.is_dir():
        return []
    names = [file.parent.name for file in data_root.glob(f"*/{MANIFEST_FILE}")]
    # `glob` also finds hidden folders, such as that of a packing in progress, whose names do not match.
    return sorted(name for name in names if PACKED_NAME.fullmatch(name))


def kind_of_name(name: str) -> Literal["published", "generated", "own"]:
    """Say whether a name is of a published, a generated (or bundled) or the user's own data set."""
    dataset = find_or_none(name)
    if dataset is None:
        return "own"
    return "published" if dataset.images_from == "published" else "generated"
