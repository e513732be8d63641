"""Draw uneven few-shot samples: fewer and fewer images from class to class, or images in their natural frequencies.

Source: CPT (CVPR 2026) for the decays; SS-Text (MICCAI 2025) for natural samples, whose sizes are rounded, not drawn.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from procap.errors import UsageError
from shards.rng import stream_seed

BALANCED, NATURAL = "balanced", "natural"
RULE = r"^(balanced|natural|natural-any|decay:0\.\d*[1-9])$"
Sampling = Annotated[str, Field(pattern=RULE)]
"""balanced: `shots` images of each class. decay:RATIO: sizes fall exponentially from `shots` to RATIO * `shots`, not
below 1. natural-any: `shots` images per class on average, drawn from all images alike, so that a class may have none.
natural: the same, with at least one image of each class.
"""
Labels = Sequence[int] | NDArray[np.int64]


def check_sampling(text: str) -> str:
    """Return the name of a rule. Raises UsageError if there is none."""
    if not re.fullmatch(RULE, text):
        raise UsageError(f"--sampling {text}: known are balanced, natural, natural-any, decay:RATIO such as 0.06")
    return text


def draw_uneven(
    sampling: str, train_labels: Labels, balanced: Sequence[int], classes: Sequence[int], shots: int, seed: int
) -> list[int]:
    """Draw the positions of the training images of `classes` by an uneven rule, from a separate random stream.

    balanced: the positions of the balanced sample, of which "decay" keeps the first ones of each class.
    """
    rng = random.Random(stream_seed(seed, "sampling"))
    if sampling.startswith("decay:"):
        # All ratios have one order of classes, so that the images of a smaller ratio are among those of a larger one.
        order, ratio = rng.sample(classes, len(classes)), float(sampling.partition(":")[2])
        last = max(1, len(order) - 1)
        sizes = {label: max(1, round(shots * ratio ** (rank / last))) for rank, label in enumerate(order)}
        return first_images(balanced, train_labels, sizes)
    mixed = np.flatnonzero(np.isin(train_labels, [*classes])).tolist()
    rng.shuffle(mixed)
    if sampling == NATURAL:
        kept = {*first_images(mixed, train_labels, dict.fromkeys(classes, 1))}
        # False sorts before True, and the sort is stable: one image of each class, then the others in drawn order.
        mixed.sort(key=lambda position: position not in kept)
    return sorted(mixed[: shots * len(classes)])


def first_images(positions: Iterable[int], labels: Labels, sizes: Mapping[int, int]) -> list[int]:
    """Keep the first `sizes[label]` positions of each label, none of other labels."""
    left = defaultdict(int, sizes)
    kept = []
    for position in positions:
        label = int(labels[position])
        if left[label]:
            left[label] -= 1
            kept.append(position)
    return kept
