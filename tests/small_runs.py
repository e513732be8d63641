"""What most tests of small models and trainings need: seeded draws, a quiet run on the CPU, graphs without a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from procap.clip import CLIP
    from runner.config import RuntimeConfig
    from runner.run_folders import RunFolder

REPRESENTATIVE = ("zeroshot", "coop", "cocoop", "maple", "procap", "cliplora")
"""Methods of the default suite where a slow test takes all of them: a method of each way to change CLIP."""


def mark_slow(names: Iterable[str], quick: Collection[str] = REPRESENTATIVE) -> list[Any]:
    """Return parameters for pytest; all but those in `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=seeded(seed))


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def embed_words(clip: CLIP, text: str) -> torch.Tensor:
    """Embeddings [P, D] of the tokens of `text`."""
    ids = clip.tokenize([text])[0]
    return clip.text.token_embedding.weight[ids[1 : int(ids.argmax())]]


def perturb(method: Any, seed: int = 9) -> Any:
    """The method as after some training: every parameter moved."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return method


def make_runtime(data: str | Path, results: str | Path, **more: Any) -> RuntimeConfig:
    """The CPU, without tracking and without progress."""
    from runner.config import RuntimeConfig

    return RuntimeConfig(Path(data), Path(results), device="cpu", tracking_uri="off", quiet=True, **more)


def only_run(results: Path) -> RunFolder:
    """The run below a folder that has one."""
    from runner.run_folders import RunFolder

    [config] = results.rglob("config.json")
    return RunFolder(config.parent)
