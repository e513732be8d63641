"""Few-shot picks and base / novel halves, exactly as CoOp draws them, so that numbers compare with the literature."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shards.errors import DataError, DataUsageError, unknown_name
from shards.manifest import lines_digest
from shards.reader import ShardSet, Split

if TYPE_CHECKING:
    from shards.few_shot_samples import FewShotSamples

Classes = Literal["all", "base", "novel", "dev-base", "dev-novel"]
"""Which classes of a data set: all, the halves, or the halves of the base half.

By the last two a method can be chosen for what it does on classes it was not trained on, and novel ones are left alone.
"""

CHOICES: tuple[Classes, ...] = get_args(Classes)
VAL_SHOTS = 4

Labels = Sequence[int] | NDArray[np.int64]


def class_choice(name: str) -> Classes:
    """One of `CHOICES`; CoOp's word `new` means novel. Raises DataUsageError for anything else."""
    choice = {"new": "novel"}.get(name, name)
    for known in CHOICES:
        if choice == known:
            return known
    raise unknown_name("choice of classes", name, (*CHOICES, "new"), CHOICES)


def few_shot(train_labels: Labels, val_labels: Labels, shots: int, seed: int) -> tuple[list[int], list[int]]:
    """Positions of the few-shot images in the train and the val list, in drawn order.

    CoOp's rule: classes in order of first appearance, `random.sample` inside each (all of a class that has fewer than
    `shots`); then min(shots, 4) per class of val from the same random stream. It always runs over all classes, before
    any of them are selected. `shots` 0 means every image.
    """
    if shots == 0:
        return list(range(len(train_labels))), list(range(len(val_labels)))
    draw = random.Random(seed)
    return _sample(train_labels, shots, draw), _sample(val_labels, min(shots, VAL_SHOTS), draw)


def _sample(labels: Labels, shots: int, draw: random.Random) -> list[int]:
    buckets: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        buckets.setdefault(int(label), []).append(position)
    picks: list[int] = []
    for bucket in buckets.values():
        picks += draw.sample(bucket, shots) if len(bucket) >= shots else bucket
    return picks


def class_half(labels_present: Iterable[int], classes: str) -> list[int]:
    """The labels of a choice in ascending order.

    base is the first ceil(n / 2) of the labels present, novel the rest; dev-base and dev-novel part base likewise.
    """
    labels = sorted({int(label) for label in labels_present})
    choice = class_choice(classes)
    if choice == "all":
        return labels
    development, _, half = choice.rpartition("-")
    if development:
        labels = labels[: (len(labels) + 1) // 2]
    middle = (len(labels) + 1) // 2
    return labels[:middle] if half == "base" else labels[middle:]


@dataclass(frozen=True)
class FewShot:
    """What a run trains on, relabelled 0..C-1 within its classes.

    digest: first 16 hex digits of SHA-256 over the picked paths in drawn order; picks: those paths.
    source: what chose them. seed: that of the choice, which is another than the run's where picks were imported.
    labels: the data set's own label of each class.
    """

    train: Split
    val: Split
    classnames: tuple[str, ...]
    labels: tuple[int, ...]
    digest: str
    picks: list[str]
    source: Literal["coop-rule", "imported"]
    seed: int


def check_shots(shards: ShardSet, shots: int) -> None:
    """Raises DataUsageError for a test-only set, a negative number, or more shots than the largest class has."""
    if "train" not in shards.manifest.splits:
        raise DataUsageError(f"'{shards.name}' is a test set: it has no images to train on")
    if shots < 0:
        raise DataUsageError(f"--shots {shots}: give a number of images per class, or 0 for all of them")
    largest = int(np.bincount(shards.labels("train")).max())
    if shots > largest:
        has = f"the largest class of '{shards.name}' has {largest} training images"
        raise DataUsageError(f"--shots {shots}: {has}; give --shots {largest} or fewer, or full")


def pick(shards: ShardSet, shots: int, seed: int, classes: str = "all", picks: FewShotSamples | None = None) -> FewShot:
    """The few-shot images of a run, by CoOp's draw or from `picks`; `shots` 0 takes every image of train and val.

    A class with fewer images than `shots` gives all it has, as in CoOp. Raises DataUsageError as `check_shots` does and
    for picks of another number of shots, DataError for picks of images that are not in the data set.
    """
    check_shots(shards, shots)
    train = shards.split("train")
    val = shards.split("val") if "val" in shards.manifest.splits else train.subset([])
    if picks is None:
        train_picks, val_picks = few_shot(train.labels, val.labels, shots, seed)
    elif picks.shots != shots:
        raise DataUsageError(f"the picks {picks.digest} are of {picks.shots} shots: give --shots {picks.shots}")
    else:
        train_picks, val_picks = _positions(train, picks.train, picks), _positions(val, picks.val, picks)
    labels = class_half(train.labels[train_picks], classes)
    chosen_train = select(train, train_picks, labels)
    return FewShot(
        train=chosen_train,
        val=select(val, val_picks, labels),
        classnames=tuple(shards.classnames[label] for label in labels),
        labels=tuple(labels),
        digest=lines_digest(chosen_train.paths),
        picks=chosen_train.paths,
        source=picks.source if picks else "coop-rule",
        seed=picks.seed if picks else seed,
    )


def _positions(split: Split, paths: Sequence[str], picks: FewShotSamples) -> list[int]:
    at = {path: position for position, path in enumerate(split.paths)}
    missing = [path for path in paths if path not in at]
    if missing:
        raise DataError(
            f"the picks {picks.digest} of '{picks.dataset}' name {len(missing)} of {len(paths)} images that are not "
            f"in the packed set, first {missing[0]!r}: import them for the set that is packed now"
        )
    return [at[path] for path in paths]


@dataclass(frozen=True)
class Selection:
    """Images to evaluate on, relabelled 0..C-1 within their classes."""

    images: Split
    classnames: tuple[str, ...]
    labels: tuple[int, ...]


def evaluation_split(shards: ShardSet, classes: str = "all", split: str = "test") -> Selection:
    """A whole split of the chosen classes, in list order; never subsampled.

    Raises DataUsageError when a test-only set is asked for a half (halves are defined by the training list) and where
    there is no image of these classes.
    """
    images = shards.split(split)
    labels = evaluation_labels(shards, classes)
    if not np.isin(images.labels, labels).any():
        raise DataUsageError(f"'{shards.name}' has no image of {classes} classes in its {split} split")
    return Selection(
        select(images, range(len(images)), labels), tuple(shards.classnames[label] for label in labels), tuple(labels)
    )


def evaluation_labels(shards: ShardSet, classes: str = "all") -> list[int]:
    """The labels that `evaluation_split` keeps, without reading an image."""
    if "train" in shards.manifest.splits:
        return class_half(shards.labels("train").tolist(), classes)
    if class_choice(classes) != "all":
        raise DataUsageError(f"'{shards.name}' is a test set without halves: evaluate it on all classes")
    return list(range(len(shards.classnames)))


def select(split: Split, picks: Iterable[int], labels: Sequence[int]) -> Split:
    """The picked images whose label is among `labels`, relabelled by position in it."""
    relabel = {label: new for new, label in enumerate(labels)}
    return split.subset([i for i in picks if int(split.labels[i]) in relabel], relabel)
