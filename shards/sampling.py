"""Draw uneven few-shot samples: fewer and fewer images from class to class, or images in their natural frequencies.

Source: CPT (CVPR 2026) for the decays; SS-Text (MICCAI 2025) for natural samples, whose sizes are rounded, not drawn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from procap.errors import UsageError
from shards.rng import stream_seed

BALANCED, NATURAL, NATURAL_ANY = "balanced", "natural", "natural-any"
CANONICAL = r"^(balanced|natural|natural-any|decay:0\.\d+)$"
"""What `parse_sampling` returns, as a pattern."""

Labels = Sequence[int] | NDArray[np.int64]


def parse_sampling(text: str) -> str:
    """Return the canonical name of a rule: `decay:.060` is `decay:0.06`, and `decay:1` is balanced. Raises UsageError.

    balanced: `shots` images of each class. decay: sizes fall exponentially from `shots` to RATIO * `shots`, and not
    below 1. natural-any: `shots` images per class on average, drawn from all images alike, so that a class may have
    none. natural: the same, with at least one image of each class.
    """
    name, _, ratio = text.partition(":")
    if text in (BALANCED, NATURAL, NATURAL_ANY):
        return text
    with suppress(ValueError):
        if name == "decay" and 1e-4 <= (value := float(ratio)) <= 1:
            return f"decay:{value:g}" if value < 1 else BALANCED
    known = "balanced, decay:RATIO with 0.0001 <= RATIO <= 1, natural, natural-any"
    raise UsageError(f"--sampling {text}: known are {known}")


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
        shares = [ratio ** (rank / max(1, len(order) - 1)) for rank in range(len(order))]
        sizes = {label: max(1, round(shots * share)) for label, share in zip(order, shares, strict=True)}
        return first_images(balanced, train_labels, sizes)
    chosen = {*classes}
    mixed = [position for position, label in enumerate(train_labels) if int(label) in chosen]
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
