"""ProCAP: Gaussian prompt tokens of both modalities, refined by cross-attention between them, level by level.

Source: Abbas, Daneshfar, Abdar, "ProCAP" (TMLR preprint, 2026), its method section and Algorithm 1. Where the paper is
silent or contradicts itself, an option names the reading (docs/paper.md).
Learns 22,497,025 parameters on ViT-B/16 with 4 tokens at depth 9: 10,240 of the Gaussians, 393,728 of W_p, 21,305,088
of cross-attention, 787,969 of the InfoNCE heads and their temperature.

Shapes: B images, C classes, P prompt tokens, K prompted layers (levels), S token sets (1, or K when independent),
D width (Dt text, Dv vision), E joint embedding, H InfoNCE width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from procap.classifier import cosine_logits, unit
from procap.clip import CLIP
from procap.compiled import compiled_level
from procap.cross_attention import CrossAttention, refine_level
from procap.initialisation import linear, normal
from procap.losses import info_nce, kl_to_standard_normal, l2
from procap.methods.method import Method, MethodOptions, Noise
from procap.methods.prompts import PLACEHOLDER, ClassPrompts, check_blocks, deep_plans, phrase_tokens, tokenize_classes
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

PROCAP_RECIPE = Recipe(
    optimizer="adamw",
    lr=2.5e-4,
    weight_decay=0.03,
    epochs=50,
    batch_size=32,
    warmup="linear",
    warmup_epochs=3,
    crop_scale=(0.8, 1.0),
)
"""The paper's training recipe for every data set but EuroSAT, which adds colour jitter and rotations."""

EUROSAT_JITTER, EUROSAT_ROTATION = 0.2, 10.0
"""Our values for the paper's "mild colour jitter and small rotations" (strength, degrees)."""


LETTER = {
    "class_prompt": "template",
    "norm": "post",
    "inject": "final",
    "shared_attention": True,
    "learn_logit_scale": True,
}
"""The options of section 3.2 to the letter, where the defaults follow the other passages and MaPLe's code."""


