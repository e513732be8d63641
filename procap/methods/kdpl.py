"""KDPL: a prompt method learns from the predictions of a larger CLIP on its few-shot images, without their labels.

Source: Mistretta et al. 2024, "Improving Zero-shot Generalization of Learned Prompts via Unsupervised Knowledge
Distillation", section 3, and the behaviour of its public code in the form with the training classes' names.

Shapes: B images, C classes, K classes of a step, E joint embedding.
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

from procap.classifier import Classifier, cosine_logits
from procap.errors import UsageError
from procap.methods.coop import ContextMethod, ContextOptions
from procap.methods.data_use import DataUse
from procap.methods.maple import MaPLe, MaPLeOptions
from procap.methods.method import Method, MethodOptions, Noise, PublishedOptions
from procap.parallel import gather_batch
from procap.plan import NO_CHANGE
from procap.recipe import Recipe
from procap.teacher import keep_clip, keep_text_bank
from procap.weights.loading import file_digest, weights_key


class DistilledOptions(MethodOptions):
    """The options of KDPL on any method."""

    teacher: str = Field("", description="backbone:weights (in the paper ViT-H-14-quickgelu:dfn5b) or a run's folder")
    most_classes: int = Field(
        1000, ge=2, description="classes of a step: those with the highest mean probability of the teacher"
    )


class Distilled(Method):
    """What KDPL changes in a prompt method, as a base class before that of the method."""

    uses: ClassVar[DataUse] = DataUse(models=("teacher",))
    required_option = "teacher"
    # No larger CLIP knows generated data.
    mini_options: ClassVar[Mapping[str, object]] = {"teacher": "mini"}
    options: DistilledOptions
    teacher_classifier: Classifier | None = None

    @classmethod
    def file_digests(cls, options: BaseModel, dataset: str) -> dict[str, str]:
        """Return the SHA-256 of the file of the teacher's weights, or of the checkpoint of a run."""
        assert isinstance(options, DistilledOptions)
        checkpoint = Path(options.teacher).expanduser() / "checkpoint.safetensors"
        if checkpoint.is_file():
            return {"teacher": hashlib.sha256(checkpoint.read_bytes()).hexdigest()}
        return {"teacher": file_digest(weights_key(*split_teacher(options.teacher)))}

    @classmethod
    def teacher_run(cls, options: BaseModel) -> Path | None:
        """Return the folder that the option `teacher` names if it is that of a run."""
        assert isinstance(options, DistilledOptions)
        folder = Path(options.teacher).expanduser()
        return folder if (folder / "config.json").is_file() else None

    def set_teacher(self, classifier: Classifier | None) -> None:
        """Set the classifier of a teacher that is a run."""
        self.teacher_classifier = classifier

    def prepare_training(self) -> None:
        """Make the classifier of a teacher that is no run. Raises UsageError for one that reads other images."""
        super().prepare_training()
        teacher, name = self.teacher_classifier, split_teacher(self.options.teacher)
        clip = teacher.clip if teacher else keep_clip(weights_key(*name), self.clip.device)
        theirs, ours = ((model.geometry.image_size, model.preparation) for model in (clip, self.clip))
        if (theirs[0], theirs[1].mean, theirs[1].std) != (ours[0], ours[1].mean, ours[1].std):
            raise UsageError(f"{clip.name} reads images of another size or normalisation than {self.clip.name}")
        # After the refusal, because a large teacher takes long for the texts of many classes.
        if teacher is None:
            # With the scale of the student, as in the public code.
            self.teacher_classifier = Classifier(clip, NO_CHANGE, keep_text_bank(clip, self.space), self.scale())

    @torch.no_grad()
    def teacher_logits(self, images: Tensor) -> Tensor:
        """Compute the teacher's logits [B, C] of the global batch."""
        assert self.teacher_classifier is not None
        return gather_batch(self.group, self.teacher_classifier.logits(self.teacher_classifier.encode(images)))

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute half of both Kullback-Leibler divergences between teacher and student; labels are not read."""
        image, text = self.features(images, noise)
        teacher = self.teacher_logits(images)
        kept = min(self.options.most_classes, teacher.shape[1])
        chosen = teacher.softmax(dim=1).mean(dim=0).topk(kept).indices
        # The softmax is over the chosen classes alone, so their probabilities sum to one.
        student = cosine_logits(image, text[chosen], self.scale()).log_softmax(dim=1)
        target = teacher[:, chosen].log_softmax(dim=1)
        return {
            # KL(teacher || student), then KL(student || teacher); only the student has a gradient.
            "kl_forward": F.kl_div(student, target, reduction="batchmean", log_target=True) / 2,
            "kl_reverse": F.kl_div(target, student, reduction="batchmean", log_target=True) / 2,
        }


def split_teacher(name: str) -> tuple[str, str | None]:
    """Split "backbone:weights"; without a colon the weights are the default ones."""
    backbone, _, pretrained = name.partition(":")
    return backbone, pretrained or None


class KDPLOptions(DistilledOptions, ContextOptions):
    """The options of KDPL on CoOp."""


class KDPL(Distilled, ContextMethod):
    """KDPL (Mistretta et al. 2024) on CoOp: learns from a larger CLIP without labels."""

    Options = KDPLOptions
    title: ClassVar[str] = "KDPL (CoOp)"
    mini_lr: ClassVar[float | None] = 4e-2
    options: KDPLOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32, 50 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=50, batch_size=32)


class KDPLMaPLeOptions(DistilledOptions, MaPLeOptions):
    """The options of KDPL on MaPLe."""


class KDPLMaPLe(Distilled, MaPLe):
    """KDPL (Mistretta et al. 2024) on MaPLe: learns from a larger CLIP without labels."""

    Options = KDPLMaPLeOptions
    title: ClassVar[str] = "KDPL (MaPLe)"
    mini_lr: ClassVar[float | None] = 1e-2
    # In place of MaPLe's options for transfer: KDPL trains MaPLe at depth 9 for every task.
    published: ClassVar[PublishedOptions] = {}
    options: KDPLMaPLeOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, 5 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.0035, epochs=5, batch_size=4)
