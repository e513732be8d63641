"""Measure which CPU settings are fastest on this machine: precision, threads, and how images become patches.

The parts of the training step that do not depend on the batch, refinement and optimizer, are also timed separately.

    python -m benchmarks.studies.cpu_settings                                 mini, batches of 4 and 32; under a minute
    python -m benchmarks.studies.cpu_settings --backbone ViT-B/16 --random    full size, random weights; ten minutes

Every setting does the same work in one process, in interleaved rounds; a speed-up is the median of the
ratios per round, so that other load on the machine affects both. Prints a table and writes no file, unless
`--out` is given. How threads wait for each other is fixed when OpenMP starts: compare runs of this command under
OMP_WAIT_POLICY=active and passive.

Shapes: B images, C classes, D vision width, L patches, W image size.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.console.output import columns, show, show_json
from benchmarks.console.parse import parse_integers
from benchmarks.runtime.data import class_names
from benchmarks.runtime.measure import matmul_peak, time_in_turns
from benchmarks.studies.record import describe_run
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods import build_method
from procap.methods.procap import PROCAP_RECIPE, ProCAP
from procap.text import LabelSpace
from procap.weights.loading import load_clip
from runner.engine import make_optimizer
from runner.results import write_json
from shards.rng import generator

SEED = 1


@dataclass(frozen=True)
class Setting:
    """One setting: number of threads, and whether autocast uses bfloat16."""

    name: str
    threads: int
    bf16: bool

    def run(self, work: Work) -> object:
        """Run `work` with this number of threads; `work` calls `autocast` itself around its forward pass."""
        torch.set_num_threads(self.threads)
        return work(self)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


Work = Callable[[Setting], object]


def settings_here() -> list[Setting]:
    """List the settings: all cores in float32 (the reference), bfloat16, and one thread if there are more cores."""
    cores = os.cpu_count() or 1
    every = f"{cores} threads" if cores > 1 else "1 thread"
    found = [Setting(f"fp32, {every}", cores, False), Setting(f"bf16, {every}", cores, True)]
    if cores > 1:
        found += [Setting("fp32, 1 thread", 1, False), Setting("bf16, 1 thread", 1, True)]
    return found


def measure(clip: CLIP, batches: Sequence[int], classes: int, rounds: int) -> list[dict[str, Any]]:
    """Measure the training step, its constant parts, the evaluated batch and the patches for every batch size."""
    settings, rows = settings_here(), list[dict[str, Any]]()
    for batch in batches:
        for name, work in _works(clip, batch, classes).items():
            rows += _compare(name, batch, [(setting.name, setting, work) for setting in settings], rounds)
        ways = [(way, settings[0], work) for way, work in _patch_ways(clip, batch)]
        rows += _compare("patches alone", batch, ways, rounds, times=10)
    return rows


def _compare(
    name: str, batch: int, ways: Sequence[tuple[str, Setting, Work]], rounds: int, times: int = 1
) -> list[dict[str, Any]]:
    """Measure the same work in several ways; gain: the speed-up over the first way, median over the rounds."""
    works = [partial(setting.run, work) for _, setting, work in ways]
    for work in works:
        work()
    seconds = time_in_turns(works, rounds, torch.device("cpu"), times)
    return [
        {"work": name, "batch": batch, "setting": way, "milliseconds": 1e3 * statistics.median(own),
         "gain": statistics.median(first / mine for first, mine in zip(seconds[0], own, strict=True))}
        for (way, _, _), own in zip(ways, seconds, strict=True)
    ]  # fmt: skip


def _works(clip: CLIP, batch: int, classes: int) -> dict[str, Work]:
    """Make ProCAP's whole training step, two parts of it, and its classification of as many images."""
    method = build_method("procap", clip, LabelSpace(class_names(classes)), {}, generator(SEED, "init"))
    assert isinstance(method, ProCAP)
    optimizer = make_optimizer(method, PROCAP_RECIPE)
    # With a learning rate of zero the optimizer still does all its work, but the weights never change.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    images, labels = _images(clip, batch), torch.arange(batch) % classes
    noise, classify = method.draw(generator(SEED, "noise")), method.classifier()

    def step(setting: Setting) -> None:
        with setting.autocast():
            loss = torch.stack(list(method.loss(images, labels, noise).values())).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def evaluate(setting: Setting) -> Tensor:
        with setting.autocast():
            return classify(images)

    def refine(setting: Setting) -> None:
        with setting.autocast():
            vision, text = method.refine(*method.tokens(noise))
        optimizer.zero_grad(set_to_none=True)
        torch.cat([tokens.flatten() for tokens in (*vision, *text)]).sum().backward()

    def update(setting: Setting) -> None:
        optimizer.step()

    # The order matters: the update uses the gradients of the refinement, which are nearly all gradients.
    return {"training step": step, "of it refinement": refine, "of it optimizer": update, "evaluated batch": evaluate}


