"""Class names of the published data sets in label order, spelled as in CoOp's lists (with underscores).

Ten sets bring their names in `classnames.json`. ImageNet and its four shifts take OpenAI's list, which ships with
open_clip; its source file is run alone, because importing open_clip imports torch.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from functools import cache
from pathlib import Path

from shards.catalogue import Dataset
from shards.errors import DataError
from shards.manifest import lines_digest

FOLDER = Path(__file__).parent
IMAGENET_DIGEST = "571ae1c583b4be7d"


def published_classnames(dataset: Dataset) -> tuple[str, ...]:
    """Return the raw names of a published set, or of one derived from it, in label order."""
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} is no published data set")
    if dataset.base in _own_names():
        return _own_names()[dataset.base]
    names = imagenet_classnames()
    return tuple(names[index] for index in dataset.raw.indices) or names


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the 1000 WordNet ids of ImageNet's classes in label order, which is sorted order."""
    return tuple((FOLDER / "wnids.txt").read_text(encoding="utf-8").split())


@cache
def imagenet_classnames() -> tuple[str, ...]:
    """Return OpenAI's 1000 names of ImageNet's classes in label order; two pairs of them are equal."""
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.origin:
        raise DataError("ImageNet's class names come with open_clip, which is missing: pip install open_clip_torch")
    return read_imagenet_classnames(Path(spec.origin).parent / "zero_shot_metadata.py")


def read_imagenet_classnames(source: Path) -> tuple[str, ...]:
    """Read `IMAGENET_CLASSNAMES` of a Python file. Raises DataError if it is not OpenAI's list."""
    try:
        names = tuple(runpy.run_path(str(source))["IMAGENET_CLASSNAMES"])
        if lines_digest(names) != IMAGENET_DIGEST:
            raise ValueError("it is another list than that of published results")
    # A file of another version can raise any type of error.
    except Exception as error:
        hint = "install open_clip_torch 3.3, whose list is the right one"
        raise DataError(f"ImageNet's class names cannot be read from {source} ({error!r:.200}): {hint}") from error
    return names


@cache
def _own_names() -> dict[str, tuple[str, ...]]:
    names = json.loads((FOLDER / "classnames.json").read_text(encoding="utf-8"))
    return {dataset: tuple(of_dataset) for dataset, of_dataset in names.items()}
