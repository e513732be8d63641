"""Choose the number of CPU threads for training steps and evaluated batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from procap.clip import CLIP

SMALL_PRODUCT = {"train": 40_000_000, "eval": 10_000_000}
"""Below this number of multiplications in the image tower's smallest matrix product, use one thread.

Waking a second thread takes about 90 us, and a step does so hundreds of times. With mini (0.6 million multiplications
per image; ViT-B/16: 118 million) training with two threads is 2.2 times as slow at batch 4 and faster at batch 100.
"""


@contextmanager
def fitting_threads(clip: CLIP, images: int, work: Literal["train", "eval"] = "train") -> Iterator[None]:
    """Use one thread for batches of few small images, by their size alone, unless OMP_NUM_THREADS is set."""
    threads = torch.get_num_threads()
    # The size of a tower of open_clip counts as 0; none of them is small.
    small = 0 < images * clip.visual.num_tokens * clip.geometry.vision_width**2 < SMALL_PRODUCT[work]
    if clip.device.type != "cpu" or not small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
