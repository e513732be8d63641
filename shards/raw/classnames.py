"""Class names of the published data sets in label order, spelled as in CoOp's lists (with underscores).

Ten sets bring their names in `classnames.json`. ImageNet and its four shifts take OpenAI's list, which ships with
open_clip; it is read from the source file, because importing open_clip imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from functools import cache
from pathlib import Path

from shards.dataset import Dataset
from shards.errors import DataError
from shards.manifest import lines_digest

FOLDER = Path(__file__).parent
IMAGENET_DIGEST = "571ae1c583b4be7d"


def published_classnames(dataset: Dataset) -> tuple[str, ...]:
    """Return the raw names of a published set, or of one derived from it, in label order.

    Raises DataError when open_clip's list is needed and is not there or is another one, ValueError for other data sets.
    """
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
    """Return OpenAI's 1000 names of ImageNet's classes in label order; two pairs of them are equal.

    Raises DataError when the installed open_clip does not hold that list.
    """
    return read_imagenet_classnames(_open_clip_source())


def read_imagenet_classnames(source: Path) -> tuple[str, ...]:
    """Read the literal `IMAGENET_CLASSNAMES` of a Python file. Raises DataError if it is not OpenAI's list."""
    hint = "install open_clip_torch 3.3, whose list is the right one"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"ImageNet's class names cannot be read from {source} ({error}): {hint}") from error
    literals = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "IMAGENET_CLASSNAMES" for target in node.targets)
    )
    literal = next(literals, None)
    if not isinstance(literal, ast.Tuple | ast.List):
        raise DataError(f"ImageNet's class names are not listed in {source}: {hint}")
    names = tuple(item.value for item in literal.elts if isinstance(item, ast.Constant) and isinstance(item.value, str))
    if lines_digest(names) != IMAGENET_DIGEST:
        raise DataError(f"ImageNet's class names in {source} are not those that published results use: {hint}")
    return names


@cache
def _own_names() -> dict[str, tuple[str, ...]]:
    names = json.loads((FOLDER / "classnames.json").read_text(encoding="utf-8"))
    return {dataset: tuple(of_dataset) for dataset, of_dataset in names.items()}


def _open_clip_source() -> Path:
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.origin:
        raise DataError("ImageNet's class names come with open_clip, which is missing: pip install open_clip_torch")
    return Path(spec.origin).parent / "zero_shot_metadata.py"
