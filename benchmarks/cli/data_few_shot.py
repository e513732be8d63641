"""`procap data few-shot`: list the few-shot samples of a data set, write them to a file, or import others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli.flags import Data, OutputFlags, command, flag
from benchmarks.console.output import columns, note, quote, show, show_json
from procap.errors import UsageError
from shards.default_paths import data_root
from shards.fewshot import draw_samples, list_split, store_samples, write_samples
from shards.import_samples import import_samples
from shards.manifest import lines_digest
from shards.reader import open_dataset
from shards.resolve import resolve_dataset

IMAGE = ("label", "class", "path")


@command(
    "procap data few-shot shapes --shots 16 --seed 1",
    "procap data few-shot caltech101 --out caltech101-16-1.json",
    "procap data few-shot caltech101 --import caltech-101/split_fewshot/shot_16-seed_1.pkl",
)
def few_shot(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Data = "",
    shots: Annotated[int, flag("N", "training images per class", min=1)] = 16,
    seed: Annotated[int, flag("N", "of the draw", min=0)] = 1,
    source: Annotated[
        Path | None, flag("FILE", "take CoOp's .pkl cache, or .json of --out, instead", "--import")
    ] = None,
    out: Annotated[Path | None, flag("FILE", "write the samples as JSON")] = None,
) -> int:
    """List the few-shot images of a data set, as CoOp's rule draws them, or import those of CoOp itself."""
    root = data_root(data)
    if out and out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file, for example samples.json")
    shards = open_dataset(root, resolve_dataset(name, root).name)
    samples = drawn = draw_samples(shards, shots, seed)
    stored = None
    if source:
        samples = import_samples(shards, source, shots, seed)
        stored = store_samples(shards.folder, samples)
    images: dict[str, list[dict[str, Any]]] = {}
    for split, paths in (("train", samples.train), ("val", samples.val)):
        labels = dict(zip(*list_split(shards, split), strict=True))
        images[split] = [
            {"label": int(labels[path]), "class": shards.classnames[labels[path]], "path": path} for path in paths
        ]
    digests = {"train": lines_digest(samples.train), "val": lines_digest(samples.val)}
    origin = {"coop-rule": "drawn by CoOp's rule", "imported": "imported"}[samples.source]
    show(f"{shards.name}: {samples.shots} shots, seed {samples.seed}, {origin}")
    for split, listed in images.items():
        count = len({image["label"] for image in listed})
        show(f"{split:<5}  {len(listed):,} images of {count} classes; digest {digests[split]}")
    if not source:
        rows = [(split, *(image[key] for key in IMAGE)) for split, listed in images.items() for image in listed]
        show("\n" + columns(("split", *IMAGE), rows))
    elif samples.has_images_of(drawn):
        note("these are the images that CoOp's rule draws: training needs no --few-shot-samples to use them")
    else:
        shared = len({*samples.train} & {*drawn.train})
        note(f"CoOp's rule draws others: {shared:,} of {len(samples.train):,} training images are the same")
        chosen = f"--datasets {shards.name} --shots {samples.shots} --few-shot-samples {samples.digest}"
        note(f"stored in {stored}; train on them: procap train --methods procap {chosen} --data {quote(root)}")
    if out:
        stored = out
        write_samples(out, samples)
        note(f"written to {stored}")
    if output.json:
        names = ("dataset", "shots", "seed", "source")
        document: dict[str, Any] = {name: getattr(samples, name) for name in names} | images
        document |= {"digest": digests["train"], "val_digest": digests["val"], "file": str(stored) if stored else None}
        show_json(document | ({"equals_rule": samples.has_images_of(drawn)} if source else {}))
    return 0
