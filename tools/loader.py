"""Measure how fast images are decoded, streamed and augmented, compared with bare loops of Pillow over the same bytes.

    python -m tools.loader                 about eight minutes on 2 CPU cores
    python -m tools.loader --images 100    half a minute, to see that it works

Images decode like photographs: 1/f noise of 500 x 375 pixels, JPEG of quality 90, about 110 kB. Each round runs each
row once, so that other load on the machine affects all of them; results are medians over the rounds. It prints a
Markdown table and writes the table and all numbers to `docs/results/`.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from benchmarks.runtime.measure import time_interleaved
from benchmarks.tables.render import markdown_grid
from procap.clip import OPENAI_MEAN, OPENAI_STD
from shards.images import decode_pixels
from shards.loader import evaluation_batches
from shards.reader import Split, open_dataset
from shards.transforms import eval_transform
from tools.record import describe_machine, describe_run, write_record
from tools.synthetic import pack_photographs, photographs

SIZE, EVAL_BATCH = 224, 100
DATASET = "photographs-100"
"""400 test images to evaluate on."""

Row = tuple[str, int, int, Callable[[], object]]
"""Name, cores, images and work of one row of the table."""


def list_rows(images: list[bytes], folder: Path, workers: int) -> list[Row]:
    """List all timed rows, the bare loops first."""
    steps = (transforms.Resize(SIZE, InterpolationMode.BICUBIC), transforms.CenterCrop(SIZE), transforms.ToTensor())
    coop = transforms.Compose([*steps, transforms.Normalize(OPENAI_MEAN, OPENAI_STD)])
    crop = eval_transform(SIZE, OPENAI_MEAN, OPENAI_STD).crop

    def loop(work: Callable[[bytes], object]) -> None:
        for data in images:
            work(data)

    loops: dict[str, Callable[[bytes], object]] = {
        "Pillow decodes": lambda data: Image.open(io.BytesIO(data)).load(),
        "Pillow decodes, resizes and crops": lambda data: np.asarray(crop(Image.open(io.BytesIO(data)).convert("RGB"))),
        "Pillow and CoOp's transform": lambda data: coop(Image.open(io.BytesIO(data)).convert("RGB")),
        "simplejpeg decodes": decode_pixels,
    }
    test = open_dataset(pack_photographs(DATASET, folder), DATASET).split("test")
    rows: list[Row] = [(name, 1, len(images), partial(loop, work)) for name, work in loops.items()]
    for count in sorted({0, 1, workers}):
        described = f"{count} decoding threads" if count else "decoding in the main thread"
        rows.append((f"evaluation, {described}", max(1, count), len(test), partial(_evaluate, test, count)))
    return rows


def _evaluate(split: Split, workers: int) -> None:
    batches = evaluation_batches(split, eval_transform(SIZE, OPENAI_MEAN, OPENAI_STD), EVAL_BATCH, workers)
    if sum(len(indices) for _, _, indices in batches) != len(split):
        raise RuntimeError("not every image was streamed")


def format_table(record: dict[str, Any]) -> str:
    """Format the record as Markdown."""
    rows = [
        [row["name"], str(row["cores"]), *(f"{row[name]:.0f}" for name in ("images_per_second", "per_core"))]
        for row in record["rows"]
    ]
    head = f"JPEGs of 500 x 375 pixels; medians of {record['rounds']} rounds; {describe_machine(record)}"
    grid = markdown_grid(("", "cores", "images/s", "per core"), rows, left=range(1))
    return f"# Decoding and streaming\n\n{head}.\n\n    {record['command']}\n\n{grid}\n"


def main() -> None:
    """Parse the command line, measure, print the table and write it with the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1500, help="of the bare loops; 100 for a quick look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--out", type=Path, default=Path("docs/results/loader.json"), help="and .md next to it")
    arguments = parser.parse_args()
    # Rows with one core must use one core only; torchvision's tensor operations would use all of them.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        rows = list_rows(photographs(arguments.images), Path(folder), arguments.workers)
        timings = time_interleaved([work for *_, work in rows], arguments.rounds, torch.device("cpu"))
    measured = []
    for (name, cores, count, _), seconds in zip(rows, timings, strict=True):
        rate = count / statistics.median(seconds)
        measured.append({"name": name, "cores": cores, "images_per_second": rate, "per_core": rate / cores})
    record = describe_run("loader", None) | {"rounds": arguments.rounds, "rows": measured}
    write_record(arguments.out, record, format_table(record))
    print(format_table(record))


if __name__ == "__main__":
    main()
