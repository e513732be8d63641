"""Select the images to show by a fixed rule: those on which methods disagree.

Shapes: M methods, N images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

SELECTION_RULE = (
    "the first images of the split, in its order, that some methods get right and others get wrong; as many of each "
    "kind (which methods are right) as there are, one of each kind in turn; where there are none, the first images of "
    "the split"
)

Kind = tuple[bool, ...]
"""Which of M methods are right about an image."""


def list_kinds(right: NDArray[np.bool_]) -> list[Kind]:
    """Return the group of each image of `right` [M, N]."""
    return [tuple(column) for column in right.T.tolist()]


def select_images(right: NDArray[np.bool_], count: int) -> list[int]:
    """Select positions of at most `count` of the images that `right` [M, N] tells apart, by `SELECTION_RULE`."""
    groups = list_kinds(right)
    mixed = [index for index, group in enumerate(groups) if len(set(group)) > 1]
    if not mixed:
        return list(range(len(groups)))[:count]
    seen: Counter[Kind] = Counter()
    turns = {}
    for index in mixed:
        turns[index] = seen[groups[index]]
        seen[groups[index]] += 1
    chosen = sorted(mixed, key=lambda index: (turns[index], _order(groups[index])))[:count]
    return sorted(chosen, key=lambda index: (_order(groups[index]), index))


def describe_kind(right: Kind, titles: Sequence[str]) -> str:
    """Describe in words which methods are right."""
    if len(set(right)) == 1:
        return f"{'both' if len(titles) == 2 else 'all'} {'right' if right[0] else 'wrong'}"
    return f"only {' and '.join(title for title, is_right in zip(titles, right, strict=True) if is_right)} right"


def count_kinds(right: NDArray[np.bool_], titles: Sequence[str]) -> dict[str, int]:
    """Count the images of `right` [M, N] of each group; of two methods groups without an image are named as well."""
    counts = list_kinds(right)
    groups: set[Kind] = set(product((True, False), repeat=2)) if len(titles) == 2 else set(counts)
    return {describe_kind(group, titles): counts.count(group) for group in sorted(groups, key=_order)}


def _order(group: Kind) -> tuple[bool, int, Kind]:
    """Sort groups of disagreement first, of these the ones that fewest methods get right, then by method."""
    return len(set(group)) == 1, sum(group) % len(group), tuple(not is_right for is_right in group)
