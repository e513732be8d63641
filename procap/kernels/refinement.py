"""One level of ProCAP's cross-attention, both directions: eager, or in fused kernels if they measure faster.

The eager implementation is the reference; `tests/test_procap_triton.py` compares the kernels' values and gradients with
it. The kernels are used only on CUDA, for supported shapes, and only if they are faster: both implementations are timed
once per process and shape, eagerly launched and as a CUDA graph (a graph saves the launches that make eager slow).
PROCAP_FUSED=off keeps everything eager; PROCAP_FUSED=on uses the kernels for all supported shapes without timing.
Under autocast the kernels stay in float32, while eager products are in its narrow type. No second derivative exists.

Shapes: P prompt tokens, Dv vision width, Dt text width, I inner width (H heads).
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from procap.cross_attention import CrossAttention
from procap.initialisation import linear, normal

if TYPE_CHECKING:
    from procap.kernels.launch import Direction

log = logging.getLogger(__name__)

MAX_TOKENS = 32
"""More prompt tokens than this would not fit the kernels' tiles of all keys."""

MAX_WIDTH = 2048
"""Widest row that a program of the kernels holds as one tile."""


def refine_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: nn.Module, text: nn.Module
) -> tuple[Tensor, Tensor]:
    """Compute the next level of tokens v [P, Dv] and t [P, Dt]; both directions read the current level."""
    to_v, to_t = cast(CrossAttention, vision), cast(CrossAttention, text)
    fused = can_fuse(v, t, projection, to_v, to_t) and is_fused_faster(
        v.device.index, v.dtype, len(v), v.shape[1], t.shape[1], to_v.heads, to_v.query.out_features, to_v.norm,
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.cuda.is_current_stream_capturing(),
    )  # fmt: skip
    return (fused_level if fused else eager_level)(v, t, projection, to_v, to_t)


def eager_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: CrossAttention, text: CrossAttention
) -> tuple[Tensor, Tensor]:
    return vision(v, t), text(t, projection(v))


def fused_level(
    v: Tensor, t: Tensor, projection: nn.Linear, vision: CrossAttention, text: CrossAttention
) -> tuple[Tensor, Tensor]:
    """Compute a level with the kernels; a LayerNorm after the residual runs in torch, one kernel per direction."""
    eps = vision.norm_query.eps if vision.norm == "pre" else 0.0
    weights = projection.weight, projection.bias, *parameters(vision), *parameters(text)
    new_v, new_t = FusedLevel.apply(vision.heads, eps, v.contiguous(), t.contiguous(), *weights)
    if vision.norm == "post":
        return vision.norm_output(new_v), text.norm_output(new_t)
    return new_v, new_t


def parameters(attention: CrossAttention) -> list[Tensor]:
    """List the parameters in the order of `procap.kernels.launch.Direction`."""
    a = attention
    tensors = [a.query.weight, a.query.bias, a.key.weight, a.value.weight, a.value.bias, a.output.weight, a.output.bias]
    if a.norm == "pre":
        tensors += [a.norm_query.weight, a.norm_query.bias, a.norm_other.weight, a.norm_other.bias]
    return tensors


class FusedLevel(torch.autograd.Function):
    """A level in kernels, from v, t, and the tensors of the projection and of both directions."""

    @staticmethod
    def forward(ctx: Any, heads: int, eps: float, v: Tensor, t: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        from procap.kernels.launch import forward

        new_v, new_t, z, rows = forward(v, t, *_group(weights), heads, eps)
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(v, t, z, rows, *weights)
        return new_v, new_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_v: Tensor, g_t: Tensor) -> tuple[Tensor | None, ...]:
        from procap.kernels.launch import backward

        v, t, z, rows, *weights = ctx.saved_tensors
        given = g_v.contiguous(), g_t.contiguous()
        dv, dt, projection, *directions = backward(given, v, t, z, rows, *_group(weights), ctx.heads, ctx.eps)
        of_directions = [gradient for direction in directions for gradient in direction if gradient is not None]
        return None, None, dv, dt, *projection, *of_directions


def _group(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Direction, Direction]:
    """Divide the tensors of a level into those of the projection, and of either direction."""
    from procap.kernels.launch import Direction

    middle = 1 + len(weights) // 2
    return weights[:2], Direction(*weights[2:middle]), Direction(*weights[middle:])


# --- the choice ------------------------------------------------------------------------------------------------------


