"""`procap data check`: check packed shards, or check raw folders against the published lists."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.data_sources import is_own, is_own_folder, report_note, select_datasets
from benchmarks.cli.flags import Data, OutputFlags, PackFlags, Workers, command, flag
from benchmarks.console.output import columns, note, plural, quote, show, show_json
from benchmarks.console.packing import parts_progress
from benchmarks.console.parse import split_names
from procap.errors import UsageError, UserError
from runner.environment import available_cores
from shards.catalogue import PUBLISHED, find
from shards.check_dataset import check_dataset
from shards.check_source import check_source
from shards.default_paths import data_root
from shards.manifest import repack_hint
from shards.names import Finding
from shards.raw.published import find_folder, raw_source
from shards.resolve import is_packed, packed_names, resolve_dataset


@command(
    "procap data check",
    "procap data check shapes --data demo/data",
    "procap data check --raw /datasets",
    "procap data check oxford-pets --raw /datasets --no-decode",
    "procap data check ./birds",
)
def check(
    output: OutputFlags,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="data sets, ./FOLDER or YAML file [default: all]")
    ] = None,
    data: Data = "",
    raw: Annotated[Path | None, flag("FOLDER", "check raw folders below this one instead of shards")] = None,
    no_decode: Annotated[bool, typer.Option("--no-decode", help="raw: do not open every image")] = False,
    workers: Workers = None,
) -> int:
    """Check packed shards (hashes, every image), raw folders against the published lists, or your images.

    A folder or YAML file of your images is read as a whole without packing it, and all findings are listed at once.
    """
    root = data_root(data)
    if own := [name for name in names or () if os.sep in name or (is_own(name) and not is_packed(root, name))]:
        if raw or len(own) < len(names or ()):
            raise UsageError("check own images alone, without --raw and names of data sets")
        return _check_own(own, workers or available_cores(), output)
    if no_decode and not raw:
        raise UsageError("--no-decode belongs to --raw: every image of shards is decoded")
    given = split_names(",".join(names or ())) or ["all"]
    if raw:
        return _check_raw(given, PackFlags(raw=raw), not no_decode, workers or available_cores(), output)
    return _check_packed(given, root, workers or available_cores(), output)


def _check_own(names: Sequence[str], workers: int, output: OutputFlags) -> int:
    """Check images that a folder or YAML file names, without packing them."""
    problems: dict[str, list[str]] = {}
    rows: list[tuple[object, ...]] = []
    notes: list[str] = []
    for one in select_datasets(names, PackFlags(), data_root("")):
        source = one.source()
        with parts_progress(f"checking {one.name}", source.counts) as progress:
            report = check_source(source, workers=workers, on_progress=progress)
        problems[one.name] = [*report.problems]
        verdict = plural(len(report.problems), "problem") if report.problems else "ok"
        rows.append((one.name, len(source.classnames), sum(source.counts.values()), len(report.notes), verdict))
        notes += [*report.notes, *(f"problem: {problem}" for problem in report.problems)]
    show(columns(("data set", "classes", "images", "notes", "verdict"), rows))
    for text in notes:
        report_note(text)
    if output.json:
        whole = {name: [*map(_whole, lines)] for name, lines in problems.items()}
        show_json({"ok": not any(problems.values()), "problems": whole, "notes": [*map(_whole, notes)]})
    return 1 if any(problems.values()) else 0


def _whole(line: str) -> str:
    return line.whole if isinstance(line, Finding) else line


def _check_packed(given: list[str], root: Path, workers: int, output: OutputFlags) -> int:
    wanted = packed_names(root) if "all" in given else [resolve_dataset(name, root).name for name in given]
    if not wanted:
        raise UserError(f"nothing is packed in {root}; pack something: procap data pack shapes --data {quote(root)}")
    rows: list[tuple[object, ...]] = []
    problems: dict[str, list[str]] = {}
    for name in dict.fromkeys(wanted):
        with parts_progress(f"checking {name}") as progress:
            report = check_dataset(root, name, workers=workers, on_progress=progress)
        problems[name] = [*report.problems, *(problem for split in report.splits for problem in split.problems)]
        for split in report.splits:
            verdict = "ok" if split.shards_found == split.shards else "ok, the rest is not fetched yet"
            if split.problems:
                verdict = plural(len(split.problems), "problem")
            readable, found = f"{split.readable}/{split.images}", f"{split.shards_found}/{split.shards}"
            rows.append((name, split.name, readable, found, verdict))
        if not report.splits:
            rows.append((name, "-", "-", "-", "unreadable"))
    show(columns(("data set", "split", "images readable", "shards found", "verdict"), rows))
    broken = [name for name, lines in problems.items() if lines]
    for problem in (problem for name in broken for problem in problems[name]):
        note(f"procap: {problem}")
    for name in problems:
        if name in given and is_own_folder(name):
            note(
                f"'{name}' was checked as packed in {root}; to check the folder here: procap data check ./{quote(name)}"
            )
    for name in broken:
        note(f"procap: to repair '{name}', {repack_hint(root / name)}")
    if output.json:
        show_json({"data": str(root), "ok": not broken, "problems": problems})
    return 1 if broken else 0


def _check_raw(given: list[str], packing: PackFlags, decode: bool, workers: int, output: OutputFlags) -> int:
    root = packing.raw_root()
    assert root is not None
    wanted = list(PUBLISHED) if "all" in given or "paper" in given else [find(name) for name in given]
    rows: list[tuple[object, ...]] = []
    problems: dict[str, list[str]] = {}
    absent: list[str] = []
    for dataset in {dataset.name: dataset for dataset in wanted}.values():
        if dataset.source != "folder" or dataset.variant:
            raw = ", ".join(each.name for each in PUBLISHED)
            raise UsageError(f"'{dataset.name}' has no raw folder of its own; raw: {raw}")
        counts: Mapping[str, int] = {}
        try:
            source = raw_source(dataset, root, whole=False)
            counts, problems[dataset.name] = source.counts, [*source.problems]
            if decode:
                with parts_progress(f"checking {dataset.name}", counts) as progress:
                    problems[dataset.name] = [*check_source(source, workers=workers, on_progress=progress).problems]
        except UserError as error:
            problems[dataset.name] = [str(error)]
            if find_folder(dataset, root) is None:
                absent.append(dataset.name)
                rows.append((dataset.name, "-", "-", "-", "not found"))
                continue
        found = problems[dataset.name]
        verdict = plural(len(found), "problem") if found else "ok"
        for split, published in dataset.counts.items():
            rows.append((dataset.name, split, f"{counts.get(split, 0):,}", f"{published:,}", verdict))
    show(columns(("data set", "split", "images there", "published", "verdict"), rows))
    for name, found in problems.items():
        if found and (name not in absent or "all" not in given):
            note(f"\n{name}\n  " + "\n  ".join(found))
    ready = [name for name, found in problems.items() if not found]
    broken = [name for name, found in problems.items() if found and name not in absent]
    note(f"\n{len(ready)} ready to be packed, {len(broken)} with problems, {len(absent)} not found")
    if ready:
        note(f"pack: procap data pack {' '.join(ready)} --raw {quote(root)}")
    if output.json:
        show_json({"raw": str(root), "ready": ready, "broken": broken, "absent": absent, "problems": problems})
    return 1 if broken or not ready or (absent and "all" not in given) else 0
