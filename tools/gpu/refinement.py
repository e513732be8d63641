"""Time ProCAP's cross-attention in eager, compiled and fused form, and count the bytes of its weights.

Every form refines the same tokens through nine levels, forward alone and forward with backward, launched one by one and
as a CUDA graph, in interleaved rounds. Every parameter is read forward, and read and written as a gradient backward;
the tokens are next to nothing. On a CPU eager alone is timed, with one thread: the kernels run on GPUs only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runtime.measure import time_interleaved
from procap.cross_attention import CrossAttention
from procap.initialisation import linear, normal
from procap.kernels.refinement import eager_level, fused_level

LEVELS, TOKENS, HEADS, HEAD_WIDTH = 9, 4, 8, 64
ROUNDS = 9

Level = Callable[..., tuple[Tensor, Tensor]]


class Refinement:
    """Tokens and random weights of all levels on one device; widths: of vision and text."""

    def __init__(self, widths: tuple[int, int], device: torch.device, autocast: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"heads": HEADS, "head_width": HEAD_WIDTH, "norm": "pre", "zero_output": False}
        self.device, self.autocast = device, autocast
        self.projection = linear(*widths, generator).to(device)
        self.vision, self.text = (
            nn.ModuleList(CrossAttention(width, widths[1], generator, **options) for _ in range(LEVELS)).to(device)
            for width in widths
        )
        self.tokens = [normal((TOKENS, width), generator).to(device).requires_grad_() for width in widths]
        modules = self.projection, self.vision, self.text
        self.inputs = [*self.tokens, *(parameter for module in modules for parameter in module.parameters())]
        self.gradients = [normal(x.shape, generator).to(device) for x in self.tokens]

    @property
    def level_bytes(self) -> int:
        """Bytes of the parameters that one level reads, including W_p."""
        modules = self.projection, self.vision[0], self.text[0]
        return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())

    def refine(self, level: Level) -> tuple[Tensor, Tensor]:
        v, t = self.tokens
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            for vision, text in zip(self.vision, self.text, strict=True):
                v, t = level(v, t, self.projection, vision, text)
        return v, t

    def step(self, refine: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        """Compute all gradients."""
        return torch.autograd.grad(refine(), self.inputs, self.gradients)


def measure_refinement(widths: tuple[int, int], device: torch.device, autocast: bool) -> dict[str, Any]:
    """Measure every form, on a CPU only eager; returns microseconds and differences from eager by form."""
    refinement, on_gpu = Refinement(widths, device, autocast), device.type == "cuda"
    forms: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"eager": partial(refinement.refine, eager_level)}
    if on_gpu:
        forms["torch.compile"] = torch.compile(partial(refinement.refine, eager_level))
        forms["fused kernels"] = partial(refinement.refine, fused_level)
    rows: list[dict[str, Any]] = []
    works: list[Callable[[], object]] = []
    truth: tuple[Tensor, ...] = ()
    for name, refine in forms.items():
        forward, step = torch.no_grad()(refine), partial(refinement.step, refine)
        outputs = (*forward(), *step())
        truth = truth or outputs
        difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(outputs, truth, strict=True))
        rows.append({"form": name, "difference": difference})
        works += [forward, step]
        graphs = [graph for work in (forward, step) if on_gpu and (graph := capture_graph(work))]
        if len(graphs) == 2:
            rows.append({**rows[-1], "form": f"{name}, CUDA graph"})
            works += graphs
    threads, repeats = torch.get_num_threads(), 50 if on_gpu else 1
    torch.set_num_threads(1)
    try:
        time_interleaved(works, 1, device, repeats)
        seconds = time_interleaved(works, ROUNDS, device, repeats)
    finally:
        torch.set_num_threads(threads)
    medians = [round(1e6 * statistics.median(rounds), 1) for rounds in seconds]
    for row, forward_us, step_us in zip(rows, medians[::2], medians[1::2], strict=True):
        row |= {"forward_us": forward_us, "step_us": step_us}
    read = LEVELS * refinement.level_bytes
    sizes = {"level_bytes": refinement.level_bytes, "forward_bytes": read, "step_bytes": 3 * read}
    return {"widths": widths, **sizes, "forms": rows}


def measure_bandwidth(device: torch.device, size: int) -> float:
    """Measure bytes read and written per second by copies of `size` bytes, in one graph so that launches overlap."""
    source, copies = torch.zeros(size, dtype=torch.uint8, device=device), 20
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    work = (capture_graph(copy) if device.type == "cuda" else None) or copy
    [seconds] = time_interleaved([work], 3, device)
    return 2 * size * copies / min(seconds)


def capture_graph(step: Callable[[], object]) -> Callable[[], object] | None:
    """Capture the step as a CUDA graph; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Captures require a warm-up on a side stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        # Up to torch 2.11 a capture that fails leaves its stream the current one. Other threads may go on with CUDA.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            step()
    except RuntimeError:
        return None
    return graph.replay
