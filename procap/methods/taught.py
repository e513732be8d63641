"""What methods with a teacher share: a larger CLIP, or a finished run, whose predictions a training learns from.

Shapes: B images of the global batch, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor

from procap.classifier import Classifier
from procap.clip import CLIP
from procap.errors import UsageError
from procap.methods.data_use import DataUse
from procap.methods.hooks import MakeTeacher
from procap.methods.method import Method
from procap.methods.options import MethodOptions
from procap.parallel import gather_batch
from procap.plan import NO_CHANGE
from procap.teacher import keep_clip, keep_text_bank
from procap.text import LabelSpace
from procap.weights.architectures import model_configs
from procap.weights.loading import file_digest, weights_key


class TaughtOptions(MethodOptions):
    teacher: str = Field(
        "",
        description="backbone:weights, such as ViT-L-14:openai, or the folder of a finished run (beside a backbone of "
        "its name: ./NAME)",
    )


class Taught(Method):
    """What a teacher adds to a method, as a base class before that of the method."""

    uses = DataUse(labelled="none", unlabelled="few-shot", models=("teacher",))
    required_option = "teacher"
    # No larger CLIP knows generated data.
    mini_options: ClassVar[Mapping[str, object]] = {"teacher": "mini"}
    options: TaughtOptions
    teacher_classifier: Classifier | None = None
    _make_teacher: MakeTeacher | None = None

    @classmethod
    def file_digests(cls, options: BaseModel, dataset: str) -> dict[str, str]:
        """Return the SHA-256 of the file of the teacher's weights, or of the checkpoint of a run."""
        assert isinstance(options, TaughtOptions)
        if (folder := cls.teacher_run(options)) and (checkpoint := folder / "checkpoint.safetensors").is_file():
            return {"teacher": hashlib.sha256(checkpoint.read_bytes()).hexdigest()}
        return {"teacher": file_digest(weights_key(*split_teacher(options.teacher)))}

    @classmethod
    def teacher_run(cls, options: BaseModel) -> Path | None:
        """Return the folder that the option `teacher` names if it is that of a run."""
        assert isinstance(options, TaughtOptions)
        folder = Path(options.teacher).expanduser()
        is_run = options.teacher not in model_configs() and (folder / "config.json").is_file()
        return folder if is_run else None

    def set_teacher(self, make: MakeTeacher) -> None:
        """Set what makes the classifier of a teacher that is a run."""
        self._make_teacher = make

    def teacher_scale(self, clip: CLIP) -> Tensor:
        """Return the factor of the cosines of a teacher that is no run: the student's, as in most public code."""
        return self.scale()

    def make_teacher(self, space: LabelSpace) -> Classifier:
        """Make the teacher's classifier of the classes of `space`.

        Raises UsageError for a teacher that reads other images.
        """
        made = self._make_teacher(space) if self._make_teacher else None
        clip = made.clip if made else keep_clip(weights_key(*split_teacher(self.options.teacher)), self.clip.device)
        theirs, ours = ((model.geometry.image_size, model.preparation) for model in (clip, self.clip))
        if (theirs[0], theirs[1].mean, theirs[1].std) != (ours[0], ours[1].mean, ours[1].std):
            raise UsageError(f"{clip.name} reads images of another size or normalisation than {self.clip.name}")
        # After the refusal, because a large teacher takes long for the texts of many classes.
        return made or Classifier(clip, NO_CHANGE, keep_text_bank(clip, space), self.teacher_scale(clip))

    def prepare_training(self) -> None:
        """Make the teacher. Raises UsageError for one that reads other images."""
        super().prepare_training()
        self.teacher_classifier = self.make_teacher(self.space)

    @torch.no_grad()
    def teacher_logits(self, images: Tensor) -> Tensor:
        """Compute the teacher's logits [B, C] of the global batch."""
        if self.teacher_classifier is None:
            self.teacher_classifier = self.make_teacher(self.space)
        return gather_batch(self.group, self.teacher_classifier.logits(self.teacher_classifier.encode(images)))


def divergence(target: Tensor, approximation: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute KL(target || approximation) of logits [B, C] over a temperature T, times T^2, a mean over the images."""
    of, to = ((logits.float() / temperature).log_softmax(dim=1) for logits in (target, approximation))
    return temperature**2 * F.kl_div(to, of, reduction="batchmean", log_target=True)


def split_teacher(name: str) -> tuple[str, str | None]:
    """Split "backbone:weights"; without a colon the weights are the default ones."""
    backbone, _, pretrained = name.partition(":")
    return backbone, pretrained or None
