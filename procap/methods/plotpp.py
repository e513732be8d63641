"""PLOT++: an image under several visual prompts is compared with several texts of a class by optimal transport.

Source: Chen et al. 2023, "PLOT: Prompt Learning with Optimal Transport for Vision-Language Models", and the public code
of PLOT++, its form for a ViT, which reads no patches. Learns 14,336 parameters on ViT-B/16 with texts of 4 vectors.

In the public code the number of rounds of a transport depends on all images of a batch. Here each image has its own, so
that its logits do not depend on others. The two stages are one training, each half of the epochs: the second starts
from the first of its own seed, and its first epoch has the lowest rate instead of a warm-up.

Shapes: B images, C classes, M visual prompts, N texts of a class, P vectors of a text, T token ids per prompt, D text
width, V vision width, E joint embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, HeadClassifier, unit
from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import TRANSFER_TASKS, Method, MethodOptions, Noise, PublicLayout
from procap.methods.mocoop import first_tokens
from procap.methods.prompts import ClassPrompts, context_plan, tokenize_classes, words_of
from procap.parallel import gather_batch
from procap.plan import INPUT, Plan, TokenOp
from procap.prompt_packing import PromptSet
from procap.recipe import Recipe
from procap.text import LabelSpace

VISION, JOINT = 0, 1
"""The stages of a training."""
TEMPERATURE, TOLERANCE, ROUNDS = 0.1, 0.01, 100
"""Of the transport: what divides its costs, the mean change of row factors at which it ends, and its most rounds."""
COMMON = "a photo of a", "this is a photo", "this is picture of", "one picture of a"
SENTENCES: Mapping[str, tuple[str, str, str, str]] = {
    "dtd": ("a photo of a texture", "this is a photo texture", "this is a picture texture",
            "one picture of a texture"),
    "eurosat": ("a centered satellite photo of", "a centered satellite picture of",
                "this is centered satellite photo of", "one centered satellite photo of a"),
    "fgvc-aircraft": ("a photo of an aircraft", "a picture of an aircraft", "this is aircraft picture of",
                      "one picture of an aircraft"),
    "food101": ("a photo of a food", "this is a food photo", "this is food picture of", "one picture of a food"),
    "imagenet": ("a photo of a", "this is a photo", "this is a", "one picture of a"),
    "oxford-flowers": ("a photo of a flower", "one picture of a flower", "this is flower picture of",
                       "one picture of a flower"),
    "oxford-pets": ("a photo of a pet", "one picture of a pet", "this is pet picture of", "one picture of a pet"),
    "ucf101": ("a photo of a person doing", "this is a photo people doing", "this is picture of people doing",
               "one picture of a person doing"),
}  # fmt: skip
"""The public code's sentences before the class name, where they are not the common ones."""


class PLOTPPOptions(MethodOptions):
    texts: int = Field(4, ge=1, le=4, description="texts of a class, each with its own context (N)")
    vision_prompts: int = Field(4, ge=1, description="visual prompts, each with its own pass of an image (M)")
    vision_tokens: int = Field(2, ge=1, description="tokens of a visual prompt")


class PLOTPP(Method):
    """PLOT++ (Chen et al. 2023): visual prompts and texts of a class, compared by optimal transport."""

    Options = PLOTPPOptions
    title = "PLOT++"
    groups = ("prompts", "local")
    mini_lr = 4e-2
    public_layout = PublicLayout(
        "prompt_learner",
        {"context": "prompt_learner.ctx", "vision": "prompt_learner.ctx_vision"},
        # On ImageNet the text encoder is wrapped.
        unused=("text_encoder.module.",),
    )
    cycles = 2
    options: PLOTPPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: PLOTPPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.stage = JOINT
        # Of each sentence as many rows as the first one has words, the end token among them if it has fewer.
        count = len(words_of(self.sentences[0]))
        self.context = nn.Parameter(torch.stack([first_tokens(clip, text, count) for text in self.sentences]))
        shape = options.vision_prompts, options.vision_tokens, clip.geometry.vision_width
        self.vision = nn.Parameter(normal(shape, generator))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The words before the class name in each text, those of the data set trained on."""
        return SENTENCES.get(self.space.dataset, COMMON)[: self.options.texts]

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32, two stages of 200 epochs each (2 and 4 shots: 100; 1 shot and ImageNet: 50)."""
        short = shots == 1 or dataset == "imagenet" or task in TRANSFER_TASKS
        return Recipe(optimizer="sgd", lr=0.002, epochs=100 if short else 200 if 1 < shots < 8 else 400, batch_size=32)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] sentence <class name> . [EOS]" for each sentence, ids [N C, T], sentence by sentence."""
        texts = [f"{sentence} {name}." for sentence in self.sentences for name in space.names()]
        return ClassPrompts(tokenize_classes(self.clip, space.names() * len(self.sentences), texts))

    def stage_starts(self, steps: int) -> tuple[int, ...]:
        return 0, steps // 2

    def begin_stage(self, stage: int) -> None:
        """Train the visual prompts, or the context of the texts as well."""
        self.stage = stage
        self.context.requires_grad_(stage == JOINT)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Build the plans of the first visual prompt and of the first text."""
        return image_plan(self.vision[0]), context_plan(self.context[0])

    def encode_texts(self, prompts: ClassPrompts, encode: Callable[[PromptSet, Plan], Tensor]) -> Tensor:
        """Compute the features [N, C, E] of the texts of each class, not normalised, by an encoder of prompts."""
        # Text by text, because prompts with the same context share the rows up to the name.
        parts, classes = prompts.tokenized, len(prompts.ids) // len(self.context)
        starts = range(0, len(parts), classes)
        pairs = zip(starts, self.context, strict=True)
        return torch.stack([encode(parts.subset(i, i + classes), context_plan(context)) for i, context in pairs])

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy of the transport, in the first stage together with the mean features."""
        image = gather_batch(self.group, encode_images(self.clip, images, [image_plan(each) for each in self.vision]))

        def encode() -> Tensor:
            return self.encode_texts(self.prompts, self._encode_classes)

        # In the first stage nothing of the texts is learned.
        text = encode() if self.context.requires_grad else self.constant("texts", encode)
        return {"ce": F.cross_entropy(transport_logits(image, text, self.scale(), self.stage == VISION), labels)}

    @torch.no_grad()
    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        return TransportClassifier(self, self.encode_texts(self.prompts_of(space), self.clip.encode_text))


