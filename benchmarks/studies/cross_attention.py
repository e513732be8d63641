"""Time ProCAP's cross-attention in eager, compiled and fused form, and compare with the time to read its weights.

    python -m benchmarks.studies.cross_attention                    all levels of ViT-B/16, on the first GPU; a minute
    python -m benchmarks.studies.cross_attention --autocast         as mixed precision trains it

Each way refines the same tokens through all levels, forward alone and forward with backward, launched one by one and
as a CUDA graph. Rounds run every way once, medians are printed, and each way's result is compared with eager's. The
floor counts every parameter once per level and pass, read forward, read and written as a gradient backward; the tokens
are next to nothing. Without a GPU it prints the floor, and what eager takes on the CPU: the kernels run on GPUs only.

Shapes: P prompt tokens, Dv and Dt widths of vision and text.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runtime.measure import synchronize
from benchmarks.tables.render import markdown_grid
from procap.cross_attention import CrossAttention
from procap.initialisation import linear, normal
from procap.kernels.refinement import capture_graph, eager_level, fused_level
from runner.environment import environment, resolve_device
from runner.results import write_bytes, write_json

HBM = 4.8e12
"""Memory bandwidth of an H200 in bytes per second, from its data sheet."""

THIS_MEMORY = "this memory (copying 1 GiB)"
FLOOR_HEADERS = ("bytes at", "TB/s", "forward us", "with backward us")
WAYS_HEADERS = (
    "way", "forward us", "with backward us", "of eager", "of this memory's floor", "kernels", "off eager by"
)  # fmt: skip

Step = Callable[[], tuple[Tensor, ...]]


@dataclass
class Way:
    """One implementation: `forward` and `step` (with backward) return tensors to compare; None if it cannot run."""

    name: str
    forward: Callable[[], object] | None
    step: Callable[[], object] | None
    difference: float = math.nan
    kernels: int | None = None
    forward_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)


class Stack:
    """Tokens and random weights of all levels on one device."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {
            "heads": arguments.heads,
            "head_width": arguments.head_width,
            "norm": arguments.norm,
            "zero_output": False,
        }
        self.device, self.autocast = device, arguments.autocast
        self.projection = linear(arguments.vision, arguments.text, generator).to(device)
        self.vision, self.text = (
            nn.ModuleList(
                CrossAttention(width, arguments.text, generator, **options) for _ in range(arguments.levels)
            ).to(device)
            for width in (arguments.vision, arguments.text)
        )
        self.tokens = [
            normal((arguments.tokens, width), generator).to(device).requires_grad_()
            for width in (arguments.vision, arguments.text)
        ]
        modules = self.projection, self.vision, self.text
        self.inputs = [*self.tokens, *(parameter for module in modules for parameter in module.parameters())]
        self.gradients = [normal(x.shape, generator).to(device) for x in self.tokens]

    @property
    def level_bytes(self) -> int:
        """Bytes of the parameters that one level reads, including W_p."""
        modules = self.projection, self.vision[0], self.text[0]
        return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())

    def refine(self, level: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        v, t = self.tokens
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            for vision, text in zip(self.vision, self.text, strict=True):
                v, t = level(v, t, self.projection, vision, text)
        return v, t

    def ways(self, refine: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Step, Step]:
        """List the implementations: the stack forward without gradients, and forward with all gradients."""

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return refine()

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(refine(), self.inputs, self.gradients)

        return forward, step


def measure_ways(stack: Stack, rounds: int, compiled: bool) -> list[Way]:
    """Measure every implementation on the GPU of `stack` in interleaved rounds; on a CPU only eager."""
    refines: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"eager": lambda: stack.refine(eager_level)}
    if stack.device.type == "cuda":
        if compiled:
            refines["torch.compile"] = torch.compile(lambda: stack.refine(eager_level))
        refines["fused kernels"] = lambda: stack.refine(fused_level)
    ways: list[Way] = []
    truth: tuple[Tensor, ...] = ()
    for name, refine in refines.items():
        forward, step = stack.ways(refine)
        try:
            found = (*forward(), *step())
        # An implementation that fails on this device gets an empty row; the others are still measured.
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            ways.append(Way(name, None, None))
            continue
        truth = truth or found
        difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, truth, strict=True))
        ways.append(Way(name, forward, step, difference, _kernels(step, stack.device)))
        if stack.device.type == "cuda":
            graphs = capture_graph(forward), capture_graph(step)
            ways.append(Way(f"{name}, CUDA graph", *graphs, difference, ways[-1].kernels))
    for number in range(rounds + 1):
        for way in ways:
            # Round 0 warms up.
            times = [(_microseconds(work, stack.device) if work else math.nan) for work in (way.forward, way.step)]
            if number:
                way.forward_us.append(times[0])
                way.step_us.append(times[1])
    return ways


