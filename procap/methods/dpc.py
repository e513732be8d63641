"""DPC: a copy of CoOp's trained prompt learns to tell images from hard negatives; new classes have a mix of both.

Source: Li et al. 2025, "DPC: Dual-Prompt Collaboration for Tuning Vision-Language Models", and the behaviour of its
public code on CoOp. Learns 2,048 parameters on ViT-B/16 with 4 tokens, after as many in CoOp's training.

Shapes: B images of a batch, M images with negatives, C classes, P context tokens, D text width.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import Classifier, cosine_logits
from procap.clip import CLIP
from procap.methods.coop import ContextMethod, ContextOptions
from procap.methods.method import Noise
from procap.methods.prompts import context_plan
from procap.parallel import gather_batch
from procap.plan import NO_CHANGE
from procap.recipe import Recipe
from procap.text import LabelSpace

FEWEST_NEGATIVES = 2
"""With fewer similar classes left for an image, further ones are drawn."""


class DPCOptions(ContextOptions):
    similar: int = Field(8, ge=1, description="most similar classes of each image that may become negatives (K)")
    weight: float = Field(
        0.5, gt=0, le=1, description="divides the gradient: all that the public code makes of the weight for base"
    )
    new_weight: float = Field(0.0, ge=0, le=1, description="share of the prompt for new classes, the rest is CoOp's")


class DPC(ContextMethod):
    """DPC (Li et al. 2025) on CoOp: a second prompt learned against hard negatives."""

    Options = DPCOptions
    title = "DPC (CoOp)"
    mini_lr = 1e-2
    # A public checkpoint has one of both prompts.
    public_layout = None
    first_stage = "coop"
    needs_every_class = True
    options: DPCOptions
    tuned: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: DPCOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.register_buffer("tuned", self.context.detach().clone())

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 4 before negatives, 20 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=20, batch_size=4)

    def begin_stage(self, stage: int) -> None:
        """Keep the context that the training starts from, that of a finished run."""
        self.tuned.copy_(self.context.detach())

    def encode_classes(self, context: Tensor, space: LabelSpace | None = None) -> Tensor:
        """Compute the class features [C, E] of `space` (default: the classes trained on) under a context."""
        return self.clip.encode_text(self.prompts_of(space).tokenized, context_plan(context))

    def extend_batch(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Add an image of each class that `negative_classes` chooses; all ranks return all images."""
        pool = self.training_images
        images = gather_batch(self.group, images)
        with torch.no_grad():
            text = self.constant("tuned", lambda: self.encode_classes(self.tuned))
            similarity = cosine_logits(self.clip.encode_image(images), text, self.scale())
        # Python's generator, because `choose_negatives` repeats the draws of the public code.
        draws = random.Random(int(torch.randint(2**62, (), generator=generator)))
        chosen = choose_negatives(similarity, labels.tolist(), pool.labels.tolist(), self.options.similar, draws)
        if not chosen:
            return images, labels
        negatives = torch.stack([pool.image(i, generator) for i in chosen])
        return torch.cat([images, negatives.to(images)]), torch.cat([labels, pool.labels[chosen].to(labels)])

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute both halves of the symmetric cross-entropy between the M images and the texts of their labels."""
        # `extend_batch` has gathered the images, so that every rank encodes all M.
        image = self.clip.encode_image(images)
        text = self._encode_classes(self.prompts.tokenized, self.plans(self.prompts)[1])
        # Images of one class have equal texts and are each other's negatives, as in the public code.
        logits = cosine_logits(image, text[labels], self.scale())
        targets = torch.arange(len(labels), device=labels.device)
        halves = {"ce": F.cross_entropy(logits, targets) / 2, "ce_text": F.cross_entropy(logits.t(), targets) / 2}
        # The public code keeps the tuned prompt in the memory of the trained one, so that their weighted sum is the
        # trained prompt; the weight only divides the gradient.
        return {name: (term - term.detach()) / self.options.weight + term.detach() for name, term in halves.items()}

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        """Make a classifier of the second prompt; with a new class among the names, of the mix for all of them."""
        space, share = space or self.space, self.options.new_weight
        if space.dataset == self.space.dataset and {*space.classnames} <= {*self.space.classnames}:
            return super().classifier(space)
        with torch.no_grad():
            text = self.encode_classes(share * self.context + (1 - share) * self.tuned, space)
            return self.make_classifier(NO_CHANGE, text, space)


def choose_negatives(
    similarity: Tensor, labels: list[int], pool: list[int], similar: int, draws: random.Random
) -> list[int]:
    """Choose images of further classes for a batch: their indices in the labels `pool` of the training images.

    similarity [B, C]. Each image adds those of its `similar` most similar classes that the batch does not have yet. If
    these are fewer than two, classes are drawn, never the first or the last. All draws are those of the public code.
    """
    present, chosen, classes = {*labels}, list[int](), similarity.shape[1]
    for near in similarity.topk(min(similar, classes), dim=1).indices.tolist():
        added = [label for label in near if label not in present]
        present.update(added)
        for _ in range(classes - 2 if len(added) < FEWEST_NEGATIVES else 0):
            # The public code draws before it looks whether another class is needed.
            label = draws.randint(1, classes - 2)
            if len(added) >= FEWEST_NEGATIVES:
                break
            if label not in present:
                added.append(label)
                present.add(label)
        chosen += [draws.choice([i for i, other in enumerate(pool) if other == label]) for label in added]
    return chosen
