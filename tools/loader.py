"""Measure how fast images are packed, streamed and augmented, compared with bare loops of Pillow over the same bytes.

    python -m tools.loader                 about eight minutes on 2 CPU cores
    python -m tools.loader --images 100    half a minute, to see that it works

Images decode like photographs: 1/f noise of 500 x 375 pixels, JPEG of quality 90, about 110 kB, ImageNet's
mean. Every round runs every row once, so that other load on the machine affects all of them; results are medians
over the rounds. It prints a Markdown table and writes the table and all numbers to `docs/results/`.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.console.output import plural
from benchmarks.tables.render import markdown_grid
from shards.pack import pack_source
from shards.raw.folders import FolderPart
from shards.reader import Split, open_dataset
from shards.records import Source
from tools.record import describe_machine, describe_run, write_record
from tools.synthetic import photograph_source, photographs

# torch is imported in functions: packing starts processes that import this file, and never need it.

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZE, EVAL_BATCH, TRAIN_BATCH = 224, 100, 32
CACHED_IMAGES = 256
CLASSES = 10
HEADERS = (
    "", "with", "cores", "images/s", "per core", "of decoding", "of CoOp's transform"
)  # fmt: skip
DECODE, TRANSFORM = "Pillow decodes", "and CoOp's transform"


@dataclass
class Measurement:
    """One timed task: `run` processes `images` images on `cores` cores; a number for each round."""

    name: str
    what: str
    cores: int
    images: int
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def round(self) -> None:
        """Time it once."""
        start = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def rates(self) -> list[float]:
        """Images per second in each round."""
        return [self.images / seconds for seconds in self.seconds]

    def share_of(self, loop: Measurement) -> float:
        """Return the median over the rounds of this rate divided by the rate of a bare loop on as many cores."""
        pairs = zip(self.rates, loop.rates, strict=True)
        return statistics.median(rate / (bare * self.cores) for rate, bare in pairs)

    def report(self, decode: Measurement, transform: Measurement) -> dict[str, Any]:
        """Return the measurements as plain JSON."""
        rate = statistics.median(self.rates)
        return {
            "name": self.name, "what": self.what, "cores": self.cores, "images": self.images,
            "images_per_second": round(rate, 1),  "images_per_second_per_core": round(rate / self.cores, 1),
            "of_decoding": round(self.share_of(decode), 3),
            "of_transform": round(self.share_of(transform), 3),
        }  # fmt: skip


def folder_source(root: Path, images: list[bytes]) -> Source:
    """Write the images as files in class folders and return the source to pack them from."""
    labels = tuple(i % CLASSES for i in range(len(images)))
    paths = tuple(f"{label}/{i:05d}.jpg" for i, label in enumerate(labels))
    for path, data in zip(paths, images, strict=True):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    part = partial(_folder_part, root, paths, labels)
    return replace(photograph_source(f"photographs-{CLASSES}"), counts={"test": len(images)}, part=part)


def _folder_part(
    root: Path, paths: tuple[str, ...], labels: tuple[int, ...], split: str, start: int, stop: int
) -> FolderPart:
    return FolderPart(root, paths[start:stop], labels[start:stop])


def rows(images: list[bytes], folder: Path, workers: int) -> list[Measurement]:
    """List all timed tasks, the bare loops first; packs the images once to have something to stream."""
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    from shards.images import decode_pixels
    from shards.transforms import eval_transform

    count, source = len(images), folder_source(folder / "raw", images)
    pack = partial(pack_source, source, folder / "data", force=True, per_shard=max(1, count // 20))
    pack(workers=workers)
    split = open_dataset(folder / "data", source.name).split("test")
    steps = (transforms.Resize(SIZE, InterpolationMode.BICUBIC), transforms.CenterCrop(SIZE), transforms.ToTensor())
    coop = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    crop = eval_transform(SIZE, MEAN, STD).crop

    def loop(work: Callable[[Image.Image], object]) -> None:
        for data in images:
            work(Image.open(io.BytesIO(data)))

    def decode_all() -> None:
        for data in images:
            decode_pixels(data)

    decode = partial(loop, lambda image: image.load())
    resize = partial(loop, lambda image: np.asarray(crop(image.convert("RGB"))))
    transform = partial(loop, lambda image: coop(image.convert("RGB")))
    counts = sorted({1, workers})
    threads = (0, *counts)
    return [
        Measurement(DECODE, "a loop over bytes in memory", 1, count, decode),
        Measurement("and resizes and crops", "the same, to 224 x 224 bytes", 1, count, resize),
        Measurement("simplejpeg decodes", "the same bytes, to arrays: the host's part for a GPU", 1, count, decode_all),
        Measurement(TRANSFORM, "the same, to floats, by torchvision", 1, count, transform),
        *(Measurement("packing", plural(n, "worker"), n, count, partial(pack, workers=n)) for n in counts),
        *(
            Measurement("evaluation", plural(n, "worker"), max(1, n), count, partial(_evaluate, split, n))
            for n in threads
        ),
        *(_training(split, n, count) for n in threads),
    ]


def _evaluate(split: Split, workers: int) -> None:
    from shards.loader import evaluation_batches
    from shards.transforms import eval_transform

    batches = evaluation_batches(split, eval_transform(SIZE, MEAN, STD), EVAL_BATCH, workers)
    if sum(len(indices) for _, _, indices in batches) != len(split):
        raise RuntimeError("not every image was streamed")


def _training(split: Split, workers: int, images: int) -> Measurement:
    """Read epochs after the first, over cached images, with as many images as the other rows."""
    from shards.loader import TrainStream
    from shards.transforms import TrainAugment

    few = split.subset(range(min(CACHED_IMAGES, len(split))))
    stream = TrainStream(few, min(TRAIN_BATCH, len(few)), TrainAugment(SIZE, MEAN, STD), seed=1, workers=workers)
    per_epoch = sum(len(labels) for _, labels in stream.epoch(0))
    epochs = max(1, images // per_epoch)

    def train() -> None:
        for epoch in range(1, 1 + epochs):
            for _ in stream.epoch(epoch):
                pass

    # Fill the cache: an epoch drops its incomplete last batch, but several shuffled epochs read all images.
    for epoch in range(1, 4):
        list(stream.epoch(epoch))
    return Measurement("cached training", plural(workers, "worker"), max(1, workers), epochs * per_epoch, train)


def table(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    images = report["images"]
    parts = [
        "# Packing and streaming compared with bare loops of Pillow",
        f"{images['count']:,} JPEGs of 500 x 375 pixels, {images['mean_bytes'] / 1000:.0f} kB on average; medians of "
        f"{report['rounds']} interleaved rounds; {describe_machine(report)}, Pillow {report['pillow']}.",
        f"    {report['command']}",
        markdown_grid(HEADERS, [_line(row) for row in report["rows"]], left=range(2)),
        "- of decoding, of CoOp's transform: images per second divided by those of the bare single-threaded loop, in\n"
        "  the same round, times the cores. The first loop only decodes; CoOp's transform also resizes (bicubic),\n"
        "  crops and normalises, as evaluation has to.\n"
        "- packing reads files, proves that each decodes, and writes and hashes shards; starting its processes "
        f"counts.\n- cached training: epochs after the first over {min(CACHED_IMAGES, images['count'])} images, random "
        "crop and flip; nothing is read or decoded.",
    ]
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["name"], row["what"], str(row["cores"]), f"{row['images_per_second']:.0f}",
        f"{row['images_per_second_per_core']:.0f}", f"{row['of_decoding']:.0%}", f"{row['of_transform']:.0%}",
    ]  # fmt: skip


def main() -> None:
    """Parse the command line, measure, print the table and write it with the measurements."""
    parser = argparse.ArgumentParser(description="Time packing and streaming compared with bare loops of Pillow.")
    parser.add_argument("--images", type=int, default=1500, help="100 for a quick look")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--out", type=Path, default=Path("docs/results/loader.json"), help="and .md next to it")
    arguments = parser.parse_args()
    import torch

    # Rows with one core must use one core only; torchvision's tensor operations would use all of them.
    torch.set_num_threads(1)
    images = photographs(arguments.images)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        timed = rows(images, Path(folder), arguments.workers)
        for number in range(arguments.rounds):
            for row in timed:
                row.round()
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    decode, transform = timed[0], next(row for row in timed if row.name == TRANSFORM)
    report = describe_run("loader", None) | {
        "pillow": Image.__version__,
        "images": {"count": len(images), "mean_bytes": round(statistics.mean(map(len, images)))},
        "rounds": arguments.rounds,
        "rows": [row.report(decode, transform) for row in timed],
    }
    write_record(arguments.out, report, table(report))
    print(table(report))


if __name__ == "__main__":
    main()
