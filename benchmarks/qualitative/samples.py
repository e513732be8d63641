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
    """Return the kind of each image of `right` [M, N]."""
    return [tuple(column) for column in right.T.tolist()]


def select_images(right: NDArray[np.bool_], count: int) -> list[int]:
    """Select positions of at most `count` of the images that `right` [M, N] tells apart, by `SELECTION_RULE`."""
    kinds = list_kinds(right)
    mixed = [place for place, kind in enumerate(kinds) if len(set(kind)) > 1]
    if not mixed:
        return list(range(len(kinds)))[:count]
    seen: Counter[Kind] = Counter()
    turns = {}
    for place in mixed:
        turns[place] = seen[kinds[place]]
        seen[kinds[place]] += 1
    chosen = sorted(mixed, key=lambda place: (turns[place], _order(kinds[place])))[:count]
    return sorted(chosen, key=lambda place: (_order(kinds[place]), place))


def describe_kind(right: Kind, titles: Sequence[str]) -> str:
    """Describe in words which methods are right."""
    if len(set(right)) == 1:
        return f"{'both' if len(titles) == 2 else 'all'} {'right' if right[0] else 'wrong'}"
    return f"only {' and '.join(title for title, one in zip(titles, right, strict=True) if one)} right"


def count_kinds(right: NDArray[np.bool_], titles: Sequence[str]) -> dict[str, int]:
    """Count the images of `right` [M, N] of each kind; of two methods kinds without an image are named as well."""
    found = list_kinds(right)
    kinds: set[Kind] = set(product((True, False), repeat=2)) if len(titles) == 2 else set(found)
    return {describe_kind(kind, titles): found.count(kind) for kind in sorted(kinds, key=_order)}


def _order(kind: Kind) -> tuple[bool, int, Kind]:
    """Sort kinds of disagreement first, of these the ones that fewest methods get right, then by method."""
    return len(set(kind)) == 1, sum(kind) % len(kind), tuple(not one for one in kind)
