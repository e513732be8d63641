"""Named seeded streams: every random draw of a run comes from one, so that resuming and re-sharding change nothing."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream that `names` describe under the run's `seed`; independent for different names."""
    path = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator at the start of the named stream, e.g. `generator(1, "noise", step)`."""
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, *names))
