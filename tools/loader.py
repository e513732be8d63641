"""Measure how fast images are decoded, streamed and augmented, compared with bare loops of Pillow over the same bytes.

    python -m tools.loader                 about eight minutes on 2 CPU cores
    python -m tools.loader --images 100    half a minute, to see that it works

Images decode like photographs: 1/f noise of 500 x 375 pixels, JPEG of quality 90, about 110 kB. Each round runs each
row once, so that other load on the machine affects all of them; results are medians over the rounds.
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

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from benchmarks.console.output import plural
from benchmarks.runtime.measure import time_interleaved
from benchmarks.tables.render import markdown_grid
from procap.clip import OPENAI_MEAN, OPENAI_STD
from shards.images import decode_pixels
from shards.kept_crops import KeptCrops
from shards.loader import evaluation_batches
from shards.reader import ImageList, open_dataset
from shards.transforms import EvalTransform
from tools.record import describe_machine, describe_run
from tools.synthetic import pack_photographs, photographs

SIZE, EVAL_BATCH = 224, 100
DATASET = "photographs-400"
"""1,600 test images to evaluate on, so that opening a shard weighs little."""

Row = tuple[str, int, int, Callable[[], object]]
"""Name, cores, images and work of one row of the table."""


def list_rows(images: list[bytes], folder: Path, workers: int) -> list[Row]:
    """List all timed rows, the bare loops first."""
    steps = (transforms.Resize(SIZE, InterpolationMode.BICUBIC), transforms.CenterCrop(SIZE), transforms.ToTensor())
    coop = transforms.Compose([*steps, transforms.Normalize(OPENAI_MEAN, OPENAI_STD)])
    crop = EvalTransform(SIZE, OPENAI_MEAN, OPENAI_STD).crop

    def loop(work: Callable[[bytes], object]) -> None:
        for data in images:
            work(data)

    loops: dict[str, Callable[[bytes], object]] = {
        "Pillow decodes": lambda data: Image.open(io.BytesIO(data)).load(),
        "Pillow decodes, resizes and crops": lambda data: np.asarray(crop(Image.open(io.BytesIO(data)).convert("RGB"))),
        "Pillow and CoOp's transform": lambda data: coop(Image.open(io.BytesIO(data)).convert("RGB")),
        "simplejpeg decodes": decode_pixels,
    }
    test = open_dataset(pack_photographs(DATASET, folder), DATASET).open_images("test")
    rows: list[Row] = [(name, 1, len(images), partial(loop, work)) for name, work in loops.items()]
    for count in sorted({0, 1, workers}):
        described = plural(count, "decoding thread") if count else "decoding in the main thread"
        rows.append((f"evaluation, {described}", max(1, count), len(test), partial(_evaluate, test, count)))
    kept = KeptCrops().wrap(test, EvalTransform(SIZE, OPENAI_MEAN, OPENAI_STD))
    _evaluate(kept, 0)
    rows.append(("evaluation, crops of an earlier one kept", 1, len(test), partial(_evaluate, kept, 0)))
    return rows


def _evaluate(test: ImageList, workers: int) -> None:
    batches = evaluation_batches(test, EvalTransform(SIZE, OPENAI_MEAN, OPENAI_STD), EVAL_BATCH, workers)
    if sum(len(indices) for _, _, indices in batches) != len(test):
        raise RuntimeError("not every image was streamed")


def main() -> None:
    """Parse the command line, measure, print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1500, help="of the bare loops; 100 for a quick look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: one per core")
    arguments = parser.parse_args()
    # Rows with one core must use one core only; torchvision's tensor operations would use all of them.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        rows = list_rows(photographs(arguments.images), Path(folder), arguments.workers)
        timings = time_interleaved([work for *_, work in rows], arguments.rounds, torch.device("cpu"))
    measured = []
    for (name, cores, count, _), seconds in zip(rows, timings, strict=True):
        rate = count / statistics.median(seconds)
        measured.append([name, str(cores), f"{rate:.0f}", f"{rate / cores:.0f}"])
    print(markdown_grid(("", "cores", "images/s", "per core"), measured, left=range(1)))
    print(f"\nMedians of {arguments.rounds} rounds; {describe_machine(describe_run('loader', None))}")


if __name__ == "__main__":
    main()
