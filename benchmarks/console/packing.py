"""Pack data sets with a progress bar, and pack missing data sets that need no raw files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.console.output import note, quoted, speaks
from shards.dataset import Dataset
from shards.errors import DataError
from shards.manifest import Manifest
from shards.mirror import is_mirror, mirrored_url
from shards.records import Source
from shards.resolve import is_packed, resolve_dataset
from shards.sources import builtin_source
from shards.urls import redact


def ensure_packed(names: Iterable[str], data_root: Path) -> None:
    """Pack the generated and bundled data sets among `names` that are missing, and print a note.

    Raises DataError that names all those whose raw files only the user has.
    """
    missing = [
        dataset for name in names if not is_packed(data_root, (dataset := resolve_dataset(name, data_root)).name)
    ]
    if missing and is_mirror(data_root):
        raise DataError(f"there is no {_listed(missing)} at {redact(mirrored_url(data_root))}")
    if raw := [dataset for dataset in missing if dataset.source == "folder"]:
        folder = "" if os.environ.get("PROCAP_RAW") else " --raw FOLDER"
        command = f"procap data pack {' '.join(one.name for one in raw)}{folder} --data {quoted(data_root)}"
        verb, them = ("is", "it") if len(raw) == 1 else ("are", "them")
        raise DataError(f"{_listed(raw)} {verb} not packed in {data_root}; pack {them}: {command}")
    for dataset in missing:
        note(f"packing {dataset.name} into {data_root} ({'drawn' if dataset.source == 'world' else 'bundled'}, once)")
        pack_one(builtin_source(dataset), data_root, quiet=not speaks())


def _listed(datasets: Sequence[Dataset]) -> str:
    return ", ".join(f"'{dataset.name}'" for dataset in datasets)


def pack_one(
    source: Source, data_root: Path, *, force: bool = False, workers: int = 1, quiet: bool = False
) -> Manifest:
    """Pack one data set under a progress bar."""
    from runner.progress import ProgressDisplay
    from shards.pack import pack_source

    done: dict[str, int] = {}
    total = sum(source.counts.values())
    with ProgressDisplay(f"packing {source.name}", total, unit="images", quiet=quiet) as display:

        def progress(split: str, count: int, _: int) -> None:
            done[split] = count
            display.update(sum(done.values()), split=split)

        return pack_source(source, data_root, force=force, workers=workers, on_progress=progress)
