"""Class names of the published data sets in label order, spelled as in CoOp's lists (with underscores).

Those of ImageNet, which its four shifts share, are OpenAI's list, as in open_clip; two pairs of them are equal.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from shards.catalogue import Dataset

FOLDER = Path(__file__).parent


def published_classnames(dataset: Dataset) -> tuple[str, ...]:
    """Return the raw names of a published set, or of one derived from it, in label order."""
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} is no published data set")
    names = _classnames().get(dataset.base) or _classnames()["imagenet"]
    return tuple(names[index] for index in dataset.raw.indices) or tuple(names)


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the 1000 WordNet ids of ImageNet's classes in label order, which is sorted order."""
    return tuple((FOLDER / "wnids.txt").read_text(encoding="utf-8").split())


@cache
def _classnames() -> dict[str, list[str]]:
    names: dict[str, list[str]] = json.loads((FOLDER / "classnames.json").read_text(encoding="utf-8"))
    return names
