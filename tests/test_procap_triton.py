"""The fused kernels give the values and gradients of the eager level, and run only where they are supported.

Triton's interpreter must be chosen before triton is imported, so kernels run on the CPU in a process of their own: this
file started as a program reads cases and prints results, one JSON line each. On a GPU:

    python -m pytest -m gpu tests/test_procap_triton.py
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import procap.kernels.refinement as fused
from procap.cross_attention import CrossAttention

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"tokens": 3, "widths": (33, 20), "heads": 3, "head_width": 5}


def level(tokens, widths, heads, head_width, zero=False, dtype="float32", device="cpu", seed=0):
    """Tokens and modules of one level; all away from their start, but for output projections that are to be zero."""
    generator = torch.Generator().manual_seed(seed)
    options = {"heads": heads, "head_width": head_width, "norm": "pre", "zero_output": zero}
    vision, text = widths
    modules = nn.Linear(vision, text), *(CrossAttention(w, text, generator, **options) for w in widths)
    for name, parameter in nn.ModuleList(modules).named_parameters():
        if not (zero and "output" in name and "norm" not in name):
            drawn = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.data = scale * drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    v, t = (torch.randn(tokens, width, generator=generator) for width in widths)
    dtype = getattr(torch, dtype)
    for module in modules:
        module.to(device, dtype)
    return v.to(device, dtype).requires_grad_(), t.to(device, dtype).requires_grad_(), *modules


def results(run, v, t, *modules):
    """Outputs and all gradients by name, for fixed gradients of the outputs that differ between the two."""
    named = {"dv": v, "dt": t} | dict(nn.ModuleList(modules).named_parameters())
    outputs = run(v, t, *modules)
    # Eighths are exact in every precision.
    counts = [torch.arange(x.numel(), device=x.device).view(x.shape) for x in outputs]
    gradients = [(count % (17 + i) - 6).to(x) / 8 for i, (count, x) in enumerate(zip(counts, outputs, strict=True))]
    found = torch.autograd.grad(outputs, list(named.values()), gradients)
    # Detached: a graph that lives on ties the leaves to this stream, and a capture on another one fails.
    return {"v": outputs[0].detach(), "t": outputs[1].detach()} | dict(zip(named, found, strict=True))


def both(case, levels=1):
    """Results of the kernels, and of the eager level in float64, by name; of several levels with the same weights."""

    def repeated(way):
        def run(v, t, *modules):
            for _ in range(levels):
                v, t = way(v, t, *modules)
            return v, t

        return run

    inputs = level(**case)
    got = results(repeated(fused.fused_level), *inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs[:2]], [m.double() for m in inputs[2:]]
    want = results(repeated(fused.eager_level), *exact[0], *exact[1])
    assert all(x.isfinite().all() and x.shape == want[name].shape for name, x in got.items())
    return {name: (got[name].double(), exact) for name, exact in want.items()}


def worst(case, levels=1):
    """Largest difference between the two by name, in parts of the tensor's own scale (at least 0.01)."""
    pairs = both(case, levels).items()
    return {n: ((got - want).abs().max() / want.abs().max().clamp_min(0.01)).item() for n, (got, want) in pairs}


def stacked(case):
    return worst(case, levels=2)


def unchanged(case):
    """With output projections of zero: whether tokens come back bit for bit, and the names with a gradient."""
    v, t, *modules = level(**case, zero=True)
    got = results(fused.fused_level, v, t, *modules)
    same = torch.equal(got["v"], v) and torch.equal(got["t"], t)
    return [same, sorted(name for name, x in got.items() if name not in ("v", "t") and x.abs().max() > 0)]


@pytest.fixture(scope="module")
def interpreter():
    """Answers (question, case) by the kernels in Triton's interpreter."""
    pytest.importorskip("triton")
    # Not where this file is a program or a module of one: there it is not beside the others on the path.
    from child_process import start_process

    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_process([sys.executable, __file__], env=environment, **pipes) as process:

        def ask(question, case):
            process.stdin.write(json.dumps([question, case]) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert not isinstance(answer, str), answer
            return answer

        yield ask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_eager(interpreter, dtype):
    errors = interpreter("worst", {**SMALL, "dtype": dtype})
    assert len(errors) == 4 + 24 and max(errors.values()) < {"float32": 1e-5, "bfloat16": 2e-2}[dtype], errors


@pytest.mark.parametrize("tokens, widths, heads, head_width", [
    (1, (24, 16), 1, 8), (4, (40, 24), 2, 16), pytest.param(17, (16, 24), 1, 4, marks=pytest.mark.slow),
    pytest.param(5, (33, 20), 1, 20, marks=pytest.mark.slow),
])  # fmt: skip
def test_shapes_that_fill_no_block(interpreter, tokens, widths, heads, head_width):
    errors = interpreter("worst", {"tokens": tokens, "widths": widths, "heads": heads, "head_width": head_width})
    assert max(errors.values()) < 1e-5, errors


def test_levels_in_a_row_share_weights(interpreter):
    errors = interpreter("stacked", {**SMALL, "widths": (24, 16)})
    assert max(errors.values()) < 1e-5, errors


sizes = st.integers(1, 40)
cases = st.fixed_dictionaries({
    "tokens": st.integers(1, 9), "widths": st.tuples(sizes, sizes).map(lambda pair: (pair[0] + 2, pair[1] + 2)),
    "heads": st.integers(1, 4), "head_width": st.integers(1, 12), "zero": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]), "seed": st.integers(0, 1000),
})  # fmt: skip


