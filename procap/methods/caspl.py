"""CasPL: a known method trains beside prompts that have learned a larger CLIP's predictions without labels.

Source: Wu et al. 2024, "Cascade Prompt Learning for Vision-Language Model Adaptation", and its public code. The first
phase, boosting, learns 122,880 parameters on ViT-B/16 with 8 + 8 tokens at depth 12; the second adapts on CoOp (4,096
with 8 tokens), MaPLe (4,776,960 at depth 12) or PromptSRC (122,880 with 8 + 8 at depth 12).

Shapes: B images, C classes, K prompted layers, P prompt tokens, Dt text width, Dv vision width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from procap.classifier import cosine_logits
from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.coop import CONTEXT_NAMES, ContextMethod, ContextOptions
from procap.methods.data_use import DataUse
from procap.methods.ivlp import IVLP_NAMES, DeepPrompts
from procap.methods.maple import MAPLE_NAMES, MaPLe, MaPLeOptions
from procap.methods.method import TRANSFER_TASKS, Method, Noise, PublicLayout, PublishedOptions
from procap.methods.options import PoolOptions
from procap.methods.prompts import (
    PLACEHOLDER,
    ClassPrompts,
    check_blocks,
    deep_plans,
    phrase_context,
    phrase_prefix,
    phrase_prompts,
    phrase_tokens,
    template_prompts,
)
from procap.methods.promptsrc import PromptSRC, PromptSRCOptions
from procap.methods.taught import Taught, TaughtOptions, divergence
from procap.plan import INPUT, Plan, TokenOp
from procap.recipe import Recipe
from procap.text import LabelSpace

PHRASE = "a photo of a"
"""What boosting's text tokens start from if they are at most four."""

BOOSTING_NAMES = {
    "boosting.text": "text_encoder.transformer.resblocks.{}.VPT_shallow_FIRST",
    "boosting.vision": "image_encoder.transformer.resblocks.{}.VPT_shallow_FIRST",
    "boosting.text.0": "prompt_learner_teacher.ctx",
    "boosting.vision.0": "image_encoder.VPT_FIRST",
}


class BoostingOptions(TaughtOptions, PoolOptions):
    """The options of boosting; the published teacher is ViT-L-14:openai, the published images are all."""

    boost_tokens: int = Field(8, ge=1, description="boosting tokens per layer of each tower")
    boost_depth: int = Field(12, ge=1, description="layers with boosting tokens, the input counted")
    boost_temperature: float = Field(1.0, gt=0, description="divides the logits of teacher and student in boosting")


class Boosting(Taught):
    """CasPL's first phase (Wu et al. 2024): deep prompts of both towers learn from a larger CLIP without labels."""

    Options = BoostingOptions
    title = "CasPL boosting"
    groups = ("prompts", "unlabelled")
    learns_unlabelled = True
    mini_lr = 1e-2
    public_layout = PublicLayout("CasPL", BOOSTING_NAMES, unused=("prompt_learner_teacher.ZS_image_encoder_teacher.",))
    options: BoostingOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: BoostingOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.boosting = DeepPrompts(*initial_boosting(clip, options, generator))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.0025, batch 4 (ImageNet: 128), 20 epochs, for every task."""
        return Recipe(optimizer="sgd", lr=0.0025, epochs=20, batch_size=128 if dataset == "imagenet" else 4)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return phrase_prompts(self.clip, space, PHRASE, self.options.boost_tokens)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return deep_plans(self.clip, list(self.boosting.vision), list(self.boosting.text))

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the divergence of teacher and student, a mean over the images; reads no labels."""
        student = cosine_logits(*self.features(images, noise), self.scale())
        return {"kl": divergence(self.teacher_logits(images), student, self.options.boost_temperature)}