class Timings(NamedTuple):
    """Milliseconds of one level forward and backward; infinite if it did not run."""

    eager: float
    fused: float
    eager_graph: float
    fused_graph: float


_measured: dict[tuple[Any, ...], Timings] = {}
"""What was timed in this process so far, by shape."""


def can_fuse(v: Tensor, t: Tensor, projection: nn.Linear, vision: CrossAttention, text: CrossAttention) -> bool:
    """Whether the kernels can run this level: on CUDA, few tokens, rows that fit a tile, float32 or bfloat16."""
    if not v.is_cuda or v.dtype not in (torch.float32, torch.bfloat16) or len(v) != len(t) or len(v) > MAX_TOKENS:
        return False
    if max(v.shape[1], t.shape[1], vision.query.out_features) > MAX_WIDTH or vision.heads != text.heads:
        return False
    weights = [projection.weight, projection.bias, *parameters(vision), *parameters(text)]
    # Sharded parameters are empty here: they are gathered when their module is called, but the kernels do not call it.
    usable = (x.numel() and x.is_contiguous() and x.dtype == v.dtype and x.device == v.device for x in weights)
    return t.dtype == v.dtype and all(usable)


def is_fused_faster(
    device: int, dtype: torch.dtype, tokens: int, vision_width: int, text_width: int, heads: int, inner: int, norm: str,
    autocast: torch.dtype | None, graphed: bool,
) -> bool:  # fmt: skip
    """Whether to run a level of this shape with the kernels; `graphed`: launches cost nothing on the host."""
    mode = os.environ.get("PROCAP_FUSED", "auto")
    if mode == "off" or importlib.util.find_spec("triton") is None:
        return False
    if mode == "on":
        return True
    key = (device, dtype, tokens, vision_width, text_width, heads, inner, norm, autocast)
    if key not in _measured:
        if torch.cuda.is_current_stream_capturing():
            # Timing is impossible during a capture; normally the warm-up steps before it have already timed the shape.
            return False
        _measured[key] = time_level(*key)
    timings = _measured[key]
    return timings.fused_graph < timings.eager_graph if graphed else timings.fused < timings.eager


def time_level(
    device: int, dtype: torch.dtype, tokens: int, vision_width: int, text_width: int, heads: int, inner: int, norm: str,
    autocast: torch.dtype | None,
) -> Timings:  # fmt: skip
    """Time one level with random weights on CUDA device `device`; touches no global random state."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"heads": heads, "head_width": inner // heads, "norm": norm}
    with torch.inference_mode(False), torch.enable_grad(), torch.cuda.device(device):
        modules = (
            linear(vision_width, text_width, generator),
            CrossAttention(vision_width, text_width, generator, **options),
            CrossAttention(text_width, text_width, generator, **options),
        )
        for module in modules:
            module.to("cuda", dtype)
        tokens_in = [
            normal((tokens, width), generator).to("cuda", dtype).requires_grad_()
            for width in (vision_width, text_width)
        ]
        inputs = [*tokens_in, *(p for module in modules for p in module.parameters())]

        def step(level: Callable[..., tuple[Tensor, Tensor]]) -> None:
            # Autocast caches casts until the caller's outermost autocast ends. Without the cache every run casts again,
            # as training steps do, and a capture never meets an autograd node that was created on another stream.
            with torch.autocast("cuda", autocast, enabled=autocast is not None, cache_enabled=False):
                v, t = level(*tokens_in, *modules)
            torch.autograd.grad((v, t), inputs, (v.detach(), t.detach()))

        def eager() -> None:
            step(eager_level)

        def fused() -> None:
            step(fused_level)

        steps = eager, fused
        plain = [time_milliseconds(each) for each in steps]
        # A step that already failed is not captured: a failing capture can leave the stream in a broken state.
        graphs = [
            time_milliseconds(capture_graph(each) if ms < math.inf else None)
            for each, ms in zip(steps, plain, strict=True)
        ]
    return Timings(*plain, *graphs)


def time_milliseconds(step: Callable[[], object] | None) -> float:
    """Measure the median wall-clock time of a step, launches included; infinite if the step fails."""
    # Here, because it is needed on a GPU only.
    from torch.utils.benchmark import Timer

    if step is None:
        return math.inf
    try:
        return 1e3 * Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.1).median
    # Triton's own errors are not RuntimeErrors; after any of them the eager implementation still works.
    except Exception as error:
        log.warning("cross-attention: %s does not run here: %s", getattr(step, "__name__", "a graph"), error)
        return math.inf


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