def _microseconds(work: Callable[[], object], device: torch.device) -> float:
    repeats = 50 if device.type == "cuda" else 1
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return 1e6 * (time.perf_counter() - start) / repeats


def _kernels(step: Step, device: torch.device) -> int | None:
    """Count the kernels that a step launches, None on a CPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())


def bandwidth(device: torch.device, size: int) -> float:
    """Measure bytes read and written per second by copies of `size` bytes, in one graph so that launches overlap."""
    source, repeats = torch.zeros(size, dtype=torch.uint8, device=device), 20
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    work = capture_graph(copies) or copies
    return max(2 * size * repeats / (1e-6 * _microseconds(work, device)) for _ in range(3))


def table(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    setting, floor, machine = report["setting"], report["floor"], report["environment"]
    lines = [
        "# ProCAP's cross-attention: eager, compiled, fused",
        "",
        f"{setting['levels']} levels, {setting['tokens']} tokens of widths {setting['vision']} and {setting['text']}, "
        f"{setting['heads']} heads of {setting['head_width']}, norm {setting['norm']}, "
        f"{'bfloat16 autocast' if setting['autocast'] else 'float32'}; medians of {setting['rounds']} interleaved "
        f"rounds on {machine['gpu'] or machine['cpu']['name']}, torch {machine['packages']['torch']}.",
        "",
        f"    {report['command']}",
        "",
        f"A level has {floor['level_bytes'] / 1e6:.2f} MB of parameters. Floor of all {setting['levels']} levels:",
        "",
        _floor_table(floor),
        "",
        _ways_table(report),
    ]
    if not machine["gpu"]:
        lines += ["", "No CUDA device here: the fused kernels, torch.compile and CUDA graphs were not run."]
    return "\n".join([*lines, ""])


def _floor_table(floor: dict[str, Any]) -> str:
    body = [
        [name, f"{rate / 1e12:.2f}", *(f"{1e6 * floor[size] / rate:.1f}" for size in ("forward_bytes", "step_bytes"))]
        for name, rate in floor["rates"].items()
    ]
    return markdown_grid(FLOOR_HEADERS, body, left=1)


def _ways_table(report: dict[str, Any]) -> str:
    floor, eager = report["floor"], report["ways"][0]["step_us"]
    memory = floor["rates"].get(THIS_MEMORY)
    body = []
    for way in report["ways"]:
        if way["step_us"] is None:
            body.append([way["name"], "did not run", "", "", "", "", ""])
            continue
        body.append(
            [
                way["name"],
                f"{way['forward_us']:.0f}",
                f"{way['step_us']:.0f}",
                f"{way['step_us'] / eager:.2f}",
                f"{1e-6 * way['step_us'] * memory / floor['step_bytes']:.1f}" if memory else "",
                "" if way["kernels"] is None else str(way["kernels"]),
                f"{way['difference']:.1e}",
            ]
        )
    return markdown_grid(WAYS_HEADERS, body, left=1)


def _median(values: list[float]) -> float | None:
    return None if not values or any(map(math.isnan, values)) else round(statistics.median(values), 1)


def main() -> None:
    """Parse the command line, measure, print the table; on a GPU also write it and the plots."""
    parser = argparse.ArgumentParser(description="Time ProCAP's cross-attention in every form beside its floor.")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--levels", type=int, default=9)
    parser.add_argument("--vision", type=int, default=768, help="width of the vision tokens")
    parser.add_argument("--text", type=int, default=512, help="width of the text tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-width", type=int, default=64)
    parser.add_argument("--norm", choices=["pre", "post", "none"], default="pre")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast, as mixed precision trains")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON, and .md beside it; default: no file")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    stack = Stack(arguments, device)
    rates = {"an H200's memory (data sheet)": HBM}
    if device.type == "cuda":
        rates |= {
            THIS_MEMORY: bandwidth(device, 2**30),
            "this cache (copying 8 MiB)": bandwidth(device, 2**23),
        }
    ways = measure_ways(stack, arguments.rounds, not arguments.no_compile)
    read = stack.level_bytes * arguments.levels
    report = {
        "command": f"python -m benchmarks.studies.cross_attention {' '.join(sys.argv[1:])}".rstrip(),
        "setting": {name: value for name, value in vars(arguments).items() if name not in ("out", "device")},
        "environment": environment(device),
        "load_average": round(os.getloadavg()[0], 2),
        "floor": {
            "level_bytes": stack.level_bytes,
            "forward_bytes": read,
            "step_bytes": 3 * read,
            "rates": rates,
        },
        "ways": [
            {
                "name": way.name,
                "forward_us": _median(way.forward_us),
                "step_us": _median(way.step_us),
                "difference": way.difference,
                "kernels": way.kernels,
            }
            for way in ways
        ],
    }
    if arguments.out:
        write_json(arguments.out, report)
        write_bytes(arguments.out.with_suffix(".md"), table(report).encode())
    print(table(report))


if __name__ == "__main__":
    main()
