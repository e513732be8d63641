"""Compiled blocks give the logits and gradients of plain ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_runs import seeded
from tiny_geometry import SHORT_OPTIONS
from torch import Tensor
from torch._dynamo.utils import counters

from procap.clip import CLIP
from procap.kernels.compiled import compile_blocks
from procap.methods import METHODS, build_method
from procap.text import LabelSpace


def outcome(clip: CLIP, name: str, names: tuple[str, ...], precision: torch.dtype = torch.float32) -> list[Tensor]:
    """Logits, loss terms and gradients of one method at its seeded start."""
    options = {"sentences": "templates"} if name == "coprompt" else {}
    method: Any = build_method(name, clip, LabelSpace(names), options | SHORT_OPTIONS.get(name, {}), seeded(1))
    size, device = clip.geometry.image_size, clip.device
    images, labels = torch.randn(3, 3, size, size, generator=seeded(2)).to(device), torch.arange(3, device=device)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        terms = method.loss(images, labels, tuple(noise.to(device) for noise in method.draw(seeded(3))))
        logits = method.classifier()(images)
    parameters = list(method.parameters())
    return [logits, *terms.values(), *torch.autograd.grad(sum(terms.values()), parameters, allow_unused=True)]


TRAINED = [name for name in METHODS if name != "zeroshot"]


def compare(clip: CLIP, backend: str, methods: Sequence[str] = TRAINED, **tolerance: float) -> None:
    """Compare a copy with compiled blocks and the model itself."""
    torch.compiler.reset()
    compiled = copy.deepcopy(clip)
    compile_blocks(compiled, backend)
    for name, count in (*((name, 5) for name in methods), ("procap", 20)):
        space = tuple("red " * (i % 3) + f"cat {i}" for i in range(count))
        for one, other in zip(outcome(clip, name, space), outcome(compiled, name, space), strict=True):
            torch.testing.assert_close(other, one, **tolerance)
    # Few classes end in one group of rows, many in several; both are compiled now.
    graphs = counters["stats"]["unique_graphs"]
    for count in (4, 60):
        outcome(compiled, "procap", tuple(f"cat {i}" for i in range(count)))
    assert counters["stats"]["unique_graphs"] == graphs


def test_compiled_blocks_are_traced_whole_and_give_the_same_bits(short_clip):
    """With the tracing of torch.compile but torch's own kernels. Another number of classes compiles nothing again."""
    counters.clear()
    different = ("cocoop", "maple", "mma", "mmrl", "skipt", "procap")
    compare(short_clip, "aot_eager", different, rtol=0, atol=0)
    assert 0 < counters["stats"]["unique_graphs"] <= 50


@pytest.mark.slow
def test_compiled_kernels_change_nothing_but_rounding(short_clip):
    compare(short_clip, "inductor", rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_compiled_kernels_on_a_gpu_change_nothing_but_rounding(short_clip):
    compare(copy.deepcopy(short_clip).to("cuda"), "inductor", rtol=1e-3, atol=1e-4)
