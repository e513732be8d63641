"""`procap data show`: a contact sheet of a packed data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import Data, OutputFlags, command, flag
from benchmarks.console.output import show as show_text
from benchmarks.console.output import show_json
from procap.errors import UsageError
from shards.contact_sheet import contact_sheet
from shards.default_paths import data_root
from shards.resolve import resolve_dataset

PICTURES = (".png", ".pdf", ".svg", ".jpg")


@command("procap data show petals --out petals.png", "procap data show shapes --split train")
def show(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Data = "",
    split: Annotated[str, flag("NAME", "train, val or test")] = "test",
    out: Annotated[Path | None, flag("FILE", "picture to write [default: NAME-SPLIT.png]")] = None,
) -> int:
    """Write a contact sheet: a few images of every class."""
    root = data_root(data)
    dataset = resolve_dataset(name, root).name
    out = out or Path(f"{dataset}-{split}.png")
    if out.suffix.lower() not in PICTURES:
        raise UsageError(f"--out {out}: a picture's name ends in {', '.join(PICTURES)}")
    contact_sheet(root, dataset, split, out)
    show_text(str(out))
    if output.json:
        show_json({"dataset": dataset, "split": split, "picture": str(out)})
    return 0
