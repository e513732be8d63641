"""`procap data pack`: pack raw folders, generated images and a user's images into WebDataset shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.data_sources import DatasetToPack, report_note, select_datasets
from benchmarks.cli.flags import ModeFlags, OutputFlags, PackFlags, Workers, command, flag
from benchmarks.console.errors import one_line
from benchmarks.console.output import SOME_FAILED, columns, format_counts, note, plural, quote, show, show_json
from benchmarks.console.packing import format_classes, pack_with_progress
from procap.errors import UsageError, UserError
from runner.environment import available_cores
from shards.catalogue import PUBLISHED
from shards.check import raise_problems
from shards.default_paths import data_root
from shards.files import write_file
from shards.manifest import Manifest, read_manifest
from shards.mirror import refuse_packing
from shards.reader import open_dataset
from shards.resolve import is_packed
from shards.urls import redact


@command(
    "procap data pack shapes digits",
    "procap data pack caltech101 dtd eurosat --raw /datasets",
    "procap data pack all --raw /datasets --data /scratch/shards",
    "procap data pack birds",
    "procap data pack my-birds.yaml",
)
def pack(
    packing: PackFlags,
    mode: ModeFlags,
    output: OutputFlags,
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="data sets, folders of images, YAML files, or all, paper, world"),
    ],
    data: Annotated[str, flag("FOLDER", "folder of the shards")] = "",
    workers: Workers = None,
) -> int:
    """Pack data sets into WebDataset shards with a manifest.

    Packing twice gives the same bytes, and finished data sets are kept. Raw folders are only read. For a folder of your
    images a YAML file is guessed, and written beside it once packed; all findings are listed at once.
    """
    root = _local_root(data, packing)
    selected = select_datasets(names, packing, root)
    for dataset in selected:
        # The folder that a set was packed from has its YAML file beside it.
        if dataset.guessed and is_packed(root, dataset.name) and not mode.force:
            folder = Path(dataset.location).with_suffix("")
            hint = "rename this one, or replace the set with --force"
            raise UsageError(f"'{dataset.name}' was packed from another folder than {folder}: {hint}")
        if not (dataset.is_users or packing.raw) and dataset.name in names and Path(dataset.name).is_dir():
            note(f"procap: note: {dataset.name} is a known data set; the folder here is ./{dataset.name}")
    if mode.dry_run:
        return _show_plan(selected, root, output)
    packed: dict[str, Manifest] = {}
    failed: dict[str, str] = {}
    for dataset in selected:
        try:
            packed[dataset.name] = _pack_dataset(dataset, root, mode.force, workers or available_cores())
        except UserError as error:
            if len(selected) == 1:
                raise
            failed[dataset.name] = str(error)
            note(f"procap: error: {one_line(str(error))}")
    _show_packed(packed, root)
    if failed:
        note(f"procap: {plural(len(failed), 'data set')} not packed: {', '.join(failed)}; repeat the command to resume")
    if output.json:
        digests = {name: manifest.digest for name, manifest in packed.items()}
        show_json({"data": str(root), "datasets": digests, "failed": failed})
    return 0 if not failed else SOME_FAILED if packed else 1


def _pack_dataset(dataset: DatasetToPack, root: Path, force: bool, workers: int) -> Manifest:
    """Pack one data set and say what it replaces; the guessed YAML file is written once it is packed."""
    before = None
    with suppress(UserError):
        before = read_manifest(root / dataset.name)
    on_note = report_note if dataset.is_users else None
    manifest = pack_with_progress(dataset.source(), root, force=force, workers=workers, on_note=on_note)
    if before and before.digest != manifest.digest:
        report_note(
            f"'{dataset.name}' was replaced: {before.images:,} -> {manifest.images:,} images, digest {before.digest} "
            f"-> {manifest.digest}; train, eval and bench refuse runs of the earlier content; to keep both, pack under "
            "another `name:`"
        )
    if dataset.guessed:
        write_file(Path(dataset.location), dataset.guessed)
        note(f"wrote {dataset.location}")
    if dataset.is_users:
        show(format_classes(open_dataset(root, dataset.name)) + "\n")
    return manifest


def _show_packed(packed: dict[str, Manifest], root: Path) -> None:
    rows = []
    for name, manifest in packed.items():
        shards = sum(len(split.shards) for split in manifest.splits.values())
        rows.append((name, len(manifest.classnames), manifest.images, shards, manifest.digest))
    if rows:
        show(columns(("data set", "classes", "images", "shards", "digest"), rows))
        note(f"packed in {root}; look at one: procap data show {rows[0][0]} --data {quote(root)}")


def _show_plan(selected: Sequence[DatasetToPack], root: Path, output: OutputFlags) -> int:
    states: dict[str, str] = {}
    rows, failed = [], {}
    for dataset in selected:
        counts = size = "-"
        try:
            source = dataset.source()
            for text in source.notes:
                report_note(text)
            raise_problems(dataset.name, source.problems, report_note)
            counts = format_counts(source.counts)
            size = "-" if source.size is None else f"{source.size / 1e6:,.1f} MB"
            states[dataset.name] = "packed" if is_packed(root, dataset.name) else "to be packed"
        except UserError as error:
            failed[dataset.name] = str(error)
            states[dataset.name] = "cannot be packed"
        rows.append((dataset.name, states[dataset.name], counts, size))
    show(columns(("data set", f"now in {root}", "train/val/test", "images"), rows) + "\nNothing was written.")
    for reason in failed.values():
        note(f"procap: error: {one_line(reason)}")
    if output.json:
        show_json({"data": str(root), "datasets": states, "failed": failed})
    return 0 if not failed else SOME_FAILED if len(failed) < len(selected) else 1


def _local_root(data: str, packing: PackFlags) -> Path:
    """Return the folder to write shards to. Raises UsageError for a URL, and for a folder among the raw files."""
    if "://" in data:
        raise UsageError(f"--data {redact(data)}: shards are packed into a folder; copy it to where the URL points")
    root = data_root(data)
    refuse_packing(root)
    if folder := packing.raw or os.environ.get("PROCAP_RAW"):
        target, raw = root.resolve(), Path(folder).expanduser().resolve()
        folders = {Path(folder).parts[0] for dataset in PUBLISHED if dataset.raw for folder in dataset.raw.folders}
        if target == raw or any(target.is_relative_to(raw / folder) for folder in folders):
            raise UsageError(f"--data {root} lies in the raw data, which are only read: choose another folder")
    return root
