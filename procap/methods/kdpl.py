"""KDPL: a prompt method learns from the predictions of a larger CLIP on its few-shot images, without their labels.

Source: Mistretta et al. 2024, "Improving Zero-shot Generalization of Learned Prompts via Unsupervised Knowledge
Distillation", section 3, and the behaviour of its public code in the form with the training classes' names.

Shapes: C classes.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from procap.classifier import cosine_logits
from procap.methods.coop import ContextMethod, ContextOptions
from procap.methods.maple import MaPLe, MaPLeOptions
from procap.methods.method import Noise, PublishedOptions
from procap.methods.taught import Taught, TaughtOptions, divergence
from procap.recipe import Recipe


class DistilledOptions(TaughtOptions):
    """The options of KDPL on any method; the teacher of the paper is ViT-H-14-quickgelu:dfn5b."""

    most_classes: int = Field(
        1000, ge=2, description="classes of a step: those with the highest mean probability of the teacher"
    )


class Distilled(Taught):
    """What KDPL changes in a prompt method, as a base class before that of the method."""

    options: DistilledOptions

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute half of both Kullback-Leibler divergences between teacher and student; labels are not read."""
        image, text = self.features(images, noise)
        teacher = self.teacher_logits(images)
        kept = min(self.options.most_classes, teacher.shape[1])
        chosen = teacher.softmax(dim=1).mean(dim=0).topk(kept).indices
        # The softmax is over the chosen classes alone, so their probabilities sum to one.
        teacher, student = teacher[:, chosen], cosine_logits(image, text[chosen], self.scale())
        # Only the student has a gradient.
        return {"kl_forward": divergence(teacher, student) / 2, "kl_reverse": divergence(student, teacher) / 2}


class KDPLOptions(DistilledOptions, ContextOptions):
    """The options of KDPL on CoOp."""


class KDPL(Distilled, ContextMethod):
    """KDPL (Mistretta et al. 2024) on CoOp: learns from a larger CLIP without labels."""

    Options = KDPLOptions
    title = "KDPL (CoOp)"
    mini_lr = 4e-2
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
    title = "KDPL (MaPLe)"
    mini_lr = 1e-2
    # In place of MaPLe's options for transfer: KDPL trains MaPLe at depth 9 for every task.
    published: ClassVar[PublishedOptions] = {}
    options: KDPLMaPLeOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, 5 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.0035, epochs=5, batch_size=4)
