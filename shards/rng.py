"""Named seeded streams for all random draws of a run, so that resuming and another world size change nothing."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """Compute a 63-bit seed for the stream called `names` under the run's `seed`; independent for different names."""
    # Not Python's `hash`, which is salted in every process. Seeds that lie close together give unrelated streams.
    path = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Make a CPU generator at the start of the named stream, e.g. `generator(1, "noise", step)`."""
    import torch

    # On the CPU also for work on a GPU, whose generators draw other numbers from the same seed.
    return torch.Generator().manual_seed(stream_seed(seed, *names))
