"""`procap data few-shot`: list the few-shot samples of a data set, or write them to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli.flags import Data, OutputFlags, command, flag
from benchmarks.console.output import columns, note, show, show_json
from shards.default_paths import data_root
from shards.fewshot import draw_samples, list_split
from shards.files import write_file
from shards.manifest import lines_digest
from shards.reader import open_dataset
from shards.resolve import resolve_dataset

COLUMNS = ("label", "class", "path")


@command(
    "procap data few-shot shapes --shots 16 --seed 1",
    "procap data few-shot caltech101 --out caltech101-16-1.json",
)
def few_shot(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Data = "",
    shots: Annotated[int, flag("N", "training images per class", min=1)] = 16,
    seed: Annotated[int, flag("N", "seed of the draw", min=0)] = 1,
    out: Annotated[Path | None, flag("FILE", "write the samples as JSON")] = None,
) -> int:
    """List the few-shot images of a data set, drawn by CoOp's rule."""
    root = data_root(data)
    shards = open_dataset(root, resolve_dataset(name, root).name)
    samples = draw_samples(shards, shots, seed)
    document: dict[str, Any] = {"dataset": shards.name, "shots": shots, "seed": seed}
    rows: list[tuple[object, ...]] = []
    show(f"{shards.name}: {shots} shots, seed {seed}, drawn by CoOp's rule")
    for split, paths in (("train", samples.train), ("val", samples.val)):
        labels = dict(zip(*list_split(shards, split), strict=True))
        images = [
            {"label": int(labels[path]), "class": shards.classnames[labels[path]], "path": path} for path in paths
        ]
        digest = lines_digest(paths)
        document |= {split: images, f"{split}_digest": digest}
        rows += [(split, *(image[key] for key in COLUMNS)) for image in images]
        classes = len({image["label"] for image in images})
        show(f"{split:<5}  {len(images):,} images of {classes} classes; digest {digest}")
    show("\n" + columns(("split", *COLUMNS), rows))
    if out:
        write_file(out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        note(f"written to {out}")
    if output.json:
        show_json(document | {"file": str(out) if out else None})
    return 0