def holds(interpreter, case):
    errors = interpreter("worst", case)
    # A LayerNorm over two or three nearly equal entries magnifies whatever rounding came before it.
    limit = (2e-2 if case["dtype"] == "bfloat16" else 1e-4) * (1 if min(case["widths"]) > 8 else 30)
    assert max(errors.values()) < limit, errors


# The same three levels each time; on a GPU they are others.
@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases)
def test_any_level(interpreter, case):
    holds(interpreter, case)


@pytest.mark.slow
@pytest.mark.parametrize("tokens, widths, head_width", [(4, (768, 512), 64), (32, (96, 64), 16)])
def test_the_widths_of_vit_b_and_the_most_tokens(interpreter, tokens, widths, head_width):
    errors = interpreter("worst", {"tokens": tokens, "widths": widths, "heads": 8, "head_width": head_width})
    assert max(errors.values()) < 2e-5, errors


def test_zero_output_projections_leave_the_tokens_and_learn(interpreter):
    same, learning = interpreter("unchanged", SMALL)
    projections = [f"{i}.output.{name}" for i in (1, 2) for name in ("bias", "weight")]
    assert same and learning == sorted([*projections, "dt", "dv"])


def test_a_level_on_the_cpu_is_eager_and_needs_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "procap.kernels.launch", None)
    a, b = (results(run, *level(**SMALL)) for run in (partial(fused.refine_level, fused=True), fused.eager_level))
    assert all(torch.equal(a[name], b[name]) for name in a)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_shapes_decide_and_nothing_is_timed():
    """The rule reads shapes, types and devices alone, so tensors that claim to be on a GPU are enough."""
    pytest.importorskip("triton")

    def on_gpu(tokens):
        v, t, *modules = level(**{**SMALL, "tokens": tokens})
        return v.detach().as_subclass(OnGpu), t.detach().as_subclass(OnGpu), *modules

    few, many = on_gpu(4), on_gpu(fused.MAX_TOKENS + 1)
    assert fused.has_kernels(*few) and not fused.has_kernels(*many)
    few[3].norm = few[4].norm = "post"
    assert not fused.has_kernels(*few)
    assert not fused.has_kernels(*level(**SMALL))


COMPILE = """
import re, subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
import procap.kernels.launch as launch
from tests.test_procap_triton import fused, level
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *a, **k: self.check(self.kernel.warmup(*a, grid=grid, **k))
    def check(self, built):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(built.asm["cubin"])
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        print(self.kernel.__name__, built.metadata.shared, *re.search(r"STACK:(\\d+)", usage).groups())
for name in ("project", "attend", "attend_backward", "project_backward", "inputs_backward"):
    setattr(launch, name, Compiled(getattr(launch, name)))
for capability in (80, 90):
    class Device:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
    driver.set_active(Device())
    v, t, projection, vision, text = level(4, (768, 512), 8, 64)
    directions = [launch.Direction(*fused.parameters(attention)) for attention in (vision, text)]
    projection = [projection.weight, projection.bias]
    _, _, z, rows = launch.forward(v, t, projection, *directions, 8, 1e-5)
    launch.backward((v, t), v, t, z, rows, projection, *directions, 8, 1e-5)
"""


@pytest.mark.slow
def test_kernels_compile_for_a100_and_h100_and_stay_in_registers():
    """By Triton's own compiler, which needs no device; 4 tokens of ViT-B/16."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) == 2 * 6
    assert all(int(stack) == 0 and int(shared) <= 99 * 1024 for _, shared, stack in kernels), kernels


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return "cuda"


VIT_B, VIT_L, ODD = ((768, 512), 8, 64), ((1024, 768), 12, 64), ((33, 20), 3, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, sizes, dtype", [
    (4, VIT_B, "float32"), (4, VIT_B, "bfloat16"), (1, VIT_B, "float32"), (7, ODD, "float32"), (9, ODD, "bfloat16"),
    (16, VIT_L, "float32"), (32, VIT_B, "float32"),
])  # fmt: skip
def test_native_kernels_are_eager(cuda, tokens, sizes, dtype):
    widths, heads, head_width = sizes
    case = {"tokens": tokens, "widths": widths, "heads": heads, "head_width": head_width}
    errors = worst(case | {"dtype": dtype, "device": cuda})
    assert max(errors.values()) < (2e-5 if dtype == "float32" else 2**-7), errors


@pytest.mark.gpu
def test_kernels_in_a_graph_give_the_same(cuda):
    case = {"tokens": 4, "widths": (768, 512), "heads": 8, "head_width": 64, "device": cuda}
    inputs = level(**case)
    plain = results(fused.fused_level, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(fused.fused_level, *inputs)
    graph.replay()
    for name, x in plain.items():
        assert torch.equal(x, recorded[name]), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        question, case = json.loads(line)
        try:
            answer = globals()[question](case)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
