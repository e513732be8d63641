"""`procap data check`: check packed shards, or check raw folders against the published lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cli.data_sources import raw_sets
from benchmarks.cli.flags import OutputFlags, PackFlags, flat
from benchmarks.console.help import PLAIN, examples
from benchmarks.console.output import columns, note, plural, quoted, show_json
from benchmarks.console.output import show as show_text
from runner.limits import available_cores
from shards.catalogue import CATALOGUE, find
from shards.errors import DataError, DataUsageError
from shards.home import data_root
from shards.mirror import is_mirror
from shards.resolve import base_name, packed_names, resolve_dataset

if TYPE_CHECKING:
    from shards.raw.check import RawReport

app = typer.Typer(**PLAIN)


@app.command(
    **examples(
        "procap data check",
        "procap data check shapes --data demo/data",
        "procap data check --raw /datasets",
        "procap data check oxford-pets --raw /datasets --no-decode",
    )
)
@flat
def check(
    output: OutputFlags,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="data sets [default: all]")] = None,
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where the shards are")] = "",
    raw: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="check raw folders below this one instead of shards")
    ] = None,
    no_decode: Annotated[bool, typer.Option("--no-decode", help="raw: do not open every image")] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="processes [default: one per core]")] = None,
) -> int:
    """Check packed shards (hashes, every image), or raw folders against the published lists."""
    given = [part.strip() for name in names or () for part in name.split(",") if part.strip()] or ["all"]
    if raw:
        return _check_raw(given, PackFlags(raw=raw), not no_decode, workers or available_cores(), output)
    return _check_packed(given, data_root(data), workers or available_cores(), output)


def _check_packed(given: list[str], root: Path, workers: int, output: OutputFlags) -> int:
    from shards.verify import verify

    wanted = packed_names(root) if "all" in given else [resolve_dataset(name, root).name for name in given]
    if not wanted:
        raise DataError(f"nothing is packed in {root}; pack something: procap data pack shapes --data {quoted(root)}")
    rows: list[tuple[object, ...]] = []
    problems: dict[str, list[str]] = {}
    for name in dict.fromkeys(wanted):
        with _bar(f"checking {name}") as progress:
            report = verify(root, name, workers=workers, on_progress=_of_splits(progress))
        problems[name] = [*report.problems, *(problem for split in report.splits for problem in split.problems)]
        for split in report.splits:
            fetched = "ok" if split.shards_found == split.shards else "ok, the rest is not fetched yet"
            verdict = fetched if not split.problems else plural(len(split.problems), "problem")
            rows.append(
                (name, split.name, f"{split.readable}/{split.images}", f"{split.shards_found}/{split.shards}", verdict)
            )
        if not report.splits:
            rows.append((name, "-", "-", "-", "unreadable"))
    show_text(columns(("data set", "split", "images readable", "shards found", "verdict"), rows))
    broken = {name: found for name, found in problems.items() if found}
    for found in broken.values():
        for problem in found:
            note(f"procap: {problem}")
    for advice in _mending(list(broken), root):
        note(f"procap: {advice}")
    if output.json:
        document: dict[str, Any] = {"data": str(root), "ok": not broken, "problems": problems}
        show_json(document)
    return 1 if broken else 0


def _mending(broken: Sequence[str], root: Path) -> Iterator[str]:
    """Yield commands that restore broken data sets, depending on their source."""
    if not broken:
        return
    if is_mirror(root):
        kept = [quoted(root / name) for name in broken if (root / name).exists()]
        if kept:
            yield f"delete what is broken and it is fetched again: rm -r {' '.join(kept)}"
        return
    own = [name for name in broken if base_name(name) not in CATALOGUE]
    published = [name for name in broken if name not in own and CATALOGUE[base_name(name)].source == "folder"]
    drawn = [name for name in broken if name not in own and name not in published]
    again = f"--force --data {quoted(root)}"
    if drawn:
        yield f"pack again what is broken: procap data pack {' '.join(drawn)} {again}"
    if published:
        raw = "" if os.environ.get("PROCAP_RAW") else "--raw FOLDER "
        yield f"pack again what is broken: procap data pack {' '.join(published)} {raw}{again}"
    if own:
        yield f"pack again from their YAML files: {', '.join(own)}: procap data pack FILE.yaml {again}"


def _check_raw(given: list[str], packing: PackFlags, decode: bool, workers: int, output: OutputFlags) -> int:
    from shards.raw.check import check_raw

    root = packing.raw_root()
    assert root is not None
    wanted = raw_sets() if "all" in given or "paper" in given else [find(name) for name in given]
    reports = []
    for dataset in {dataset.name: dataset for dataset in wanted}.values():
        if dataset.source != "folder" or dataset.variant:
            raise DataUsageError(
                f"'{dataset.name}' has no raw folder of its own; raw: {', '.join(d.name for d in raw_sets())}"
            )
        with _bar(f"checking {dataset.name}") as progress:
            reports.append(check_raw(dataset, root, decode=decode, workers=workers, on_progress=progress))
    show_text(
        columns(("data set", "folder", "split", "images there", "published", "verdict"), list(_raw_rows(reports, root)))
    )
    for report in reports:
        lines = [
            *report.problems,
            *(f"mend: {fix}" for fix in report.fixes),
            *(f"note: {text}" for text in report.notes),
        ]
        if lines and (report.found or report.nearly or "all" not in given):
            note(f"\n{report.dataset}\n  " + "\n  ".join(lines))
    note()
    absent = [report.dataset for report in reports if not report.found]
    broken = [report.dataset for report in reports if report.found and not report.ok]
    whole = [report.dataset for report in reports if report.ok]
    note(f"{len(whole)} ready to be packed, {len(broken)} with problems, {len(absent)} not found")
    if whole:
        note(f"pack: procap data pack {' '.join(whole)} --raw {quoted(root)}")
    if output.json:
        show_json(
            {
                "raw": str(root),
                "ready": whole,
                "broken": broken,
                "absent": absent,
                "problems": {report.dataset: list(report.problems) for report in reports},
            }
        )
    if not whole and not broken:
        note(f"{root} holds none of them; it should hold folders such as {_first_folders(reports)}")
    return 1 if broken or not whole or (absent and "all" not in given) else 0


def _first_folders(reports: Sequence[RawReport]) -> str:
    raws = [dataset.raw for report in reports[:3] if (dataset := find(report.dataset)).raw]
    return ", ".join(f"{raw.folders[0]}/" for raw in raws if raw)


def _raw_rows(reports: Sequence[RawReport], root: Path) -> Iterator[tuple[object, ...]]:
    for report in reports:
        if report.folder is None:
            yield (report.dataset, "-", "-", "-", "-", "not found")
            continue
        folder = report.folder.relative_to(root) if report.folder.is_relative_to(root) else report.folder
        verdict = "ok" if report.ok else plural(len(report.problems), "problem")
        for split in report.splits:
            yield (report.dataset, folder, split.name, f"{split.there:,}", f"{split.expected:,}", verdict)
        if not report.splits:
            yield (report.dataset, folder, "-", "-", "-", verdict)


def _of_splits(progress: Callable[[int, int], None]) -> Callable[[str, int, int], None]:
    """Convert per-split progress to progress over all splits."""
    done: dict[str, tuple[int, int]] = {}

    def add_split(split: str, count: int, total: int) -> None:
        done[split] = count, total
        progress(sum(count for count, _ in done.values()), sum(total for _, total in done.values()))

    return add_split


@contextmanager
def _bar(what: str) -> Iterator[Any]:
    """Show a progress bar whose length becomes known with the first call."""
    from runner.progress import ProgressDisplay

    with ProgressDisplay(what, 0, unit="images") as display:

        def progress(done: int, total: int) -> None:
            display.total = total
            display.update(done)

        yield progress
