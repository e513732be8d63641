"""`procap data pack`: pack raw folders, generated images and a user's images into WebDataset shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.data_sources import DatasetToPack, packing_root, report_note, report_packed, select_datasets
from benchmarks.cli.flags import ModeFlags, Workers, command, flag, switch
from benchmarks.cli.several_runs import Failures
from benchmarks.console.output import columns, note, show, show_json
from benchmarks.console.packing_progress import count_images, format_classes, pack_with_progress
from procap.errors import UsageError
from runner.devices import available_cores
from runner.results import write_bytes
from shards.manifest import Manifest
from shards.pack import check_same_source
from shards.reader import open_dataset
from shards.resolve import is_packed


@command(
    "procap data pack shapes digits",
    "procap data pack caltech101 dtd eurosat --raw /datasets",
    "procap data pack paper --raw /datasets --data /scratch/shards",
    "procap data pack birds",
    "procap data pack my-birds.yaml",
)
def pack(
    mode: ModeFlags,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="data sets, folders of images, YAML files, or all, paper")
    ],
    data: Annotated[str, flag("FOLDER", "folder of the shards")] = "",
    raw: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", envvar="PROCAP_RAW", exists=True, file_okay=False, help="published sets as CoOp has them"
        ),
    ] = None,
    skip_broken: Annotated[bool, switch("--skip-broken", "leave out images of yours that cannot be read")] = False,
    max_side: Annotated[
        int | None, flag("PIXELS", "short side of stored images of a folder; 0 keeps all [default: 512]", min=0)
    ] = None,
    workers: Workers = None,
) -> int:
    """Pack data sets into WebDataset shards with a manifest.

    Packing twice gives the same bytes, and finished data sets are kept. Raw folders are only read. For a folder of your
    images, the command guesses a YAML file, lists all problems at once, and writes the file next to the folder.
    """
    root = packing_root(data)
    selected = select_datasets(names, raw, root, max_side)
    if skip_broken and (of_catalogue := [dataset.name for dataset in selected if not dataset.yaml_file]):
        what = "is of the catalogue and has a fixed list of images"
        raise UsageError(f"--skip-broken is for your images: '{of_catalogue[0]}' {what}")
    if mode.dry_run:
        states = {dataset.name: "packed" if is_packed(root, dataset.name) else "to be packed" for dataset in selected}
        show(columns(("data set", f"now in {root}"), list(states.items())) + "\nNothing was written.")
        show_json({"data": str(root), "datasets": states})
        return 0
    packed: dict[str, Manifest] = {}
    failures = Failures(len(selected))
    for dataset in selected:
        with failures.collect(dataset.name):
            packed[dataset.name] = _pack_dataset(dataset, root, mode.force, workers or available_cores(), skip_broken)
    return report_packed(packed, failures.reasons, root)


def _pack_dataset(dataset: DatasetToPack, root: Path, force: bool, workers: int, skip_broken: bool) -> Manifest:
    """Pack one data set; for a user's also write the guessed YAML file, and show its classes."""
    on_note = report_note if dataset.yaml_file else None
    if dataset.guessed_yaml and not is_packed(root, dataset.name):
        _write_guess(dataset)
    source = dataset.read_source(skip_broken=True, workers=workers) if skip_broken else dataset.read_source()
    if dataset.guessed_yaml and is_packed(root, dataset.name):
        if not force:
            check_same_source(source, root, Path(dataset.yaml_file))
        _write_guess(dataset)
    manifest = pack_with_progress(source, root, force=force, workers=workers, on_note=on_note)
    if dataset.yaml_file:
        # These import torch, which other data sets need not wait for.
        from procap.weights.loading import load_clip
        from runner.setup import describe_names, label_space

        show(format_classes(manifest.classnames, count_images(open_dataset(root, dataset.name))) + "\n")
        for why in describe_names(load_clip("mini"), label_space(manifest, manifest.classnames)):
            report_note(f"warning: {why}")
    return manifest


def _write_guess(dataset: DatasetToPack) -> None:
    write_bytes(Path(dataset.yaml_file), dataset.guessed_yaml.encode())
    note(f"wrote {dataset.yaml_file}")
