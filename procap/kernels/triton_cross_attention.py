"""Triton kernels of one cross-attention level, both directions in each; `procap.kernels.launch` starts them.

Every weight is read from memory once per pass, as one tile of whole rows or columns per program. There are few token
rows, so each program normalises them and computes attention itself, which is cheaper than another launch. All
arithmetic is float32, whatever the type of the tensors. Jobs are tuples of pointers, one per linear layer or direction,
and the second program index selects the job; code for a pointer that is None is not compiled.

Shapes: P prompt tokens (R of them at a time, i; as keys, token), D width of a direction's queries, H heads of W; a
linear layer has N outputs n, K inputs k, a block of them c; V and T widths of v and t; X2: X padded to a power of two.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, i, k, P: tl.constexpr, K: tl.constexpr):
    """Load the entries [i, k] of x [P, K] in float32, zero outside."""
    inside = (i < P)[:, None] & (k < K)[None, :]
    return tl.load(x + i[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(x, i, k, entries, P: tl.constexpr, K: tl.constexpr):
    inside = (i < P)[:, None] & (k < K)[None, :]
    tl.store(x + i[:, None] * K + k[None, :], entries.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _load_vector(x, k, K: tl.constexpr):
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _store_vector(x, k, entries, K: tl.constexpr):
    tl.store(x + k, entries.to(x.dtype.element_ty), mask=k < K)


@triton.jit
def _moments(rows, k, K: tl.constexpr, EPS: tl.constexpr):
    """Compute mean and inverse deviation [R] of rows [R, K2]."""
    mean = tl.sum(rows, axis=1) / K
    # Padding was loaded as 0, so that without the mask it would add mean^2 to the variance.
    centred = tl.where((k < K)[None, :], rows - mean[:, None], 0.0)
    return mean, 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / K + EPS)


@triton.jit
def _normed(x, scale, shift, i, c, P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, EPS: tl.constexpr):
    """Compute the entries [i, c] of LN(x), or load those of x if there is no norm."""
    entries = _load(x, i, c, P, K)
    if scale is not None:
        k = tl.arange(0, K2)
        mean, rstd = _moments(_load(x, i, k, P, K), k, K, EPS)
        entries = (entries - mean[:, None]) * rstd[:, None]
        entries = entries * _load_vector(scale, c, K)[None, :] + _load_vector(shift, c, K)[None, :]
    return entries


@triton.jit
def _norm_backward(ga, gb, x, scale, i, c, P: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, EPS: tl.constexpr):
    """Compute at [i, c] the gradient of x from that of LN(x), ga (+ gb), and the row terms of scale's and shift's."""
    g = _load(ga, i, c, P, K)
    if gb is not None:
        g += _load(gb, i, c, P, K)
    k = tl.arange(0, K2)
    rows = _load(x, i, k, P, K)
    mean, rstd = _moments(rows, k, K, EPS)
    inner = _load(ga, i, k, P, K)
    if gb is not None:
        inner += _load(gb, i, k, P, K)
    inner *= _load_vector(scale, k, K)[None, :]
    # dx = (g s - mean(g s) - hat mean(g s hat)) / deviation, where s is the scale and hat the normalised row.
    mean_g = tl.sum(inner, axis=1) / K
    mean_gx = tl.sum(inner * (rows - mean[:, None]), axis=1) * rstd / K
    hat = (_load(x, i, c, P, K) - mean[:, None]) * rstd[:, None]
    dx = g * _load_vector(scale, c, K)[None, :] - mean_g[:, None] - hat * mean_gx[:, None]
    return dx * rstd[:, None], g * hat, g


@triton.jit
def project(jobs, SHAPES: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr):
    """Compute linear layers of normed rows; program (n, j): outputs n of job j."""
    for j in tl.static_range(len(SHAPES)):
        if (tl.program_id(1) == j) & (tl.program_id(0) * BLOCK < SHAPES[j][0]):
            x, scale, shift, weight, bias, out = jobs[j]
            N: tl.constexpr = SHAPES[j][0]
            K: tl.constexpr = SHAPES[j][1]
            K2: tl.constexpr = SHAPES[j][2]
            n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            k = tl.arange(0, K2)
            # Load the weights first, so that they arrive while the rows are normalised.
            w = _load(weight, n, k, N, K)
            for row in range(0, P, R):
                i = row + tl.arange(0, R)
                rows = _normed(x, scale, shift, i, k, P, K, K2, EPS)
                # Not `tl.dot`, whose default on tensor cores cuts float32 to TF32.
                y = tl.sum(rows[:, None, :] * w[None, :, :], axis=2)
                if bias is not None:
                    y += _load_vector(bias, n, N)[None, :]
                _store(out, i, n, y, P, N)


@triton.jit
def _load_heads(x, i, P: tl.constexpr, H: tl.constexpr, H2: tl.constexpr, W: tl.constexpr, W2: tl.constexpr):
    """Load the rows i of x [P, H W] as [R, H2, W2], zero outside."""
    h, e = tl.arange(0, H2)[None, :, None], tl.arange(0, W2)[None, None, :]
    i = i[:, None, None]
    return tl.load(x + i * (H * W) + h * W + e, mask=(i < P) & (h < H) & (e < W), other=0.0).to(tl.float32)


@triton.jit
def attend(
    jobs, WIDTHS: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, H: tl.constexpr, H2: tl.constexpr,
    W: tl.constexpr, W2: tl.constexpr, SCALE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute attention of all heads, output projection and residual; program (n, j): outputs n of direction j."""
    for j in tl.static_range(len(WIDTHS)):
        if (tl.program_id(1) == j) & (tl.program_id(0) * BLOCK < WIDTHS[j]):
            query, key, value, mixed, weight, bias, x, out = jobs[j]
            D: tl.constexpr = WIDTHS[j]
            n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            # A row of the output projection has the heads side by side, as the rows of tokens have.
            w = _load_heads(weight, n, D, H, H2, W, W2)
            token = tl.arange(0, P2)
            k, v = _load_heads(key, token, P, H, H2, W, W2), _load_heads(value, token, P, H, H2, W, W2)
            for row in range(0, P, R):
                i = row + tl.arange(0, R)
                q = _load_heads(query, i, P, H, H2, W, W2) * SCALE
                scores = tl.sum(q[:, None, :, :] * k[None, :, :, :], axis=3)
                scores = tl.where((token < P)[None, :, None], scores, float("-inf"))
                a = tl.exp(scores - tl.max(scores, axis=1)[:, None, :])
                a = a / tl.sum(a, axis=1)[:, None, :]
                o = tl.sum(a[:, :, :, None] * v[None, :, :, :], axis=1)
                if tl.program_id(0) == 0:
                    # Kept for the gradient of the output projection.
                    h, e = tl.arange(0, H2)[None, :, None], tl.arange(0, W2)[None, None, :]
                    at = mixed + i[:, None, None] * (H * W) + h * W + e
                    tl.store(at, o, mask=(i < P)[:, None, None] & (h < H) & (e < W))
                y = tl.sum(tl.sum(o[:, None, :, :] * w[None, :, :, :], axis=3), axis=2)
                y += _load_vector(bias, n, D)[None, :] + _load(x, i, n, P, D)
                _store(out, i, n, y, P, D)


