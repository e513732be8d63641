"""Pack data sets with a progress bar, and pack missing data sets that need no raw files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.console.output import columns, is_first_rank, note, plural, quote
from procap.errors import UserError
from runner.devices import available_cores
from runner.progress_bar import ProgressDisplay
from shards.builtin_sources import builtin_source
from shards.catalogue import Dataset
from shards.manifest import Manifest
from shards.mirror import mirrored_url
from shards.pack import pack_source
from shards.reader import PackedDataset
from shards.resolve import is_packed, resolve_dataset
from shards.source import Source
from shards.tasks import map_in_order
from shards.urls import redact


def require_packable(names: Iterable[str], data_root: Path) -> list[Dataset]:
    """Raise UserError for missing data sets that need raw files or a server; returns the missing ones that do not."""
    datasets = [resolve_dataset(name, data_root) for name in dict.fromkeys(names)]
    missing = [dataset for dataset in datasets if not is_packed(data_root, dataset.name)]
    raw = [dataset.name for dataset in missing if dataset.images_from == "published"]
    if missing and (url := mirrored_url(data_root)):
        absent = ", ".join(f"'{dataset.name}'" for dataset in missing)
        raise UserError(f"there is no {absent} at {redact(url)}")
    if raw:
        names_at = f"{' '.join(raw)} --data {quote(data_root)}"
        command = f"procap data pack {names_at} --raw FOLDER, or download: procap data fetch {names_at}"
        raise UserError(f"not packed in {data_root}: {', '.join(raw)}; pack with: {command}")
    return missing


def pack_missing_with_progress(names: Iterable[str], data_root: Path) -> None:
    """Pack the data sets that `require_packable` lists: `shards.pack.pack_missing`, for the terminal of a user."""
    missing = require_packable(names, data_root)
    if missing:
        note(f"packing {', '.join(dataset.name for dataset in missing)} into {data_root} (once)")
        # The largest sets first, so that no process ends long after the others.
        sources = sorted(map(builtin_source, missing), key=lambda source: -sum(source.counts.values()))
        what = f"packing {plural(len(sources), 'data set')}"
        with ProgressDisplay(what, len(sources), unit="data sets", quiet=not is_first_rank()) as display:
            workers = min(len(sources), available_cores())
            for _ in map_in_order(partial(pack_source, data_root=data_root), sources, workers):
                display.update(display.done + 1)


def pack_with_progress(source: Source, data_root: Path, **choices: Any) -> Manifest:
    """Pack one data set under a progress bar. choices: further arguments of `pack_source`."""
    with parts_progress(f"packing {source.name}", source.counts) as progress:
        return pack_source(source, data_root, on_progress=progress, **choices)


@contextmanager
def parts_progress(
    what: str, totals: Mapping[str, int] | None = None
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show one progress bar over several parts; yields a callback that takes a part, how much is done, and its size."""
    sizes = dict(totals or {})
    done: dict[str, int] = {}
    with ProgressDisplay(what, sum(sizes.values()), unit="images") as display:

        def progress(part: str, count: int, size: int | None) -> None:
            # Parts whose size is unknown count as what they have done so far, so the total grows with them.
            done[part], sizes[part] = count, size or count
            display.total = sum(sizes.values())
            display.update(sum(done.values()), part=part)

        yield progress


def count_images(dataset: PackedDataset) -> dict[str, NDArray[np.int64]]:
    """Count the images of each class, by split."""
    names = dataset.classnames
    return {split: np.bincount(dataset.labels(split), minlength=len(names)) for split in dataset.manifest.splits}


def format_classes(classnames: Sequence[str], counts: Mapping[str, NDArray[np.int64]]) -> str:
    """Format the images of each class and split. counts: of `count_images`."""
    rows: list[tuple[object, ...]] = [
        (name, *(int(count[label]) for count in counts.values())) for label, name in enumerate(classnames)
    ]
    return columns(("class", *counts), rows)
