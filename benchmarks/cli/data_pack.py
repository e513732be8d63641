"""`procap data pack`: pack raw folders, generated images and own images into WebDataset shards."""

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
from benchmarks.console.packing import format_classes, pack_one
from procap.errors import UsageError, UserError
from runner.environment import available_cores
from shards.catalogue import PUBLISHED
from shards.check_source import raise_problems
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
    "procap data pack sun397 --raw /datasets --resize 256",
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
    data: Annotated[str, flag("FOLDER", "where the shards go")] = "",
    workers: Workers = None,
) -> int:
    """Pack data sets into WebDataset shards with a manifest.

    Packing twice gives the same bytes; a packing that was stopped goes on where it was. Raw folders are only read. For
    a folder of your images a YAML file is guessed, and written beside it once packed; all findings are listed at once.
    """
    root = _local_root(data, packing)
    wanted = select_datasets(names, packing, root)
    for one in wanted:
        # The folder that a set was packed from has its YAML file beside it.
        if one.guessed and is_packed(root, one.name) and not mode.force:
            folder = Path(one.location).with_suffix("")
            raise UsageError(
                f"'{one.name}' was packed from another folder than {folder}: rename this one, or replace the set "
                "with --force"
            )
        if not (one.is_own or packing.raw) and one.name in names and Path(one.name).is_dir():
            note(f"procap: note: {one.name} is a known data set; the folder here is ./{one.name}")
    if mode.dry_run:
        return _show_plan(wanted, root, output)
    packed: dict[str, Manifest] = {}
    failed: dict[str, str] = {}
    for one in wanted:
        before = None
        with suppress(UserError):
            before = read_manifest(root / one.name)
        try:
            packed[one.name] = now = pack_one(
                one.source(),
                root,
                force=mode.force,
                workers=workers or available_cores(),
                on_note=report_note if one.is_own else None,
            )
            if before and before.digest != now.digest:
                report_note(_describe_replacement(before, now, one.is_random))
            elif before and one.is_own:
                note(f"'{one.name}' has not changed; its findings: procap data check {quote(one.location)}")
            if one.guessed:
                write_file(Path(one.location), one.guessed)
                note(f"wrote {one.location}")
        except UserError as error:
            if one.guessed:
                note(f"procap: note: {one.location} was not written; to change the guess, write it yourself")
            if len(wanted) == 1:
                raise
            failed[one.name] = str(error)
            note(f"procap: error: {one_line(str(error))}")
    for one in wanted:
        if one.is_own and one.name in packed:
            show(format_classes(open_dataset(root, one.name)) + "\n")
    rows = []
    for name, manifest in packed.items():
        shards = sum(len(split.shards) for split in manifest.splits.values())
        rows.append((name, len(manifest.classnames), manifest.images, shards, manifest.digest))
    if rows:
        show(columns(("data set", "classes", "images", "shards", "digest"), rows))
        note(f"packed in {root}; look at one: procap data show {rows[0][0]} --data {quote(root)}")
    if failed:
        note(f"procap: {plural(len(failed), 'data set')} not packed: {', '.join(failed)}; repeat the command to resume")
    if output.json:
        digests = {name: manifest.digest for name, manifest in packed.items()}
        show_json({"data": str(root), "datasets": digests, "failed": failed})
    return 0 if not failed else SOME_FAILED if packed else 1


def _describe_replacement(before: Manifest, now: Manifest, is_random: bool) -> str:
    old, new = ({split: entry.shards for split, entry in one.splits.items()} for one in (before, now))
    splits = [split for split in old | new if old.get(split) != new.get(split)]
    changed = [f"images or labels of {', '.join(splits)}"] if splits else []
    changed += ["class names"] if before.classnames != now.classnames else []
    changed += ["templates"] if (before.template, before.templates) != (now.template, now.templates) else []
    refused = "train, eval and bench refuse runs of the earlier content"
    drawn = "a random split is drawn afresh when images change, so an image may have come into another split; "
    return (
        f"'{now.dataset}' was replaced: {before.images:,} -> {now.images:,} images, digest {before.digest} -> "
        f"{now.digest}; changed: {' and '.join(changed) or 'the list of images'}; {refused}; "
        f"{drawn if splits and is_random else ''}to keep both, pack under another `name:`"
    )


def _show_plan(wanted: Sequence[DatasetToPack], root: Path, output: OutputFlags) -> int:
    states: dict[str, str] = {}
    rows, failed = [], {}
    for one in wanted:
        counts = size = "-"
        try:
            source = one.source()
            for text in source.notes:
                report_note(text)
            raise_problems(one.name, source.problems, report_note)
            counts = format_counts(source.counts)
            size = "-" if source.size is None else f"{source.size / 1e6:,.1f} MB"
            states[one.name] = "packed" if is_packed(root, one.name) else "to be packed"
        except UserError as error:
            failed[one.name] = str(error)
            states[one.name] = "cannot be packed"
        rows.append((one.name, states[one.name], counts, size))
    show(columns(("data set", f"now in {root}", "train/val/test", "images"), rows) + "\nNothing was written.")
    files = {Path(one.location): one for one in wanted if one.is_own}
    if own := [quote(file.with_suffix("") if one.guessed else file) for file, one in files.items()]:
        note(f"images were not opened; to check them too: procap data check {' '.join(own)}")
    for reason in failed.values():
        note(f"procap: error: {one_line(reason)}")
    if output.json:
        show_json({"data": str(root), "datasets": states, "failed": failed})
    return 0 if not failed else SOME_FAILED if len(failed) < len(wanted) else 1


def _local_root(data: str, packing: PackFlags) -> Path:
    """Return the folder to write shards to. Raises UsageError for a URL, and for a folder among the raw files."""
    if "://" in data:
        raise UsageError(f"--data {redact(data)}: shards are packed into a folder; copy it to where the URL points")
    root = data_root(data)
    refuse_packing(root)
    if given := packing.raw or os.environ.get("PROCAP_RAW"):
        target, raw = root.resolve(), Path(given).expanduser().resolve()
        folders = {Path(folder).parts[0] for dataset in PUBLISHED if dataset.raw for folder in dataset.raw.folders}
        if target == raw or any(target.is_relative_to(raw / folder) for folder in folders):
            raise UsageError(f"--data {root} lies in the raw data, which are only read: choose another folder")
    return root
