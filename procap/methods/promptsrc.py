"""PromptSRC: independent deep prompts under three regularisers from the frozen CLIP, averaged over epochs.

Source: Khattak et al. 2023, "Self-regulating Prompts", section 3.2, and its public code.
Learns 46,080 parameters on ViT-B/16 with 4 + 4 tokens at depth 9. The Gaussian average of the weights is a part of the
recipe (`Recipe.average`).

Shapes: B images, C classes, E joint embedding.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import cosine_logits, unit
from procap.methods.ivlp import IVLP, IVLP_NAMES, IVLPOptions
from procap.methods.method import MethodOptions, Noise, PublicLayout, PublishedOptions
from procap.recipe import Recipe
from procap.teacher import text_bank

NUM_TEMPLATES = 60

LATE_AVERAGE = ("stanford-cars", "oxford-flowers", "fgvc-aircraft", "dtd", "eurosat")
"""Few-shot learning on these averages around epoch 45, on the other data sets around epoch 30."""


def teacher_templates() -> list[str]:
    """Return the 60 templates of the text teacher: CLIP's ImageNet list up to number 60, with number 40 first."""
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    templates = [template("{}") for template in OPENAI_IMAGENET_TEMPLATES[:NUM_TEMPLATES]]
    # PromptSRC's own list begins with "a photo of a {}."; the order changes no more than the rounding of the mean.
    return [templates.pop(39), *templates]


class PromptSRCOptions(IVLPOptions):
    n_ctx: int = Field(4, ge=1, description="text tokens per layer; above 4 the phrase is not used")
    vision_tokens: int = Field(4, ge=0, description="vision tokens per layer")
    depth: int = Field(9, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(9, ge=0, description="prompted layers of the vision tower")
    text_weight: float = Field(25.0, ge=0, description="weight of the L1 distance of the class features")
    image_weight: float = Field(10.0, ge=0, description="weight of the L1 distance of the image features")
    logit_weight: float = Field(1.0, ge=0, description="weight of the KL divergence of the predictions")


class PromptSRC(IVLP):
    """PromptSRC (Khattak et al. 2023): deep prompts regularised by the frozen CLIP."""

    Options: ClassVar[type[MethodOptions]] = PromptSRCOptions
    title = "PromptSRC"
    mini_lr = 1e-2
    public_layout = PublicLayout("VLPromptLearner", IVLP_NAMES, unused=("prompt_learner.ZS_image_encoder.",))
    published: ClassVar[PublishedOptions] = {"transfer": {"depth": 3, "vision_depth": 3}}
    options: PromptSRCOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0025, batch 4; 20 epochs averaged around 15 (transfer: 6), few-shot 50 around 30 or 45."""
        epochs, average = 20, (15.0, 1.0)
        if task == "few-shot":
            epochs, average = 50, (45.0, 5.0) if dataset in LATE_AVERAGE else (30.0, 30.0)
        elif task != "base-to-novel":
            average = (6.0, 10.0)
        return Recipe(optimizer="sgd", lr=0.0025, epochs=epochs, batch_size=4, average=average)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy and the distances to the frozen CLIP: class features, image features, logits.

        The KL divergence is divided by B x C, as in the public code.
        """
        o = self.options
        image, text = self.features(images, noise)
        # The mean over the templates, normalised at the end.
        teacher_text = self.constant(
            "teacher", lambda: text_bank(self.clip, self.space, teacher_templates(), average="average-first")
        )
        # The teacher sees the same views as the student, so its features cannot be kept.
        teacher_image = self._frozen_features(images)
        logits = cosine_logits(image, text, self.scale())
        teacher_logits = cosine_logits(teacher_image, teacher_text, self.scale())
        # KL(teacher || student): `kl_div` takes the student first.
        kl = F.kl_div(logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="sum", log_target=True)
        return {
            "ce": F.cross_entropy(logits, labels),
            "text": o.text_weight * F.l1_loss(unit(text), teacher_text),
            "image": o.image_weight * F.l1_loss(unit(image), teacher_image),
            "kl": o.logit_weight * kl / logits.numel(),
        }