@triton.jit
def attend_backward(
    jobs, WIDTHS: tl.constexpr, P: tl.constexpr, P2: tl.constexpr, H: tl.constexpr, W: tl.constexpr, W2: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and values from a direction's output; program (h, j): head h."""
    for j in tl.static_range(len(WIDTHS)):
        if tl.program_id(1) == j:
            query, key, value, weight, gradient, dq, dk, dv = jobs[j]
            D: tl.constexpr = WIDTHS[j]
            INNER: tl.constexpr = H * W
            i = tl.arange(0, P2)
            e = tl.arange(0, W2)
            column = tl.program_id(0) * W + e
            if W2 > W:
                # Only for a padded W: with this mask the compiler cannot tell that columns are adjacent, and loads them
                # one by one.
                column = tl.where(e < W, column, INNER)
            products = tl.zeros((P2, BLOCK, W2), tl.float32)
            # Few programs read much memory, so several blocks of the weight must be in flight at a time.
            for start in tl.range(0, D, BLOCK, num_stages=4):
                d = start + tl.arange(0, BLOCK)
                products += _load(gradient, i, d, P, D)[:, :, None] * _load(weight, d, column, D, INNER)[None, :, :]
            do = tl.sum(products, axis=1)
            q = _load(query, i, column, P, INNER)
            k, v = _load(key, i, column, P, INNER), _load(value, i, column, P, INNER)
            scores = tl.sum(q[:, None, :] * k[None, :, :], axis=2) * SCALE
            scores = tl.where((i < P)[None, :], scores, float("-inf"))
            a = tl.exp(scores - tl.max(scores, axis=1)[:, None])
            a = a / tl.sum(a, axis=1)[:, None]
            # Rows of padding have do = 0, so that they add nothing to dk and dv.
            # The gradient of a softmax a is a (da - sum of a da).
            da = tl.sum(do[:, None, :] * v[None, :, :], axis=2)
            ds = a * (da - tl.sum(a * da, axis=1)[:, None]) * SCALE
            _store(dq, i, column, tl.sum(ds[:, :, None] * k[None, :, :], axis=1), P, INNER)
            _store(dk, i, column, tl.sum(ds[:, :, None] * q[:, None, :], axis=0), P, INNER)
            _store(dv, i, column, tl.sum(a[:, :, None] * do[:, None, :], axis=0), P, INNER)


@triton.jit
def project_backward(
    jobs, SHAPES: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr
):
    """Compute the gradients of linear layers and of their normed inputs; program (c, j): inputs c of job j."""
    for j in tl.static_range(len(SHAPES)):
        if (tl.program_id(1) == j) & (tl.program_id(0) * BLOCK < SHAPES[j][1]):
            gradient, x, scale, shift, weight, dx, dweight, dbias = jobs[j]
            N: tl.constexpr = SHAPES[j][0]
            N2: tl.constexpr = SHAPES[j][3]
            K: tl.constexpr = SHAPES[j][1]
            K2: tl.constexpr = SHAPES[j][2]
            c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            n = tl.arange(0, N2)
            dw = tl.zeros((N2, BLOCK), tl.float32)
            db = tl.zeros((N2,), tl.float32)
            if dx is not None:
                w = _load(weight, n, c, N, K)
            for row in range(0, P, R):
                i = row + tl.arange(0, R)
                g = _load(gradient, i, n, P, N)
                dw += tl.sum(g[:, :, None] * _normed(x, scale, shift, i, c, P, K, K2, EPS)[:, None, :], axis=0)
                db += tl.sum(g, axis=0)
                if dx is not None:
                    _store(dx, i, c, tl.sum(g[:, :, None] * w[None, :, :], axis=1), P, K)
            _store(dweight, n, c, dw, N, K)
            # All programs of a job have the same sum over the rows; the first one stores it.
            if dbias is not None and tl.program_id(0) == 0:
                _store_vector(dbias, n, db, N)


@triton.jit
def inputs_backward(
    vision, text, projection, V: tl.constexpr, V2: tl.constexpr, T: tl.constexpr, T2: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Backpropagate through norms and W_p to v and t; program (c, j): columns c of v (j = 0) or of t (j = 1)."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if (tl.program_id(1) == 0) & (tl.program_id(0) * BLOCK < V):
        gradient, x, g_query, scale, dscale, dshift, dx = vision
        z, g_key, g_value, z_scale, dz_scale, dz_shift, weight, dweight, dbias = projection
        n = tl.arange(0, T2)
        w = _load(weight, n, c, T, V)
        dw = tl.zeros((T2, BLOCK), tl.float32)
        db, dzs, dzh = tl.zeros((T2,), tl.float32), tl.zeros((T2,), tl.float32), tl.zeros((T2,), tl.float32)
        ds, dh = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for row in range(0, P, R):
            i = row + tl.arange(0, R)
            dz, zs, zh = _norm_backward(g_key, g_value, z, z_scale, i, n, P, T, T2, EPS)
            # Columns of dz beyond T hold parts of the means, but the weights there are 0 and nothing is stored.
            dw += tl.sum(dz[:, :, None] * _load(x, i, c, P, V)[:, None, :], axis=0)
            db, dzs, dzh = db + tl.sum(dz, axis=0), dzs + tl.sum(zs, axis=0), dzh + tl.sum(zh, axis=0)
            dq, qs, qh = _norm_backward(g_query, None, x, scale, i, c, P, V, V2, EPS)
            ds, dh = ds + tl.sum(qs, axis=0), dh + tl.sum(qh, axis=0)
            total = _load(gradient, i, c, P, V) + dq + tl.sum(dz[:, :, None] * w[None, :, :], axis=1)
            _store(dx, i, c, total, P, V)
        _store(dweight, n, c, dw, T, V)
        _store_vector(dscale, c, ds, V)
        _store_vector(dshift, c, dh, V)
        if tl.program_id(0) == 0:
            _store_vector(dbias, n, db, T)
            _store_vector(dz_scale, n, dzs, T)
            _store_vector(dz_shift, n, dzh, T)
    if (tl.program_id(1) == 1) & (tl.program_id(0) * BLOCK < T):
        gradient, x, g_query, scale, dscale, dshift, g_key, g_value, o_scale, do_scale, do_shift, dx = text
        ds, dh = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        dos, doh = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for row in range(0, P, R):
            i = row + tl.arange(0, R)
            dq, qs, qh = _norm_backward(g_query, None, x, scale, i, c, P, T, T2, EPS)
            do, os, oh = _norm_backward(g_key, g_value, x, o_scale, i, c, P, T, T2, EPS)
            ds, dh = ds + tl.sum(qs, axis=0), dh + tl.sum(qh, axis=0)
            dos, doh = dos + tl.sum(os, axis=0), doh + tl.sum(oh, axis=0)
            _store(dx, i, c, _load(gradient, i, c, P, T) + dq + do, P, T)
        _store_vector(dscale, c, ds, T)
        _store_vector(dshift, c, dh, T)
        _store_vector(do_scale, c, dos, T)
        _store_vector(do_shift, c, doh, T)
