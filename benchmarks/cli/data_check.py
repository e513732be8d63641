"""`procap data check`: check packed shards, or a user's images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.data_sources import is_users, report_note, select_datasets
from benchmarks.cli.flags import Data, OutputFlags, Workers, command
from benchmarks.console.output import columns, note, plural, quote, show, show_json
from benchmarks.console.packing import parts_progress
from benchmarks.console.parse import split_names
from procap.errors import UsageError, UserError
from runner.environment import available_cores
from shards.check import check_dataset, check_source
from shards.default_paths import data_root
from shards.manifest import repack_hint
from shards.resolve import is_packed, packed_names, resolve_dataset

Rows = list[tuple[object, ...]]


@command(
    "procap data check",
    "procap data check shapes --data demo/data",
    "procap data check ./birds",
)
def check(
    output: OutputFlags,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="data sets, ./FOLDER or YAML file [default: all]")
    ] = None,
    data: Data = "",
    workers: Workers = None,
) -> int:
    """Check packed shards (hashes, every image), or your images.

    A folder or YAML file of your images is read as a whole without packing it, and all findings are listed at once.
    """
    root, processes = data_root(data), workers or available_cores()
    users = [name for name in names or () if os.sep in name or (is_users(name) and not is_packed(root, name))]
    if users:
        if len(users) < len(names or ()):
            raise UsageError("check your images alone, without names of data sets")
        return _check_users(users, processes, output)
    return _check_packed(split_names(",".join(names or ())) or ["all"], root, processes, output)


def _check_users(names: Sequence[str], workers: int, output: OutputFlags) -> int:
    """Check images that a folder or YAML file names, without packing them."""
    problems: dict[str, list[str]] = {}
    notes: list[str] = []
    rows: Rows = []
    for dataset in select_datasets(names, None, data_root("")):
        source = dataset.source()
        with parts_progress(f"checking {dataset.name}", source.counts) as progress:
            report = check_source(source, workers=workers, on_progress=progress)
        problems[dataset.name] = [*report.problems]
        notes += report.notes
        images = sum(source.counts.values())
        rows.append((dataset.name, len(source.classnames), images, len(report.notes), _verdict(report.problems)))
        for text in (*report.notes, *(f"problem: {problem}" for problem in report.problems)):
            report_note(text)
    show(columns(("data set", "classes", "images", "notes", "verdict"), rows))
    if output.json:
        show_json({"ok": not any(problems.values()), "problems": problems, "notes": notes})
    return 1 if any(problems.values()) else 0


def _verdict(problems: Sequence[str]) -> str:
    return plural(len(problems), "problem") if problems else "ok"


def _check_packed(names: list[str], root: Path, workers: int, output: OutputFlags) -> int:
    selected = packed_names(root) if "all" in names else [resolve_dataset(name, root).name for name in names]
    if not selected:
        at = f" --data {quote(root)}"
        hint = f"pack generated data: procap data pack shapes{at}; get the paper's: procap data fetch paper{at}"
        raise UserError(f"nothing is packed in {root}; {hint}")
    rows: Rows = []
    problems: dict[str, list[str]] = {}
    for name in dict.fromkeys(selected):
        with parts_progress(f"checking {name}") as progress:
            report = check_dataset(root, name, workers=workers, on_progress=progress)
        problems[name] = [*report.problems, *(problem for split in report.splits for problem in split.problems)]
        for split in report.splits:
            verdict = _verdict(split.problems)
            if verdict == "ok" and split.shards_present < split.shards:
                verdict = "ok, the rest is not fetched yet"
            shards = f"{split.shards_present}/{split.shards}"
            rows.append((name, split.name, f"{split.readable}/{split.images}", shards, verdict))
        if not report.splits:
            rows.append((name, "-", "-", "-", "unreadable"))
    show(columns(("data set", "split", "images readable", "shards found", "verdict"), rows))
    broken = [name for name in problems if problems[name]]
    for name in broken:
        for problem in problems[name]:
            note(f"procap: {problem}")
        note(f"procap: to repair '{name}', {repack_hint(root / name)}")
    if output.json:
        show_json({"data": str(root), "ok": not broken, "problems": problems})
    return 1 if broken else 0
