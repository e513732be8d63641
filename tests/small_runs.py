"""What most tests of small trainings need: a seeded generator, and a quiet run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from runner.config import RuntimeConfig


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_runtime(data: str | Path, results: str | Path, **more: Any) -> RuntimeConfig:
    """The CPU, without tracking and without progress."""
    from runner.config import RuntimeConfig

    return RuntimeConfig(Path(data), Path(results), device="cpu", tracking_uri="off", quiet=True, **more)
