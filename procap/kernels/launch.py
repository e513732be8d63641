"""One cross-attention level in fused kernels: three launches forward, three backward, both directions in each.

    v' = v + MHA_v(LN(v), LN(t))        t' = t + MHA_t(LN(t), LN(z)),  z = W_p v

With few tokens the time goes to reading the weights and to launches, so there are as few launches as possible. A new
launch starts only if the next operation needs whole rows: in the forward pass after z (for its norm and keys) and after
all heads (for the output projection); in the backward pass after the gradients of the heads and after those of the
projections. The file needs triton: only `procap.kernels.refinement` imports it, inside the functions that launch.

Shapes: P prompt tokens, Dv and Dt widths of vision and text, D of a direction's queries, E of its keys and values,
I inner width = heads x W; N outputs and K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from procap.kernels.triton_cross_attention import attend, attend_backward, inputs_backward, project, project_backward

TILE = 16384
"""Elements of a program's largest tile: 64 registers a thread for 256 threads."""


class Direction(NamedTuple):
    """Parameters of one cross-attention in the order of their gradients: linear [N, K] and [N], norms [D] and [E]."""

    query: Tensor
    query_bias: Tensor
    key: Tensor
    value: Tensor
    value_bias: Tensor
    output: Tensor
    output_bias: Tensor
    query_scale: Tensor
    query_shift: Tensor
    other_scale: Tensor
    other_shift: Tensor


