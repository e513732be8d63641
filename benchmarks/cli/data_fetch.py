"""`procap data fetch`: download published data sets and pack them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.data_sources import packing_root, report_packed, select_published
from benchmarks.cli.flags import ModeFlags, Workers, command, flag, switch
from benchmarks.cli.several_runs import Failures
from benchmarks.console.output import columns, note, plural, show, show_json
from benchmarks.console.packing_progress import pack_with_progress
from procap.errors import UserError
from runner.devices import available_cores
from runner.progress_bar import ProgressDisplay
from shards.catalogue import Dataset
from shards.fetch import FetchPlan, check_space, describe_source, fetch, list_hub, plan_fetch, work_folder
from shards.files import file_lock
from shards.manifest import Manifest, read_manifest
from shards.raw.published import published_source
from shards.resolve import is_packed
from shards.urls import redact

MB = 10**6


@command(
    "procap data fetch paper --dry-run",
    "procap data fetch caltech101 dtd eurosat",
    "procap data fetch dtd --official --data /scratch/shards",
)
def fetch_datasets(
    mode: ModeFlags,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="published data sets, or paper")],
    data: Annotated[str, flag("FOLDER", "folder of the shards, and of the archives until they are packed")] = "",
    official: Annotated[bool, switch("--official", "take the official archives, not those of the Hub")] = False,
    workers: Workers = None,
) -> int:
    """Download published data sets, compare them with the published splits and pack them.

    They come from the Hub ($HF_ENDPOINT) as one archive each with CoOp's split file. An interrupted download is
    continued by the same command, and archives are deleted once their set is packed. --dry-run lists sources, sizes and
    licences without a network.
    """
    root = packing_root(data)
    datasets = {dataset.name: dataset for dataset in select_published(names)}
    packed = [name for name in datasets if is_packed(root, name) and not mode.force]
    missing = [dataset for name, dataset in datasets.items() if name not in packed]
    if mode.dry_run:
        return _show_plan(missing, packed, root, official)
    on_hub = any(dataset.raw and dataset.raw.hub for dataset in missing)
    hub_files = list_hub() if on_hub and not official else {}
    failures, plans = Failures(len(missing)), list[FetchPlan]()
    for dataset in missing:
        with failures.collect(dataset.name):
            plans.append(plan_fetch(dataset, hub_files))
    check_space(plans, root)
    manifests = {name: read_manifest(root / name) for name in packed}
    for plan in plans:
        with failures.collect(plan.dataset.name):
            manifests[plan.dataset.name] = _fetch_and_pack(plan, root, mode.force, workers or available_cores())
    return report_packed(manifests, failures.reasons, root)


def _show_plan(missing: Sequence[Dataset], packed: Sequence[str], root: Path, official: bool) -> int:
    """Print what would be downloaded, by the catalogue alone: it needs no network."""
    rows, sizes = [(name, "packed already", "-", "-", "-") for name in packed], list[float]()
    fetched: dict[str, dict[str, object]] = {}
    for dataset in missing:
        source, token = describe_source(dataset, official)
        sizes.append(dataset.raw.gigabytes if dataset.raw else 0.0)
        fetched[dataset.name] = {"source": source, "gigabytes": sizes[-1] or None, "licence": dataset.licence}
        rows.append((dataset.name, source, f"{sizes[-1]:,.2f} GB" if sizes[-1] else "unknown", token, dataset.licence))
    show(columns(("data set", "source", "about", "token", "licence"), rows))
    # As `check_space`: all shards, and of one set at a time the archive and its images.
    most = sum(sizes) + 2 * max(sizes, default=0.0)
    unknown = f", and {plural(sizes.count(0.0), 'set')} of unknown size" if 0.0 in sizes else ""
    show(f"packed into {root / 'NAME'}: about {sum(sizes):,.1f} GB, {most:,.1f} GB while it is packed{unknown}")
    show("Nothing was downloaded.")
    note(f"archives lie in {work_folder(root, 'NAME')} until they are packed")
    note("other ways: --official, a mirror in $HF_ENDPOINT, or your own files: procap data pack NAME --raw FOLDER")
    show_json({"data": str(root), "packed": list(packed), "fetched": fetched})
    return 0


def _fetch_and_pack(plan: FetchPlan, root: Path, force: bool, workers: int) -> Manifest:
    """Fetch one data set and pack it; its archives are kept if that fails."""
    name = plan.dataset.name
    folder = work_folder(root, name)
    with file_lock(folder.with_name(f"{name}.lock"), remove=True):
        with ProgressDisplay(f"downloading {name}", plan.size // MB, unit="MB") as display:
            raw_root = fetch(plan, root, lambda done: display.update(done // MB))
        try:
            manifest = pack_with_progress(published_source(plan.dataset, raw_root), root, force=force, workers=workers)
        except UserError as error:
            raise UserError(f"{error} (from {redact(plan.files[0].url)}; its files are in {folder})") from error
        shutil.rmtree(folder)
    with suppress(OSError):
        folder.parent.rmdir()
    return manifest