def _patch_ways(clip: CLIP, batch: int) -> list[tuple[str, Work]]:
    """Convert images to rows of patches [B, L, D]: as the tower does it, and by the equivalent convolution."""
    tower, images = clip.visual, _images(clip, batch)
    weight, stride = tower.conv1.weight, tower.conv1.stride

    def rows(x: Tensor, kernel: Tensor) -> Tensor:
        # Make the result contiguous, like that of the matrix product.
        return torch.conv2d(x, kernel, stride=stride).flatten(2).transpose(1, 2).contiguous()

    def last(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    turned = last(weight)

    def without_graph(way: Callable[[], Tensor], setting: Setting) -> Tensor:
        with torch.inference_mode():
            return way()

    ways: dict[str, Callable[[], Tensor]] = {
        "convolution": lambda: rows(images, weight),
        "convolution, channels last": lambda: rows(last(images), turned),
        "one product (as the tower does)": lambda: tower.embed(images),
    }
    return [(name, partial(without_graph, way)) for name, way in ways.items()]


def _images(clip: CLIP, batch: int) -> torch.Tensor:
    size = clip.geometry.image_size
    return torch.randn(batch, 3, size, size, generator=generator(SEED, "images"))


def read_speed() -> float:
    """Measure bytes read per second by a sum over more data than the caches hold."""
    data = torch.zeros(2**27)
    [seconds] = time_in_turns([data.sum], 4, data.device)
    return data.nbytes / min(seconds)


def processor_flags() -> list[str]:
    """List the processor's features for lower precision; empty if the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").lower().splitlines()
    except OSError:
        return []
    known = next((line for line in lines if line.startswith(("flags", "features"))), "").split()
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16") if flag in known]


def report(clip: CLIP, batches: Sequence[int], classes: int, rounds: int) -> dict[str, Any]:
    """Collect all measurements and the speed of the processor as plain JSON."""
    before, device = torch.get_num_threads(), torch.device("cpu")
    try:
        torch.set_num_threads(os.cpu_count() or 1)
        peaks = {precision: matmul_peak(device, precision) / 1e9 for precision in ("fp32", "bf16")}
        speed = read_speed() / 1e9
        rows = measure(clip, batches, classes, rounds)
    finally:
        torch.set_num_threads(before)
    return {
        "backbone": clip.name, "classes": classes, "rounds": rounds, "flags": processor_flags(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""), "gflops": peaks, "gbytes": speed, "rows": rows,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Format the report as a plain table."""
    cpu, peaks = found["environment"]["cpu"], found["gflops"]
    head = [
        f"{cpu['name']}, {cpu['cores']} cores ({', '.join(found['flags']) or 'flags unknown'}), "
        f"OMP_WAIT_POLICY={found['wait_policy'] or 'unset'}, load {found['load_average']}",
        f"matrix products: fp32 {peaks['fp32']:.0f}, bf16 {peaks['bf16']:.0f} GFLOP/s; "
        f"memory read at {found['gbytes']:.0f} GB/s",
        f"{found['backbone']}, {found['classes']} classes, {found['rounds']} rounds; gain: on the work's first line",
        "",
    ]
    lines = [
        (row["work"], row["batch"], row["setting"], f"{row['milliseconds']:.2f}", f"{row['gain']:.2f}")
        for row in found["rows"]
    ]
    return "\n".join(head) + columns(("work", "batch", "setting", "ms", "gain"), lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser("python -m benchmarks.studies.cpu_settings", description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--random", action="store_true", help="random weights, for speed without a download")
    parser.add_argument("--batches", default="4,32", help="images at once")
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout, and no table")
    parser.add_argument("--out", type=Path, help="also write the report as JSON to this file")
    flags = parser.parse_args(argv)
    try:
        batches = parse_integers(flags.batches, "--batches", "4,32")
        if min(*batches, flags.classes, flags.rounds, 1) < 1:
            parser.error("batches, classes and rounds must be at least 1")
        clip = load_clip(flags.backbone, "random" if flags.random else None)
    except UserError as error:
        parser.error(str(error))
    found = describe_run("cpu_settings", argv) | report(clip, batches, flags.classes, flags.rounds)
    if flags.out:
        write_json(flags.out, found)
    if flags.json:
        show_json(found)
    else:
        show(table(found))


if __name__ == "__main__":
    main()