def initial_boosting(
    clip: CLIP, options: BoostingOptions, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw the initial text tokens [P, Dt] and vision tokens [P, Dv] of K layers. UsageError for too many layers."""
    check_blocks(clip, clip.geometry.layers, boost_depth=options.boost_depth)
    count, layers, g = options.boost_tokens, range(options.boost_depth), clip.geometry
    text = [normal((count, g.text_width), generator) for _ in layers[1:]]
    vision = [normal((count, g.vision_width), generator) for _ in layers]
    return [phrase_context(clip, PHRASE, count, generator), *text], vision


class FrozenTokens(nn.Module):
    """Tokens of each prompted layer as buffers: saved, but not learned."""

    def __init__(self, levels: Iterable[Tensor]) -> None:
        super().__init__()
        for layer, tokens in enumerate(levels):
            self.register_buffer(str(layer), tokens)


class BoostedOptions(BoostingOptions):
    n_ctx: int = Field(8, ge=1, description="learned tokens per layer; above 4 they start at random")
    ctx_init: str = Field("a photo of a", description="phrase that up to four learned tokens start from")
    boost_lr: float = Field(0.0025, gt=0, description="learning rate of boosting, which has its own recipe")
    boost_epochs: int = Field(20, ge=1, description="epochs of boosting")


class Boosted(Method):
    """What CasPL changes in a prompt method, as a base class before that of the method."""

    uses = DataUse(models=("teacher",))
    groups = ("prompts", "unlabelled")
    changes: ClassVar[tuple[str, ...]] = ("image", "text")
    first_stage = "caspl-boost"
    required_option = "teacher"
    # No larger CLIP knows generated data.
    mini_options: ClassVar[Mapping[str, object]] = {"teacher": "mini", "boost_epochs": 5}
    options: BoostedOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: BoostedOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        text, vision = initial_boosting(clip, options, generator)
        self.boosting = nn.ModuleDict({"text": FrozenTokens(text), "vision": FrozenTokens(vision)})
        # Behind the start token and the words of the method.
        self._start = 1 + len(phrase_tokens(clip, phrase_prefix(options.ctx_init, options.n_ctx)))

    @classmethod
    def first_recipe(cls, recipe: Recipe, options: BaseModel, dataset: str) -> Recipe:
        """Return the recipe of boosting at the rate and length of `options`, whatever the recipe of the method is."""
        assert isinstance(options, BoostedOptions)
        changes = {"lr": options.boost_lr, "epochs": options.boost_epochs, "test_batch_size": recipe.test_batch_size}
        return Boosting.recipe(dataset=dataset).model_copy(update=changes)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] tokens of the method, boosting tokens, <class name> . [EOS]"."""
        words = [phrase_prefix(self.options.ctx_init, self.options.n_ctx)]
        return template_prompts(self.clip, space, " ".join([*words, *[PLACEHOLDER] * self.options.boost_tokens, "{}."]))

    def boosted_layers(self) -> tuple[int, int]:
        """Return how many layers of the text and the vision tower have boosting tokens."""
        return self.options.boost_depth, self.options.boost_depth

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Add the boosting tokens: between words and class name, and between patches and the method's own tokens."""
        image, text = super().plans(prompts, noise)  # type: ignore[safe-super]
        texts, visions = (
            [*self.boosting[tower].buffers()][:layers]
            for tower, layers in zip(("text", "vision"), self.boosted_layers(), strict=True)
        )
        # Appended first at the input, so that the method's tokens come behind them.
        boosting, _ = deep_plans(self.clip, visions, ())
        shift = self.options.boost_tokens
        behind = [replace(op, start=op.start + shift) if op.mode == "replace" else op for op in image.tokens]
        between = [TokenOp(layer or INPUT, "replace", tokens, self._start) for layer, tokens in enumerate(texts)]
        return replace(image, tokens=(*boosting.tokens, *behind)), replace(text, tokens=(*text.tokens, *between))


class CasPLOptions(BoostedOptions, ContextOptions):
    ctx_init: str = Field("", description="words to start from; empty draws N(0, 0.02)")


class CasPL(Boosted, ContextMethod):
    """CasPL (Wu et al. 2024) on CoOp: context words beside prompts that have learned from a larger CLIP."""

    Options = CasPLOptions
    title = "CasPL (CoOp)"
    mini_lr = 2.5e-3
    public_layout = PublicLayout("prompt_learner", {**CONTEXT_NAMES, **BOOSTING_NAMES})
    options: CasPLOptions

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32, 50 epochs; 0.0035, batch 4, 10 epochs when transferring from ImageNet."""
        if task in TRANSFER_TASKS:
            return Recipe(optimizer="sgd", lr=0.0035, epochs=10, batch_size=4)
        return Recipe(optimizer="sgd", lr=0.002, epochs=50, batch_size=32)


class CasPLMaPLeOptions(BoostedOptions, MaPLeOptions):
    depth: int = Field(12, ge=1, description="prompted layers of both towers, the input counted")


class CasPLMaPLe(Boosted, MaPLe):
    """CasPL (Wu et al. 2024) on MaPLe: its prompts beside prompts that have learned from a larger CLIP."""

    Options = CasPLMaPLeOptions
    title = "CasPL (MaPLe)"
    mini_lr = 2.5e-3
    # In place of MaPLe's options for transfer: CasPL trains it at depth 12 for every task.
    published: ClassVar[PublishedOptions] = {}
    public_layout = PublicLayout("MultiModalPromptLearner", {**MAPLE_NAMES, **BOOSTING_NAMES})
    options: CasPLMaPLeOptions


class CasPLPromptSRCOptions(BoostedOptions, PromptSRCOptions):
    vision_tokens: int = Field(8, ge=0, description="vision tokens per layer")
    depth: int = Field(12, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(12, ge=0, description="prompted layers of the vision tower")


class CasPLPromptSRC(Boosted, PromptSRC):
    """CasPL (Wu et al. 2024) on PromptSRC: its prompts beside prompts that have learned from a larger CLIP."""

    Options = CasPLPromptSRCOptions
    title = "CasPL (PromptSRC)"
    mini_lr = 2.5e-3
    public_layout = PublicLayout(
        "VLPromptLearner", {**IVLP_NAMES, **BOOSTING_NAMES}, unused=("prompt_learner.ZS_image_encoder.",)
    )
    options: CasPLPromptSRCOptions

    def boosted_layers(self) -> tuple[int, int]:
        # Only layers with tokens of its own, as in the public code.
        o = self.options
        return min(o.boost_depth, o.depth), min(o.boost_depth, o.vision_depth)