class ProCAPOptions(MethodOptions):
    n_ctx: int = Field(4, ge=1, description="prompt tokens per layer and modality")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")

    cross_attention: bool = Field(True, description="refine tokens across modalities; off: they go in as they are")
    gaussian: bool = Field(True, description="tokens are Gaussian; off: deterministic tokens, and no KL term")
    kl: bool = Field(True, description="pull the Gaussians towards the standard normal")
    l2: bool = Field(True, description="penalise the squared means")
    infonce: bool = Field(True, description="symmetric contrastive term on projected features")

    kl_weight: float = Field(1e-5, ge=0, description="beta")
    l2_weight: float = Field(1e-6, ge=0, description="gamma")
    nce_weight: float = Field(0.01, ge=0, description="lambda")
    nce_temperature: float = Field(0.07, gt=0, description="initial tau_p; learned as a logarithm")
    nce_width: int = Field(256, ge=1, description="output width of the InfoNCE heads")
    learn_logit_scale: bool = Field(False, description="learn CLIP's temperature, in training and test")

    logvar_init: float = Field(-9.0, description="initial log-variance: sigma about 0.011, as large as word embeddings")
    logvar_min: float = Field(-12.0, description="lower clamp a of the log-variance")
    logvar_max: float = Field(2.0, description="upper clamp b of the log-variance")
    logvar_lr_scale: float = Field(
        1.0, ge=0, description="factor on the learning rate of the log-variances; 0 keeps their initial value"
    )

    template_init_combine: Literal["mean", "first"] = Field(
        "mean", description="of several templates: text tokens start at the mean of their words, or at the first one's"
    )
    init_std: float = Field(0.02, gt=0, description="text tokens beyond the template's words, and further token sets")
    class_prompt: Literal["phrase", "maple", "template"] = Field(
        "phrase",
        description="phrase: the first template; learned tokens replace its first n_ctx, as in MaPLe's code; "
        "maple: learned tokens only before the class name, so a longer template loses words; "
        "template: learned tokens, then the whole first template",
    )

    deep_tokens: Literal["refined", "independent"] = Field(
        "refined", description="one token set refined level by level, or a set per level, each refined once"
    )
    inject: Literal["levels", "final"] = Field(
        "levels",
        description="where refined tokens enter: those of level l at layer l, or those of the last level at the input",
    )
    shared_attention: bool = Field(False, description="one attention block per direction for all levels")
    heads: int = Field(8, ge=1, description="attention heads, in both directions")
    head_width: int = Field(64, ge=1, description="width of one head")
    norm: Literal["pre", "post", "none"] = Field("pre", description="place of the LayerNorms in the residual update")
    zero_output: bool = Field(
        True, description="output projections start at zero, so refinement changes no token at first"
    )
    # Not part of a configuration, which has the options that it stands for.
    reading: Literal["default", "letter"] = Field(
        "default", exclude=True, description=f"letter: section 3.2 of the paper, word for word, which is {LETTER}"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_reading(cls, options: Mapping[str, object]) -> Mapping[str, object]:
        # Options that are given take precedence, so a single one of the letter can be left out.
        return {**LETTER, **options} if options.get("reading") == "letter" else options

    @model_validator(mode="after")
    def _clamp_holds(self) -> ProCAPOptions:
        if not self.logvar_min <= self.logvar_init <= self.logvar_max:
            raise ValueError(
                f"logvar_init = {self.logvar_init} is outside its clamp: give {self.logvar_min} to {self.logvar_max}"
            )
        return self

    @model_validator(mode="after")
    def _all_token_sets_enter(self) -> ProCAPOptions:
        if self.inject != "levels" and self.deep_tokens == "independent":
            raise ValueError(
                "inject = final takes the last level's tokens, but with deep_tokens = independent each level "
                "has its own: give inject = levels or deep_tokens = refined"
            )
        return self


class ProCAP(Method):
    """ProCAP (Abbas et al. 2026): Gaussian prompts refined across modalities.

    Every ablation removes its own parameters and terms and leaves the initial values of the rest as they are. Without
    cross-attention nothing turns one level's tokens into the next one's: "refined" then puts the same set into every
    layer, "independent" each layer's own. With every component off and independent tokens this is deep prompting of
    both towers in MaPLe's slots; MaPLe itself under this recipe is the method `maple` with the recipe "procap".
    """

    Options = ProCAPOptions
    title = "ProCAP"
    groups = ("prompts", "probabilistic")
    mini_lr = 3.90625e-5
    options: ProCAPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: ProCAPOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        g, o = clip.geometry, options
        # A random stream per component, so that switching one off does not change the draws of the others.
        seeds = torch.randint(2**62, (3,), generator=generator).tolist()
        tokens, attention, heads = (torch.Generator().manual_seed(seed) for seed in seeds)

        sets = o.depth if o.deep_tokens == "independent" else 1
        # The order of draws is part of a seed's meaning: text before vision here; W_p, MHA_v, then MHA_t below.
        text = [self._template_tokens(tokens), *(self._text_normal(tokens) for _ in range(sets - 1))]
        self.text_mu = nn.Parameter(torch.stack(text))
        self.vision_mu = nn.Parameter(normal((sets, o.n_ctx, g.vision_width), tokens))
        if o.gaussian:
            self.text_logvar = nn.Parameter(torch.full_like(self.text_mu, o.logvar_init))
            self.vision_logvar = nn.Parameter(torch.full_like(self.vision_mu, o.logvar_init))
        if o.cross_attention:
            self.vision_to_text = linear(g.vision_width, g.text_width, attention)
            # Dq and Dk: MHA_v attends to text tokens as they are, MHA_t to W_p V, which has the width of the text.
            widths = (g.vision_width, g.text_width), (g.text_width, g.text_width)
            self.vision_attention, self.text_attention = (
                nn.ModuleList(
                    CrossAttention(
                        *pair, attention, heads=o.heads, head_width=o.head_width, norm=o.norm, zero_output=o.zero_output
                    )
                    for _ in range(1 if o.shared_attention else o.depth)
                )
                for pair in widths
            )
        if o.infonce:
            self.image_head = contrastive_head(g.embed_dim, o.nce_width, heads)
            self.text_head = contrastive_head(g.embed_dim, o.nce_width, heads)
            # As a logarithm, so that no step makes tau_p negative.
            self.log_temperature = nn.Parameter(torch.tensor(math.log(o.nce_temperature)))
        if o.learn_logit_scale:
            self.logit_scale = nn.Parameter(clip.logit_scale.detach().clone())

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 2.5e-4, batch 32, 50 epochs, for every task; EuroSAT adds mild colour jitter and rotations."""
        if dataset == "eurosat":
            return PROCAP_RECIPE.model_copy(update={"colour_jitter": EUROSAT_JITTER, "rotation": EUROSAT_ROTATION})
        return PROCAP_RECIPE

    @classmethod
    def has_gaussians(cls, options: BaseModel) -> bool:
        return isinstance(options, ProCAPOptions) and options.gaussian

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] n_ctx learned tokens, fixed words, class name, words after it . [EOS]".

        A learned token replaces a word of the template or a placeholder. On another data set the fixed words that
        continue the learned tokens stay those of the training set's template, since the tokens stand for its beginning;
        the words after the class name are those of its own template.
        """
        template = space.templates[0]
        elsewhere = space.dataset != self.space.dataset
        before = self.space.templates[0] if elsewhere and self.options.class_prompt == "phrase" else template
        prefix, after = self._prefix(before), template.partition("{}")[2]
        texts = [f"{prefix} {name}{after}." for name in space.names()]
        return ClassPrompts(tokenize_classes(self.clip, space.names(), texts))

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw standard normal values for the vision and the text token sets, [S, P, D] each."""
        if not self.options.gaussian:
            return ()
        return tuple(torch.randn(mu.shape, generator=generator) for mu in (self.vision_mu, self.text_mu))

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Put the tokens of level l, [P, Dv] and [P, Dt], into layer l, or those of level K at the input."""
        vision, text = self.refine(*self.tokens(noise))
        # Line 15 of Algorithm 1 to the letter: E_I(x; V_D) and E_T(k; T_D).
        if self.options.inject == "final":
            vision, text = vision[-1:], text[-1:]
        return deep_plans(self.clip, vision, text)

    def tokens(self, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """Return vision and text token sets [S, P, D]: samples made with `noise`, or the means if it is None."""
        if noise is None or not self.options.gaussian:
            return self.vision_mu, self.text_mu
        # Equation 2; lines 6 to 8 of Algorithm 1.
        vision, text = noise
        return (
            sample(self.vision_mu, self._clamped(self.vision_logvar), vision),
            sample(self.text_mu, self._clamped(self.text_logvar), text),
        )

    def refine(self, vision: Tensor, text: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the tokens [P, Dv] and [P, Dt] of each of the K prompted layers from the token sets [S, P, D]."""
        independent = self.options.deep_tokens == "independent"
        # V_0 and T_0 enter no layer: Algorithm 1 counts D levels after them, and D layers are prompted.
        v, t = vision[0], text[0]
        next_level = compiled_level() if self.clip.fused_kernels else refine_level
        levels = []
        for level in range(self.options.depth):
            if independent:
                v, t = vision[level], text[level]
            if self.options.cross_attention:
                block = 0 if self.options.shared_attention else level
                # One assignment: both directions read the previous level, not the other's update of this level.
                v, t = next_level(v, t, self.vision_to_text, self.vision_attention[block], self.text_attention[block])
            levels.append((v, t))
        return [v for v, _ in levels], [t for _, t in levels]

    def kernels(self) -> str:
        """Return how the cross-attention is computed, fused or eager; empty without one."""
        if not self.options.cross_attention:
            return ""
        return "fused" if self.clip.fused_kernels else "eager"

    def scale(self) -> Tensor:
        return self.logit_scale.exp() if self.options.learn_logit_scale else super().scale()

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute L_CE + lambda L_NCE + beta L_KL + gamma L_2: terms already weighted, absent if switched off."""
        o = self.options
        # One sample of the tokens for all images of a batch: the text is encoded once.
        image, text = self.features(images, noise)
        # Equation 1, line 16 of Algorithm 1: the scale is 1 / tau.
        terms = {"ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels)}
        if o.infonce:
            # Equations 5 and 6, line 17: the heads read features that are not normalised.
            z, c = unit(self.image_head(image)), unit(self.text_head(text))
            terms["nce"] = o.nce_weight * info_nce(z, c, labels, self.log_temperature)
        # Equations 3 and 4: every rank computes them whole and gradients are averaged, so that they count once.
        if o.gaussian and o.kl:
            kl = kl_to_standard_normal(self.vision_mu, self._clamped(self.vision_logvar))
            terms["kl"] = o.kl_weight * (kl + kl_to_standard_normal(self.text_mu, self._clamped(self.text_logvar)))
        if o.l2:
            terms["l2"] = o.l2_weight * (l2(self.vision_mu) + l2(self.text_mu))
        return terms

    def lr_scales(self) -> dict[str, float]:
        return dict.fromkeys(self._logvars(), self.options.logvar_lr_scale)

    @torch.no_grad()
    def statistics(self) -> dict[str, dict[str, float]]:
        """Describe the variances, the refined tokens and the temperature tau_p.

        sigma of text, vision: median and range, and how far it moved from its initial value as a share of that;
            "sigma of text level 1" of several token sets.
        tokens of text, vision: mean norm of the means mu, and of the tokens of every level, "level 9".
        """
        statistics = {"tau_p": {"value": float(self.log_temperature.exp())}} if self.options.infonce else {}
        means = {"vision": self.vision_mu, "text": self.text_mu}
        for (modality, mu), levels in zip(means.items(), self.refine(*means.values()), strict=True):
            norms = {f"level {level}": float(rows.norm(dim=-1).mean()) for level, rows in enumerate(levels, 1)}
            statistics[f"tokens of {modality}"] = {"means": float(mu.norm(dim=-1).mean()), **norms}
        for name, logvar in self._logvars().items():
            for level, level_logvar in enumerate(logvar.double(), 1):
                sigma = (self._clamped(level_logvar) / 2).exp()
                moved = (sigma / math.exp(self.options.logvar_init / 2) - 1).abs()
                tokens = f"sigma of {name.removesuffix('_logvar')}" + (f" level {level}" if len(logvar) > 1 else "")
                statistics[tokens] = {
                    "median": float(sigma.median()),
                    "min": float(sigma.min()),
                    "max": float(sigma.max()),
                    "moved_median": float(moved.median()),
                    "moved_max": float(moved.max()),
                }
        return statistics

    def _logvars(self) -> dict[str, nn.Parameter]:
        return {"vision_logvar": self.vision_logvar, "text_logvar": self.text_logvar} if self.options.gaussian else {}

    def _clamped(self, logvar: Tensor) -> Tensor:
        # Line 7 of Algorithm 1 without its assignment: beyond the bounds a parameter has no gradient, but decays.
        return logvar.clamp(self.options.logvar_min, self.options.logvar_max)

    def _prefix(self, template: str) -> str:
        """Return the words before a class name: n_ctx tokens, which learned ones replace, and then the fixed words."""
        words = template.partition("{}")[0].strip()
        if self.options.class_prompt == "phrase":
            # Negative, and so without effect, for a longer template, whose later words stay as they are.
            missing = self.options.n_ctx - len(phrase_tokens(self.clip, words))
            return " ".join([words, *[PLACEHOLDER] * missing])
        free = " ".join([PLACEHOLDER] * self.options.n_ctx)
        return free if self.options.class_prompt == "maple" else f"{free} {words}"

    def _template_tokens(self, generator: torch.Generator) -> Tensor:
        """Initialise text tokens [P, Dt] from the words before the class name; further positions are random."""
        starts = []
        for template in self.space.templates:
            # Every position is drawn, so that later draws do not depend on the length of a template.
            start = self._text_normal(generator)
            words = phrase_tokens(self.clip, template.partition("{}")[0]).cpu()[: len(start)]
            start[: len(words)] = words
            starts.append(start)
        return torch.stack(starts).mean(dim=0) if self.options.template_init_combine == "mean" else starts[0]

    def _text_normal(self, generator: torch.Generator) -> Tensor:
        return normal((self.options.n_ctx, self.clip.geometry.text_width), generator, self.options.init_std)


def contrastive_head(width: int, out: int, generator: torch.Generator) -> nn.Sequential:
    """Build an InfoNCE head, two linear layers E to E to H, for features of any length."""
    return nn.Sequential(linear(width, width, generator), nn.GELU(), linear(width, out, generator))


def sample(mu: Tensor, logvar: Tensor, eps: Tensor) -> Tensor:
    """Compute mu + sigma * eps, all [S, P, D]."""
    return mu + torch.exp(logvar / 2) * eps
