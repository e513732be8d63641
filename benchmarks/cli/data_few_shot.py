"""`procap data few-shot`: list the few-shot samples of a data set."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.cli.flags import Data, Sampling, command, flag
from benchmarks.console.output import columns, note, plural, show, show_json
from benchmarks.console.parse import parse_shot_count
from shards.default_paths import data_root
from shards.image_selection import parse_classes, select_training_images
from shards.manifest import lines_digest
from shards.reader import open_dataset
from shards.resolve import resolve_dataset
from shards.uneven_samples import BALANCED, check_sampling


@command(
    "procap data few-shot shapes --shots 16 --seed 1",
    "procap data few-shot digits --sampling decay:0.06 --classes base",
    "procap data few-shot caltech101 --json > caltech101-16-1.json",
)
def few_shot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Data = "",
    shots: Annotated[str, flag("N|full", "training images per class")] = "16",
    seed: Annotated[int, flag("N", "seed of the draw", min=0)] = 1,
    sampling: Sampling = "",
    classes: Annotated[str, flag("all|base|...", "an uneven sample is drawn within them")] = "all",
) -> int:
    """List the few-shot images of a data set, drawn by CoOp's rule or an uneven one."""
    root = data_root(data)
    dataset = open_dataset(root, resolve_dataset(name, root).name)
    rule = check_sampling(sampling or BALANCED)
    count, part = parse_shot_count(shots), parse_classes(classes)
    samples = select_training_images(dataset, count, seed, part, rule)
    document: dict[str, Any] = {
        "dataset": dataset.name,
        "shots": count,
        "sampling": rule,
        "seed": seed,
        "classes": part,
    }
    rows: list[tuple[object, ...]] = []
    for split, chosen in (("train", samples.train), ("val", samples.val)):
        images = [
            {"label": samples.class_labels[label], "class": samples.classnames[label], "path": path}
            for path, label in zip(chosen.paths, chosen.labels, strict=True)
        ]
        document |= {split: images, f"{split}_digest": lines_digest(chosen.paths)}
        rows += [(split, *image.values()) for image in images]
        sizes = np.bincount(chosen.labels, minlength=len(samples.classnames))
        spread = f"{sizes.min()} to {sizes.max()} of each class"
        note(f"{split}: {plural(len(images), 'image')}, {spread}, digest {document[f'{split}_digest']}")
    show(columns(("split", "label", "class", "path"), rows))
    show_json(document)
    return 0
