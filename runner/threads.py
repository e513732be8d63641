"""Choose the number of CPU threads for training steps and evaluated batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from procap.clip import CLIP

SMALL_PRODUCT = {"train": 40_000_000, "eval": 10_000_000}
"""Multiplications in the smallest product of the image tower below which a second thread costs more than it saves.

Waking it takes about 90 us, and a step does so hundreds of times. With mini (0.6 million an image) two threads took 2.2
times as long as one to train at batch 4, 1.2 times at batch 32 and 0.8 times at batch 100, and to evaluate 1.8, 0.9 and
0.6 times; ViT-B/16 has 118 million an image.
"""


@contextmanager
def fitting_threads(clip: CLIP, images: int, work: Literal["train", "eval"] = "train") -> Iterator[None]:
    """Use one thread in the block where steps or batches of `images` images are small, else torch's default.

    OMP_NUM_THREADS, where the user has set it, takes precedence. The choice depends on sizes alone, so that repeated
    runs are equal to the bit.
    """
    threads = torch.get_num_threads()
    small = images * clip.visual.num_tokens * clip.geometry.vision_width**2 < SMALL_PRODUCT[work]
    if clip.device.type != "cpu" or not small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
