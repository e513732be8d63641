"""`procap data check`: check packed shards."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from benchmarks.cli.flags import Data, Workers, command
from benchmarks.console.output import columns, note, plural, quote, show, show_json
from benchmarks.console.packing_progress import parts_progress
from benchmarks.console.parse import expand_datasets, split_names
from procap.errors import UserError
from runner.devices import available_cores
from shards.check import check_dataset
from shards.default_paths import data_root
from shards.manifest import repack_hint
from shards.mirror import mirrored_url, refresh
from shards.resolve import packed_names, resolve_dataset


@command("procap data check", "procap data check shapes --data demo/data")
def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="packed data sets [default: all]")] = None,
    data: Data = "",
    workers: Workers = None,
) -> int:
    """Check packed shards: hash every shard and decode every image."""
    root, text = data_root(data), ",".join(names or ())
    packed, named = packed_names(root), split_names(text)
    # Of a group those that are packed.
    chosen = [name for name in expand_datasets(text) if name in named or name in packed]
    selected = [resolve_dataset(name, root).name for name in chosen] if named else packed
    if not selected:
        if url := mirrored_url(root):
            raise UserError(f"no data set of {url} was opened here: name those to check")
        at = f" --data {quote(root)}"
        hint = f"pack generated data: procap data pack shapes{at}; get the paper's: procap data fetch paper{at}"
        raise UserError(f"nothing is packed in {root}; {hint}")
    rows: list[tuple[object, ...]] = []
    problems: dict[str, list[str]] = {}
    for name in dict.fromkeys(selected):
        with parts_progress(f"checking {name}") as progress:
            try:
                splits = check_dataset(root, name, workers=workers or available_cores(), on_progress=progress)
                problems[name] = [problem for split in splits for problem in split.problems]
            except UserError as error:
                splits, problems[name] = [], [str(error)]
                rows.append((name, "-", "-", "-", "unreadable"))
        for split in splits:
            is_partial = split.shards_present < split.shards
            verdict = "ok, the rest is not fetched yet" if is_partial else "ok"
            verdict = plural(len(split.problems), "problem") if split.problems else verdict
            shards = f"{split.shards_present}/{split.shards}"
            rows.append((name, split.name, f"{split.readable}/{split.images}", shards, verdict))
    show(columns(("data set", "split", "images readable", "shards found", "verdict"), rows))
    broken = [name for name in problems if problems[name]]
    for name in broken:
        for problem in problems[name]:
            note(f"procap: {problem}")
        with suppress(UserError):
            note(f"procap: to repair '{name}', {repack_hint(refresh(root, name))}")
    show_json({"data": str(root), "ok": not broken, "problems": problems})
    return 1 if broken else 0
