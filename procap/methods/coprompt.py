"""CoPrompt: MaPLe's prompts and adapters behind both towers, kept consistent with the frozen CLIP on other inputs.

Source: Roy and Etemad 2024, "Consistency-guided Prompt Learning for Vision-Language Models", section 3, and its public
code. Learns 5,014,528 parameters on ViT-B/16 with 4 tokens at depth 12 (5,002,240 with 2; 3,826,432 with 4 at depth 9).

Shapes: B images, C classes, P sentences per class, E joint embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.errors import UserError, describe_invalid
from procap.methods.clipadapter import FeatureAdapter
from procap.methods.data_use import DataUse
from procap.methods.maple import MAPLE_NAMES, MaPLe, MaPLeOptions
from procap.methods.method import Noise, PublicLayout, name_options
from procap.methods.options import TEMPLATES
from procap.methods.zeroshot import ENSEMBLE
from procap.recipe import Recipe
from procap.teacher import sentence_bank
from procap.text import LabelSpace

PUBLISHED = {
    "imagenet": (12, 4, 8.0),
    "caltech101": (12, 4, 4.0),
    "oxford-pets": (12, 2, 0.1),
    "stanford-cars": (12, 4, 4.0),
    "oxford-flowers": (9, 4, 8.0),
    "food101": (9, 4, 0.5),
    "fgvc-aircraft": (9, 4, 2.0),
    "sun397": (12, 4, 8.0),
    "dtd": (12, 2, 8.0),
    "eurosat": (12, 2, 0.1),
    "ucf101": (12, 4, 2.0),
}
"""The published depth, number of tokens and weight of the consistency, by data set; the public code fixes them."""


class CoPromptOptions(MaPLeOptions):
    sentences: str = Field(
        "",
        description="JSON file of sentences by class name, {dataset} in its path is the data set; or templates "
        "(a file: ./templates): hand-written ones; training needs one of the two",
    )
    n_ctx: int = Field(4, ge=1, description="prompt tokens per layer; above 4 the phrase is not used")
    depth: int = Field(12, ge=1, description="prompted layers of both towers, the input counted")
    weight: float = Field(8.0, ge=0, description="weight of both consistency terms (lambda)")
    image_share: float = Field(0.1, ge=0, le=1, description="share of the adapter's output in an image feature")
    text_share: float = Field(0.2, ge=0, le=1, description="share of the adapter's output in a class feature")


class CoPrompt(MaPLe):
    """CoPrompt (Roy and Etemad 2024): MaPLe with adapters, consistent with the frozen CLIP."""

    Options = CoPromptOptions
    title = "CoPrompt"
    uses = DataUse(models=("sentences",))
    mini_lr = 1e-2
    public_layout = PublicLayout(
        "MultiModalPromptLearner",
        MAPLE_NAMES | {"image_adapter": "adapter_image.fc.{}", "text_adapter": "adapter_text.fc.{}"},
        unused=("model_distill.",),
    )
    views = 2
    required_option = "sentences"
    file_option = "sentences"
    # No language model has written sentences about generated data.
    mini_options: ClassVar[Mapping[str, object]] = {"sentences": TEMPLATES}
    published = name_options(("depth", "n_ctx", "weight"), PUBLISHED)
    options: CoPromptOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: CoPromptOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        width = clip.geometry.embed_dim
        self.image_adapter = FeatureAdapter(width, options.image_share, generator)
        self.text_adapter = FeatureAdapter(width, options.text_share, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0035, batch 4, RandAugment; 8 epochs, 5 on Food101.

        The public code has no configuration for other tasks; few-shot learning takes 50 epochs, as for MaPLe.
        """
        epochs = 50 if task == "few-shot" else 5 if dataset == "food101" else 8
        return Recipe(optimizer="sgd", lr=0.0035, epochs=epochs, batch_size=4, augmentation="randaugment")

    def prepare_training(self) -> None:
        super().prepare_training()
        self.bank()

    def bank(self) -> Tensor:
        """Return the frozen features [P, C, E] of the sentences, normalised; read and computed at the first call."""
        file = self.option_file(self.options, self.space.dataset)
        return self.constant("bank", lambda: sentence_bank(self.clip, read_sentences(file, self.space)))

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the number [1] of the sentence of a step, the same for all classes, as in the public code."""
        return (torch.randint(len(self.bank()), (1,), generator=generator),)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy on the first view, and the consistency of class and image features.

        Classes are compared with the sentence in `noise`, images with the frozen features of the second view. A batch
        [B, 3, H, W] with one view of each image has it in both places.
        """
        o = self.options
        first, second = images.unbind(dim=1) if images.dim() == 5 else (images, images)
        image, text = self.features(first, noise)
        teacher_image = self._frozen_features(second)
        # The number [1] of the sentence broadcasts over the classes: [C, E].
        teacher_text = self.bank()[noise[0], torch.arange(text.shape[0], device=text.device)]
        return {
            "ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels),
            "text": o.weight * (1 - F.cosine_similarity(text.float(), teacher_text, eps=1e-7).mean()),
            "image": o.weight * (1 - F.cosine_similarity(image.float(), teacher_image, eps=1e-7).mean()),
        }


def read_sentences(file: Path | None, space: LabelSpace) -> list[list[str]]:
    """Return the sentences of every class of `space`, equally many each; UserError for a file without them.

    None: hand-written templates.
    """
    if file is None:
        return [[template.format(name) for template in (*ENSEMBLE, space.template)] for name in space.names()]
    try:
        by_class = TypeAdapter(dict[str, list[str]]).validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"sentences of coprompt: {file}: {describe_invalid(error)}") from error
    # A class that the file lacks counts as one without sentences, which is refused below.
    sentences = [by_class.get(name, []) for name in space.names()]
    counts = sorted({len(each) for each in sentences})
    if len(counts) > 1 or not counts[0]:
        raise UserError(f"sentences of coprompt: {file} has {counts} of a class: give equally many of each")
    return sentences
