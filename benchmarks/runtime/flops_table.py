"""Count the operations of every method on every backbone for estimates of cost.

python -m benchmarks.runtime.flops_table        rewrite benchmarks/suites/flops.json (five minutes)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.runtime.flops import count_flops, count_step
from benchmarks.runtime.workload import synthetic_case
from benchmarks.suites.cost import FLOPS_FILE
from procap.clip import CLIP
from procap.geometry import Geometry

VIT_B_16 = Geometry(
    image_size=224,
    patch_size=16,
    vision_width=768,
    vision_layers=12,
    vision_heads=12,
    text_width=512,
    text_layers=12,
    text_heads=8,
    context_length=77,
    vocab_size=49408,
    embed_dim=512,
    quick_gelu=True,
)
LARGE = replace(VIT_B_16, vision_width=1024, vision_layers=24, vision_heads=16, text_width=768, text_heads=12)
GEOMETRIES = {
    "ViT-B-16": VIT_B_16,
    "ViT-B-32": replace(VIT_B_16, patch_size=32),
    "ViT-L-14": replace(LARGE, patch_size=14, embed_dim=768),
}
METHODS = ("zeroshot", "coop", "cocoop", "maple", "procap")
IMAGES, CLASSES = (1, 2), (10, 110)
"""Sizes that are counted; operations are bilinear in both."""


def _count_step(clip: CLIP, name: str, images: int, classes: int) -> float:
    return count_step(*synthetic_case(clip, name, classes, images))


def _count_evaluation(clip: CLIP, name: str, images: int, classes: int) -> float:
    method, pixels, _ = synthetic_case(clip, name, classes, images)
    return count_flops(lambda: method.classifier()(pixels), method)


def bilinear(count: Callable[[int, int], float]) -> list[float]:
    """Fit the coefficients of 1, B, C and B C to the counted sizes."""
    rows = [[1.0, b, c, b * c] for b in IMAGES for c in CLASSES]
    counted = [count(b, c) for b in IMAGES for c in CLASSES]
    solved = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.tensor(counted, dtype=torch.float64))
    return [max(0.0, float(f"{value:.6g}")) for value in solved]


def empty_clip(geometry: Geometry) -> CLIP:
    """Make a CLIP with uninitialized weights: only its shapes count."""
    with torch.device("meta"):
        clip = CLIP(geometry)
    return clip.to_empty(device="cpu").requires_grad_(False)


def count_backbone(clip: CLIP) -> dict[str, dict[str, Any]]:
    """Count the operations of every method on one backbone."""
    table: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        trains = name != "zeroshot"
        built, *_ = synthetic_case(clip, name, CLASSES[0], 1)
        table[name] = {
            "step": bilinear(lambda b, c, name=name: _count_step(clip, name, b, c)) if trains else [0.0] * 4,  # type: ignore[misc]
            "eval": bilinear(lambda b, c, name=name: _count_evaluation(clip, name, b, c)),  # type: ignore[misc]
            "learnables": sum(parameter.numel() for parameter in built.parameters()),
        }
    return table


def main() -> int:
    """Write the table."""
    from procap.weights.mini import load_mini
    from runner.results import write_json

    table = {"mini": count_backbone(load_mini())}
    for name, geometry in GEOMETRIES.items():
        table[name] = count_backbone(empty_clip(geometry))
    write_json(FLOPS_FILE, table)
    print(f"{FLOPS_FILE} is written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
