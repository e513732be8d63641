"""Select images exactly as CoOp does: halves of the classes, few-shot samples, all images of a target.

Samples are drawn over all classes; a run on one half of the classes uses those of its classes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from procap.errors import UsageError, unknown_name
from shards.manifest import lines_digest
from shards.reader import ImageList, PackedDataset
from shards.uneven_samples import BALANCED, Labels, draw_uneven, first_images

Classes = Literal["all", "base", "novel", "dev-base", "dev-novel"]
"""Which classes of a data set: all, one of its halves, or one of the halves of the base half.

With the development halves a method is chosen by its accuracy on classes it was not trained on, without the novel ones.
"""

CLASS_CHOICES: tuple[Classes, ...] = get_args(Classes)
Pool = Literal["few-shot", "base", "all"]
"""Where a training draws images without labels from, see `select_unlabelled`."""
VAL_SHOTS = 4


@dataclass(frozen=True)
class UnlabelledImages:
    """Images to train on without their labels: all are -1.

    class_labels: the data set's own labels of the classes among them. digest: that of their paths, in order.
    """

    pool: Pool
    images: ImageList
    class_labels: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class TrainingSelection:
    """The images a run trains on, relabelled 0..C-1 within its C classes; `class_labels` [C] are those in the data set.

    An uneven sample may have no image of a class. digest: that of the training paths in drawn order. unlabelled: what
    the run trains on instead of `train` if it reads no labels.
    """

    train: ImageList
    val: ImageList
    classnames: tuple[str, ...]
    class_labels: tuple[int, ...]
    digest: str
    unlabelled: UnlabelledImages | None = None

    def without_fold(self, fold: str) -> TrainingSelection:
        """Leave the images of a fold out, see `split_fold`."""
        train = split_fold(self.train, fold)[0]
        return replace(self, train=train, digest=lines_digest(train.paths))


@dataclass(frozen=True)
class TargetImages:
    """Images to evaluate on, relabelled 0..C-1 within their C classes; `class_labels` [C] are those in the data set."""

    images: ImageList
    classnames: tuple[str, ...]
    class_labels: tuple[int, ...]


def parse_classes(name: str) -> Classes:
    """Parse a choice of classes, one of `CLASS_CHOICES`, or CoOp's word `new`. Raises UsageError otherwise."""
    choices: dict[str, Classes] = {choice: choice for choice in CLASS_CHOICES} | {"new": "novel"}
    if name not in choices:
        raise unknown_name("choice of classes", name, choices, known=CLASS_CHOICES)
    return choices[name]


