"""What a method may define beyond its steps: the course of a training, and protocols that few methods take part in.

Shapes: B images, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from procap.classifier import Classifier
from procap.errors import UsageError
from procap.methods.options import TEMPLATES, MethodOptions
from procap.recipe import Recipe
from procap.text import LabelSpace

MakeTeacher = Callable[[LabelSpace], Classifier | None]
"""Makes the classifier of a teacher of some classes; None if the teacher is no finished run."""


class TrainingImages(Protocol):
    """The training images of a run, by index."""

    labels: Tensor

    def image(self, i: int, generator: torch.Generator) -> Tensor:
        """Return image `i` in a random view [3, H, W], on the CPU."""


class TrainingHooks(nn.Module):
    """What a training calls around its steps; a method overrides what it needs.

    required_option: an option without a default that training needs.
    file_option: an option that names a file that training reads; {dataset} in its path is the data set. If training
        needs it, `templates` stands for hand-written texts, and `./templates` for a file of this name.
    vision_weights: the attribute with its copies of weights of the vision tower, which train at the recipe's
        `vision_lr`; empty without them.
    learns_unlabelled: its training images have no labels, and are those that its option `unlabelled` names.
    varying_rows: names of tensors whose first dimension depends on the training, such as on its number of images.
    cycles: equal parts of a training, in each of which the learning rate per epoch falls.
    training_images: the training images, in training alone.
    """

    Options: ClassVar[type[MethodOptions]]
    required_option: ClassVar[str] = ""
    file_option: ClassVar[str] = ""
    vision_weights: ClassVar[str] = ""
    learns_unlabelled: ClassVar[bool] = False
    varying_rows: ClassVar[tuple[str, ...]] = ()
    cycles: int = 1
    training_images: TrainingImages
    options: BaseModel

    @classmethod
    def unread_fields(cls, options: BaseModel) -> set[str]:
        """Name the fields of a recipe that its training never reads."""
        unread = {"vision_lr": not cls.vision_weights, "batches": cls.learns_unlabelled}
        return {name for name, is_unread in unread.items() if is_unread}

    @classmethod
    def missing_option(cls, options: Mapping[str, Any]) -> str:
        """Name the option that a training needs and that `options` leave empty; empty if nothing is missing."""
        return "" if options.get(cls.required_option) else cls.required_option

    @classmethod
    def file_digests(cls, options: BaseModel, dataset: str) -> dict[str, str]:
        """Return the SHA-256 of each file that training on `dataset` reads, by the option that names the file."""
        file = cls.option_file(options, dataset)
        return {cls.file_option: hashlib.sha256(file.read_bytes()).hexdigest()} if file else {}

    @classmethod
    def option_file(cls, options: BaseModel, dataset: str) -> Path | None:
        """Return the file that `file_option` names; None if it names none."""
        name = getattr(options, cls.file_option, "")
        keyword = TEMPLATES if cls.file_option == cls.required_option else ""
        return None if name in ("", keyword) else Path(name.replace("{dataset}", dataset)).expanduser()

    def prepare_training(self) -> None:
        """Read and compute what only training needs.

        Raises UsageError without the required option, UserError for a file that is missing or does not fit.
        """
        if name := self.missing_option(self.options.model_dump()):
            needed = f"{name}: {self.Options.model_fields[name].description}"
            raise UsageError(f"{type(self).__name__} needs --option {name}=..., which is empty ({needed})")

    def records(self) -> dict[str, dict[str, Any]]:
        """Return documents that a training stores in the folder of its run as JSON, by the name of their file."""
        return {}

    def stage_starts(self, steps: int) -> tuple[int, ...]:
        """Return the first step (0-based) of every stage of a training of `steps` steps; most methods have one stage.

        Each stage has a new optimizer.
        """
        return (0,)

    def begin_stage(self, stage: int) -> None:
        """Prepare `stage` of a training: afterwards exactly what this stage learns requires a gradient.

        A new method is in the last stage, so that loading the weights of a finished training is enough.
        """

    def begin_epoch(self, epoch: int, rate: float, recipe: Recipe) -> bool:
        """Prepare the steps of `epoch` (0-based), also in a resumed run; returns whether their work has changed."""
        return False

    def end_epoch(self, epoch: int, recipe: Recipe) -> None:
        """Change the learned tensors after the last step of `epoch`."""

    def extend_batch(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Add training images to a batch before a step; all ranks call this with equal generators.

        images [B, 3, H, W] and labels [B] are those of `loss`, which gets what is returned.
        """
        return images, labels

    def lr_scales(self) -> dict[str, float]:
        """Return factors on the learning rates of the recipe by the name of a parameter; that of others is 1."""
        return {}

    def adapt_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        """Give each tensor in `varying_rows` as many rows as in `tensors`, so that these can be loaded."""
        state, parameters = self.state_dict(), dict(self.named_parameters())
        for name in tensors.keys() & state.keys() & {*self.varying_rows}:
            # A parameter that fits stays, because an optimizer may hold it.
            if tensors[name].shape[1:] == state[name].shape[1:] and len(tensors[name]) != len(state[name]):
                rows = state[name].new_zeros(tensors[name].shape)
                setattr(self, name, nn.Parameter(rows) if name in parameters else rows)


@runtime_checkable
class GradientRule(Protocol):
    """A method that descends what it makes of the gradients of its loss terms, instead of their sum."""

    def combine_gradients(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the gradient of each parameter from those of each loss term, averaged over all processes.

        Gradients may be multiplied by a common factor (fp16).
        """
        ...


@runtime_checkable
class GaussianMethod(Protocol):
    """A method that has Gaussian tokens under some options, of which inference can draw samples (`--samples`)."""

    @classmethod
    def has_gaussians(cls, options: BaseModel) -> bool: ...


@runtime_checkable
class TaughtMethod(Protocol):
    """A method with a teacher: a finished run, whose folder `teacher_run` returns, or what else its options name.

    set_teacher: called before a training, and with each trained method that is loaded.
    """

    @classmethod
    def teacher_run(cls, options: BaseModel) -> Path | None: ...

    def set_teacher(self, make: MakeTeacher) -> None: ...


@runtime_checkable
class ViewedMethod(Protocol):
    """A method that adapts to each test image by views of it.

    test_views: the number of views of an image of `dataset`, the plain one among them, and whether AugMix changes the
        random ones. Its classifiers have as many `views`.
    """

    def test_views(self, dataset: str) -> tuple[int, bool]: ...


@runtime_checkable
class DiagnosedMethod(Protocol):
    """A method for which `train.json` has the gradient norms of its loss terms by epoch, and what the members return.

    kernels: which of several implementations it uses on its device; empty for one.
    statistics: numbers that describe the learned parameters, by name.
    """

    def kernels(self) -> str: ...

    def statistics(self) -> dict[str, dict[str, float]]: ...