def forward(
    v: Tensor, t: Tensor, projection: Sequence[Tensor], vision: Direction, text: Direction, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute one level: new v and t, z [P, Dt], and the inner rows [8, P, I] (q, k, v, o of each direction)."""
    tokens, inner = len(v), len(vision.query)
    # In float32 also for bfloat16 tokens, so that nothing is rounded between two launches.
    z = v.new_empty((tokens, t.shape[1]), dtype=torch.float32)
    rows = v.new_empty((8, tokens, inner), dtype=torch.float32)
    q_v, k_v, v_v, o_v, q_t, k_t, v_t, o_t = rows.unbind()
    _project(
        eps,
        (v, None, None, *projection, z),
        (v, vision.query_scale, vision.query_shift, vision.query, vision.query_bias, q_v),
        (t, vision.other_scale, vision.other_shift, vision.key, None, k_v),
        (t, vision.other_scale, vision.other_shift, vision.value, vision.value_bias, v_v),
        (t, text.query_scale, text.query_shift, text.query, text.query_bias, q_t),
    )
    _project(
        eps,
        (z, text.other_scale, text.other_shift, text.key, None, k_t),
        (z, text.other_scale, text.other_shift, text.value, text.value_bias, v_t),
    )
    new_v, new_t = torch.empty_like(v), torch.empty_like(t)
    jobs = (
        (q_v, k_v, v_v, o_v, vision.output, vision.output_bias, v, new_v),
        (q_t, k_t, v_t, o_t, text.output, text.output_bias, t, new_t),
    )
    shape, h2 = _heads_shape(tokens, inner, heads), next_power_of_2(heads)
    all_heads = h2 * shape["W2"]
    # Up to four rows of a tile share the weights in registers; fewer if the tile of all keys fills the registers.
    block, r = _fit(8, all_heads), min(shape["P2"], 4, _fit(4, shape["P2"] * all_heads))
    widths = v.shape[1], t.shape[1]
    grid = (cdiv(max(widths), block), 2)
    attend[grid](jobs, WIDTHS=widths, **shape, H2=h2, R=r, BLOCK=block, num_warps=8)
    return new_v, new_t, z, rows


def backward(
    gradients: tuple[Tensor, Tensor], v: Tensor, t: Tensor, z: Tensor, rows: Tensor,
    projection: Sequence[Tensor], vision: Direction, text: Direction, heads: int, eps: float,
) -> tuple[Tensor, Tensor, list[Tensor], Direction, Direction]:  # fmt: skip
    """Compute the gradients of v, t, W_p and both directions' parameters from those of a level's outputs."""
    g_v, g_t = gradients
    (tokens, v_width), t_width, inner = v.shape, t.shape[1], len(vision.query)
    q_v, k_v, v_v, o_v, q_t, k_t, v_t, o_t = rows.unbind()
    # There is none of o_v and o_t: `attend_backward` computes these gradients and uses them without storing them.
    dq_v, dk_v, dv_v, dq_t, dk_t, dv_t = torch.empty_like(rows[:6]).unbind()
    jobs: tuple[tuple[Tensor, ...], ...] = (
        (q_v, k_v, v_v, vision.output, g_v, dq_v, dk_v, dv_v),
        (q_t, k_t, v_t, text.output, g_t, dq_t, dk_t, dv_t),
    )
    shape = _heads_shape(tokens, inner, heads)
    block = min(_fit(128, shape["P2"] * shape["W2"]), next_power_of_2(max(v_width, t_width)))
    attend_backward[(heads, 2)](
        jobs, WIDTHS=(v_width, t_width), **shape, BLOCK=block, num_warps=8 if tokens <= 16 else 16
    )

    new_projection = [torch.empty_like(p) for p in projection]
    new_vision, new_text = (Direction(*map(torch.empty_like, direction)) for direction in (vision, text))
    # Gradients of the linear layers' inputs: a norm's output, or the rows themselves.
    r_qv = torch.empty_like(v, dtype=torch.float32)
    r_kv, r_vv, r_qt, r_kt, r_vt = z.new_empty((5, *z.shape)).unbind()
    norm_q, norm_o = (vision.query_scale, vision.query_shift), (vision.other_scale, vision.other_shift)
    text_q, text_o = (text.query_scale, text.query_shift), (text.other_scale, text.other_shift)
    project_jobs = (
        (dq_v, v, *norm_q, vision.query, r_qv, new_vision.query, new_vision.query_bias),
        (dk_v, t, *norm_o, vision.key, r_kv, new_vision.key, None),
        (dv_v, t, *norm_o, vision.value, r_vv, new_vision.value, new_vision.value_bias),
        (dq_t, t, *text_q, text.query, r_qt, new_text.query, new_text.query_bias),
        (dk_t, z, *text_o, text.key, r_kt, new_text.key, None),
        (dv_t, z, *text_o, text.value, r_vt, new_text.value, new_text.value_bias),
        (g_v, o_v, None, None, vision.output, None, new_vision.output, new_vision.output_bias),
        (g_t, o_t, None, None, text.output, None, new_text.output, new_text.output_bias),
    )
    shapes = tuple(_linear_shape(job[4]) for job in project_jobs)
    # 32 bytes are the smallest memory access; the remaining registers are divided among rows.
    block = 32 // v.element_size()
    r = min(next_power_of_2(tokens), 32 // block)
    grid = (cdiv(max(shape[1] for shape in shapes), block), len(shapes))
    project_backward[grid](project_jobs, SHAPES=shapes, P=tokens, R=r, BLOCK=block, EPS=eps, num_warps=8)

    new_v, new_t = torch.empty_like(v), torch.empty_like(t)
    inputs_backward[(cdiv(max(v_width, t_width), block), 2)](
        (g_v, v, r_qv, vision.query_scale, new_vision.query_scale, new_vision.query_shift, new_v),
        (g_t, t, r_qt, text.query_scale, new_text.query_scale, new_text.query_shift,
         r_kv, r_vv, vision.other_scale, new_vision.other_scale, new_vision.other_shift, new_t),
        (z, r_kt, r_vt, text.other_scale, new_text.other_scale, new_text.other_shift, projection[0], *new_projection),
        V=v_width, V2=next_power_of_2(v_width), T=t_width, T2=next_power_of_2(t_width),
        P=tokens, R=r, BLOCK=block, EPS=eps, num_warps=8,
    )  # fmt: skip
    return new_v, new_t, new_projection, new_vision, new_text


def _project(eps: float, *jobs: Any) -> None:
    """Launch linear layers; a job is (rows, norm's scale and shift, weight, bias, outputs)."""
    shapes = tuple(_linear_shape(job[3]) for job in jobs)
    tokens = len(jobs[0][0])
    r = min(next_power_of_2(tokens), 4)
    block = _fit(8, max(shape[2] for shape in shapes))
    grid = (cdiv(max(shape[0] for shape in shapes), block), len(jobs))
    project[grid](jobs, SHAPES=shapes, P=tokens, R=r, BLOCK=block, EPS=eps, num_warps=8)


def _linear_shape(weight: Tensor) -> tuple[int, int, int, int]:
    """Return N, K and the next powers of two K2, N2 of a weight [N, K]."""
    n, k = weight.shape
    return n, k, next_power_of_2(k), next_power_of_2(n)


def _heads_shape(tokens: int, inner: int, heads: int) -> dict[str, Any]:
    width = inner // heads
    padded = {"P2": next_power_of_2(tokens), "W2": next_power_of_2(width)}
    return {"P": tokens, "H": heads, "W": width, "SCALE": width**-0.5, **padded}


def _fit(most: int, unit: int) -> int:
    """Return the largest power of two n, at most `most`, with n * `unit` <= TILE; both are powers of two."""
    return max(1, min(most, TILE // unit))
