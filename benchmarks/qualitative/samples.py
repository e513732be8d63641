"""Select the images to show by a fixed rule: those on which methods disagree.

Shapes: M methods, N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sample:
    """A selected image: its position in the target, and which methods predict it correctly."""

    place: int
    right: Kind


def select_images(right: NDArray[np.bool_], count: int) -> list[Sample]:
    """Select at most `count` of the images that `right` [M, N] tells apart, by `SELECTION_RULE`, kind by kind."""
    columns: list[Kind] = [tuple(column) for column in right.T.tolist()]
    waiting: dict[Kind, list[int]] = {}
    for place, kind in enumerate(columns):
        if len(set(kind)) > 1:
            waiting.setdefault(kind, []).append(place)
    if not waiting:
        return [Sample(place, kind) for place, kind in enumerate(columns[:count])]
    kinds = sorted(waiting, key=_order)
    rounds = range(max(map(len, waiting.values())))
    in_turn = [Sample(waiting[kind][turn], kind) for turn in rounds for kind in kinds if turn < len(waiting[kind])]
    return sorted(in_turn[:count], key=lambda sample: (kinds.index(sample.right), sample.place))


def describe_kind(right: Kind, titles: Sequence[str]) -> str:
    """Describe in words which methods are right."""
    if len(set(right)) == 1:
        return f"{'both' if len(titles) == 2 else 'all'} {'right' if right[0] else 'wrong'}"
    return f"only {' and '.join(title for title, one in zip(titles, right, strict=True) if one)} right"


def count_kinds(right: NDArray[np.bool_], titles: Sequence[str]) -> dict[str, int]:
    """Count the images of `right` [M, N] of each kind; of two methods kinds without an image are named as well."""
    columns: list[Kind] = [tuple(column) for column in right.T.tolist()]
    kinds: set[Kind] = set(product((True, False), repeat=2)) if len(titles) == 2 else set(columns)
    return {describe_kind(kind, titles): columns.count(kind) for kind in sorted(kinds, key=_order)}


def _order(kind: Kind) -> tuple[bool, int, Kind]:
    """Sort kinds of disagreement first, of these the ones that fewest methods get right, then by method."""
    return len(set(kind)) == 1, sum(kind) % len(kind), tuple(not one for one in kind)