class TransportClassifier(HeadClassifier):
    """A classifier by the transport between the features of an image and those of each class.

    image_plan: that of the first visual prompt, under which pictures show the image tower.
    """

    def __init__(self, method: PLOTPP, text: Tensor) -> None:
        self.image_plans = [image_plan(tokens).snapshot() for tokens in method.vision]
        head = partial(transport_logits, text=text, scale=method.scale(), adds_means=method.stage == VISION)
        super().__init__(method.clip, head, text.shape[1], self.image_plans[0])

    def encode(self, images: Tensor) -> Tensor:
        """Compute the features [B, M, E] of images [B, 3, H, W] under each visual prompt."""
        return encode_images(self.clip, images, self.image_plans)


def image_plan(tokens: Tensor) -> Plan:
    """Append tokens [P, V] to the patches."""
    return Plan((TokenOp(INPUT, "append", tokens),))


def encode_images(clip: CLIP, images: Tensor, plans: list[Plan]) -> Tensor:
    """Compute the features [B, M, E] of images under each of M plans, not normalised."""
    return torch.stack([clip.encode_image(images, plan) for plan in plans], dim=1)


def transport_logits(image: Tensor, text: Tensor, scale: Tensor, adds_means: bool) -> Tensor:
    """Compute logits [B, C] of image features [B, M, E] and text features [N, C, E], neither normalised.

    adds_means: add the cosines of the mean image feature and the mean text feature.
    """
    with torch.autocast(image.device.type, enabled=False):
        similarity = torch.einsum("bme,nce->bcmn", unit(image), unit(text))
        logits = (transport_plan(similarity) * similarity).sum(dim=(2, 3))
        if adds_means:
            # The mean comes first, so long features weigh more, as in the public code.
            logits = logits + unit(image.float().mean(dim=1)) @ unit(text.float().mean(dim=0)).t()
        return scale.float() * logits


@torch.no_grad()
def transport_plan(similarity: Tensor) -> Tensor:
    """Compute the entropic transport plans [B, C, M, N] of uniform weights, by Sinkhorn's rounds, without gradient.

    similarity: [B, C, M, N]; the rounds of item b of the first dimension end when the factors of its C M rows change
        little on average, whatever the other items are.
    """
    rows, columns = torch.ones_like(similarity[..., 0]), torch.ones_like(similarity[:, :, 0])
    kernel = ((similarity - 1) / TEMPERATURE).exp()
    ended = torch.zeros_like(similarity[:, :1, :1, 0], dtype=torch.bool)
    # All rounds are run: to look whether all images have ended, the host would wait for the device.
    for _ in range(ROUNDS):
        next_rows = 1 / (similarity.shape[2] * (kernel * columns[:, :, None]).sum(dim=3))
        next_columns = 1 / (similarity.shape[3] * (kernel * next_rows[..., None]).sum(dim=2))
        change = (next_rows - rows).abs().mean(dim=(1, 2), keepdim=True)
        rows, columns = torch.where(ended, rows, next_rows), torch.where(ended, columns, next_columns)
        ended = ended | (change < TOLERANCE)
    return rows[..., None] * columns[:, :, None] * kernel