def select_labels(labels_present: Iterable[int], classes: str) -> list[int]:
    """Return the labels of the chosen classes in ascending order.

    base is the first ceil(n / 2) of the labels present, novel the rest; dev-base and dev-novel divide base likewise.
    """
    labels = sorted({int(label) for label in labels_present})
    choice = parse_classes(classes)
    if choice == "all":
        return labels
    development, _, half = choice.rpartition("-")
    if development:
        labels = labels[: (len(labels) + 1) // 2]
    middle = (len(labels) + 1) // 2
    return labels[:middle] if half == "base" else labels[middle:]


def draw_positions(train_labels: Labels, val_labels: Labels, shots: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw the positions of the few-shot samples in the train and the val list, in drawn order.

    CoOp's rule: classes in order of first appearance, `random.sample` inside each (all of a class that has fewer than
    `shots`); then min(shots, 4) per class of val from the same random stream. It always runs over all classes, before
    any of them are selected. `shots` 0 means every image.
    """
    if shots == 0:
        return list(range(len(train_labels))), list(range(len(val_labels)))
    # One stream for train and then val, as in CoOp: the validation images depend on the draws before.
    rng = random.Random(seed)
    drawn: tuple[list[int], list[int]] = [], []
    for labels, count, chosen in zip((train_labels, val_labels), (shots, min(shots, VAL_SHOTS)), drawn, strict=True):
        by_class: dict[int, list[int]] = {}
        for position, label in enumerate(labels):
            by_class.setdefault(int(label), []).append(position)
        for positions in by_class.values():
            chosen += rng.sample(positions, count) if len(positions) >= count else positions
    return drawn


def check_few_shot(dataset: PackedDataset, shots: int, classes: str = "all", sampling: str = BALANCED) -> None:
    """Raise UsageError for a test-only set, fewer than two chosen classes, and more shots than these have."""
    if "train" not in dataset.manifest.splits:
        raise UsageError(f"'{dataset.name}' is a test set: it has no images to train on")
    counts = np.bincount(dataset.labels("train"))
    labels = select_labels(np.flatnonzero(counts), classes)
    if len(labels) < 2:
        has = f"one class ('{dataset.classnames[labels[0]]}')" if labels else "no class"
        half = f" in its {classes} half, use --classes all" if classes != "all" and len(dataset.classnames) > 1 else ""
        raise UsageError(f"'{dataset.name}' has {has}{half}: there is nothing to tell apart")
    total, largest = int(counts[labels].sum()), int(counts[labels].max())
    if shots > largest:
        half = "class" if classes == "all" else f"{classes} class"
        has = f"the largest {half} of '{dataset.name}' has {largest} training images"
        raise UsageError(f"--shots {shots}: {has}; give --shots {largest} or fewer, or full")
    if sampling != BALANCED and not 0 < shots * len(labels) <= total:
        has = f"'{dataset.name}' has {total} training images in {len(labels)} classes"
        raise UsageError(f"--sampling {sampling} with --shots {shots or 'full'}: {has}; give fewer shots")


def select_training_images(
    dataset: PackedDataset, shots: int, seed: int, classes: str = "all", sampling: str = BALANCED
) -> TrainingSelection:
    """Select the images a run trains on, drawn by CoOp's rule; `shots` 0 takes all of train and val.

    A class with fewer images than `shots` gives all it has, as in CoOp. Few images lie anywhere in the shards, so only
    all of them can be streamed. sampling: an uneven sample has no more validation images of a class than training ones.
    """
    check_few_shot(dataset, shots, classes, sampling)
    train = dataset.open_images("train", sequential=not shots)
    val = dataset.open_images("val", sequential=not shots) if "val" in dataset.manifest.splits else train.subset([])
    in_train, in_val = draw_positions(train.labels, val.labels, shots, seed)
    # CoOp takes the halves of the labels among its drawn training images.
    labels = select_labels(train.labels[in_train], classes)
    if sampling != BALANCED:
        in_train = draw_uneven(sampling, train.labels, in_train, labels, shots, seed)
        in_val = first_images(in_val, val.labels, Counter(train.labels[in_train].tolist()))
    chosen = select_images(train, in_train, labels)
    return TrainingSelection(
        train=chosen,
        val=select_images(val, in_val, labels),
        classnames=tuple(dataset.classnames[label] for label in labels),
        class_labels=tuple(labels),
        digest=lines_digest(chosen.paths),
    )


def select_unlabelled(
    dataset: PackedDataset, selection: TrainingSelection, pool: Pool, classes: str = "all"
) -> UnlabelledImages:
    """Select the images that a run on `classes` trains on without labels: `selection`, or all training images in order.

    pool: "few-shot"; "base": all of the chosen classes; "all": of every class, but for half of the base classes, with
    which a method is chosen, of the base classes alone.
    """
    images, labels = selection.train, [*selection.class_labels]
    if pool != "few-shot":
        whole = "base" if classes.startswith("dev-") else "all"
        labels = select_class_labels(dataset, classes if pool == "base" else whole)
        train = dataset.open_images("train", sequential=True)
        images = train.subset(np.flatnonzero(np.isin(train.labels, labels)))
    hidden = images.subset(range(len(images)), dict.fromkeys(images.labels.tolist(), -1))
    return UnlabelledImages(pool, hidden, tuple(labels), lines_digest(images.paths))


def split_fold(images: ImageList, fold: str) -> tuple[ImageList, ImageList]:
    """Split images into those to train on and those of fold K of F, given as "K/F": every F-th of each class from K on.

    The only image of a class is trained on.
    """
    number, folds = map(int, fold.split("/"))
    places = [np.flatnonzero(images.labels == label) for label in np.unique(images.labels)]
    held_out = sorted(int(i) for of_class in places if len(of_class) > 1 for i in of_class[number - 1 :: folds])
    trained = np.setdiff1d(np.arange(len(images)), held_out)
    return images.subset(trained.tolist()), images.subset(held_out)


def select_target_images(dataset: PackedDataset, classes: str = "all", split: str = "test") -> TargetImages:
    """Select all images of a target in list order. Raises UsageError if there is none, and for half of a test set."""
    images = dataset.open_images(split, sequential=True)
    labels = select_class_labels(dataset, classes)
    if not np.isin(images.labels, labels).any():
        raise UsageError(f"'{dataset.name}' has no image of {classes} classes in its {split} split")
    classnames = tuple(dataset.classnames[label] for label in labels)
    return TargetImages(select_images(images, range(len(images)), labels), classnames, tuple(labels))


def select_class_labels(dataset: PackedDataset, classes: str = "all") -> list[int]:
    """Return the labels of the chosen classes of a packed data set, without reading an image."""
    if "train" in dataset.manifest.splits:
        return select_labels(dataset.labels("train").tolist(), classes)
    if parse_classes(classes) != "all":
        raise UsageError(f"'{dataset.name}' is a test set without halves: evaluate it on all classes")
    return list(range(len(dataset.classnames)))


def select_images(images: ImageList, indices: Iterable[int], labels: Sequence[int]) -> ImageList:
    """Select those of the images at `indices` with one of `labels`, relabelled by the place of the label in it."""
    relabel = {label: new for new, label in enumerate(labels)}
    return images.subset([i for i in indices if int(images.labels[i]) in relabel], relabel)
