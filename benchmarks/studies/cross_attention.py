"""Time ProCAP's cross-attention in eager, compiled and fused form, and compare with the time to read its weights.

    python -m benchmarks.studies.cross_attention                    all levels of ViT-B/16, on the first GPU; a minute
    python -m benchmarks.studies.cross_attention --autocast         as mixed precision trains it

Each form refines the same tokens through all levels, forward alone and forward with backward, launched one by one and
as a CUDA graph, in interleaved rounds; results are compared with eager's. The floor counts every parameter once per
level and pass: read forward, read and written as a gradient backward; the tokens are next to nothing. Without a GPU it
prints the floor, and what eager takes on the CPU: the kernels run on GPUs only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runtime.measure import time_in_turns
from benchmarks.studies.record import describe_machine, describe_run, write_record
from benchmarks.tables.render import markdown_grid
from procap.cross_attention import CrossAttention
from procap.initialisation import linear, normal
from procap.kernels.refinement import capture_graph, eager_level, fused_level
from runner.environment import resolve_device

HBM = 4.8e12
"""Memory bandwidth of an H200 in bytes per second, from its data sheet."""
THIS_MEMORY = "this memory (copying 1 GiB)"
FLOOR_HEADERS = ("bytes at", "TB/s", "forward us", "with backward us")
FORM_HEADERS = (
    "form",
    "forward us",
    "with backward us",
    "of eager",
    "of this memory's floor",
    "kernels",
    "off eager by",
)

Step = Callable[[], tuple[Tensor, ...]]


class Refinement:
    """Tokens and random weights of all levels on one device."""

    def __init__(self, flags: argparse.Namespace, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"heads": flags.heads, "head_width": flags.head_width, "norm": flags.norm}
        widths = (flags.vision, flags.text)
        self.device, self.autocast = device, flags.autocast
        self.projection = linear(flags.vision, flags.text, generator).to(device)
        self.vision, self.text = (
            nn.ModuleList(
                CrossAttention(width, flags.text, generator, zero_output=False, **options) for _ in range(flags.levels)
            ).to(device)
            for width in widths
        )
        self.tokens = [normal((flags.tokens, width), generator).to(device).requires_grad_() for width in widths]
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

    def make_steps(self, refine: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Step, Step]:
        """Return the forward pass without gradients, and forward with all gradients."""

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return refine()

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(refine(), self.inputs, self.gradients)

        return forward, step


def measure_forms(refinement: Refinement, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Measure every form on a GPU, on a CPU only eager; returns a row of plain JSON for each."""
    device = refinement.device
    on_gpu = device.type == "cuda"
    refines: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"eager": lambda: refinement.refine(eager_level)}
    if on_gpu and compiled:
        refines["torch.compile"] = torch.compile(lambda: refinement.refine(eager_level))
    if on_gpu:
        refines["fused kernels"] = lambda: refinement.refine(fused_level)
    rows: list[dict[str, Any]] = []
    works: list[Callable[[], object]] = []
    truth: tuple[Tensor, ...] = ()
    for name, refine in refines.items():
        steps = refinement.make_steps(refine)
        try:
            found = (*steps[0](), *steps[1]())
        # A form that fails on this device gets an empty row; the others are still measured.
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            rows.append({"name": name, "works": ()})
            continue
        truth = truth or found
        row: dict[str, Any] = {
            "difference": max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, truth, strict=True)),
            "kernels": _count_kernels(steps[1]) if on_gpu else None,
        }
        rows.append({"name": name, "works": steps, **row})
        if on_gpu:
            rows.append({"name": f"{name}, CUDA graph", "works": tuple(map(capture_graph, steps)), **row})
    works = [work for row in rows for work in row["works"] if work]
    repeats = 50 if on_gpu else 1
    time_in_turns(works, 1, device, repeats)
    seconds = dict(zip(works, time_in_turns(works, rounds, device, repeats), strict=True))
    for row in rows:
        medians = [round(1e6 * statistics.median(seconds[work]), 1) if work else None for work in row.pop("works")]
        row["forward_us"], row["step_us"] = medians or (None, None)
    return rows


def _count_kernels(step: Step) -> int:
    """Count the kernels that a step launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())


def measure_bandwidth(device: torch.device, size: int) -> float:
    """Measure bytes read and written per second by copies of `size` bytes, in one graph so that launches overlap."""
    source, repeats = torch.zeros(size, dtype=torch.uint8, device=device), 20
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source)

    [seconds] = time_in_turns([capture_graph(copies) or copies], 3, device, 50)
    return 2 * size * repeats / min(seconds)


def format_report(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    setting, floor = report["setting"], report["floor"]
    floors = [
        [name, f"{rate / 1e12:.2f}", *(f"{1e6 * floor[size] / rate:.1f}" for size in ("forward_bytes", "step_bytes"))]
        for name, rate in floor["rates"].items()
    ]
    parts = [
        "# ProCAP's cross-attention: eager, compiled, fused",
        f"{setting['levels']} levels, {setting['tokens']} tokens of widths {setting['vision']} and {setting['text']}, "
        f"{setting['heads']} heads of {setting['head_width']}, norm {setting['norm']}, "
        f"{'bfloat16 autocast' if setting['autocast'] else 'float32'}; medians of {setting['rounds']} interleaved "
        f"rounds; {describe_machine(report)}.",
        f"    {report['command']}",
        f"A level has {floor['level_bytes'] / 1e6:.2f} MB of parameters. Floor of all {setting['levels']} levels:",
        markdown_grid(FLOOR_HEADERS, floors, left=1),
        markdown_grid(FORM_HEADERS, [_format_form(row, report) for row in report["ways"]], left=1),
    ]
    if not report["environment"]["gpu"]:
        parts.append("No CUDA device here: the fused kernels, torch.compile and CUDA graphs were not run.")
    return "\n\n".join(parts) + "\n"


def _format_form(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    if row["forward_us"] is None or row["step_us"] is None:
        return [row["name"], "did not run", *[""] * (len(FORM_HEADERS) - 2)]
    floor, eager = report["floor"], report["ways"][0]["step_us"] or math.nan
    memory = floor["rates"].get(THIS_MEMORY)
    return [
        row["name"],
        f"{row['forward_us']:.0f}",
        f"{row['step_us']:.0f}",
        f"{row['step_us'] / eager:.2f}",
        f"{1e-6 * row['step_us'] * memory / floor['step_bytes']:.1f}" if memory else "",
        "" if row["kernels"] is None else str(row["kernels"]),
        f"{row['difference']:.1e}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print the table; with --out also write it."""
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
    flags = parser.parse_args(argv)
    device = resolve_device(flags.device)
    rates = {"an H200's memory (data sheet)": HBM}
    if device.type == "cuda":
        caches = {THIS_MEMORY: 2**30, "this cache (copying 8 MiB)": 2**23}
        rates |= {name: measure_bandwidth(device, size) for name, size in caches.items()}
    else:
        torch.set_num_threads(1)
    refinement = Refinement(flags, device)
    read = refinement.level_bytes * flags.levels
    sizes = {"level_bytes": refinement.level_bytes, "forward_bytes": read, "step_bytes": 3 * read}
    report = describe_run("cross_attention", argv, device) | {
        "setting": {name: value for name, value in vars(flags).items() if name not in ("out", "device")},
        "floor": {**sizes, "rates": rates},
        "ways": measure_forms(refinement, flags.rounds, not flags.no_compile),
    }
    if flags.out:
        write_record(flags.out, report, format_report(report))
    print(format_report(report))


if __name__ == "__main__":
    main()
