"""`procap data show`: the classes and images of a packed data set."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.cli.flags import Data, command
from benchmarks.console.output import columns, show_json
from benchmarks.console.output import show as show_text
from benchmarks.console.packing_progress import count_images, format_classes
from shards.default_paths import data_root
from shards.reader import open_dataset
from shards.resolve import resolve_dataset


@command("procap data show petals", "procap data show shapes --json")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")], data: Data = "") -> int:
    """Show what a packed data set holds: its prompt, its classes, and the images of each class and split."""
    root = data_root(data)
    dataset = open_dataset(root, resolve_dataset(name, root).name)
    manifest = dataset.manifest
    facts = (("data set", dataset.name), ("source", manifest.source), ("template", manifest.template))
    show_text(columns(("", ""), [*facts, ("digest", manifest.digest)]) + "\n")
    counts = count_images(dataset)
    show_text(format_classes(dataset.classnames, counts))
    document: dict[str, Any] = {**dict(facts), "digest": manifest.digest, "classes": dataset.classnames}
    show_json(document | {"images": {split: count.tolist() for split, count in counts.items()}})
    return 0
