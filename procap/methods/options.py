"""The options of the built-in methods, without torch, so that wrong ones are refused at once."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

STRICT = ConfigDict(frozen=True, extra="forbid")
"""Configuration of every `Options`: a value never changes, an unknown field is refused."""


class ZeroShotOptions(BaseModel):
    model_config = STRICT

    templates: Literal["single", "ensemble"] = Field(
        "single",
        description="the data set's own template, or the mean over seven general ones and it (on ImageNet: the seven)",
    )


class ContextOptions(BaseModel):
    """The options of every method with CoOp's context."""

    model_config = STRICT

    n_ctx: int = Field(4, ge=1, description="learned context tokens; as many as ctx_init has words where it has any")
    ctx_init: str = Field("a photo of a", description="words to start from; empty draws N(0, 0.02)")

    @model_validator(mode="after")
    def _words_fit(self) -> Self:
        words = len(words_of(self.ctx_init))
        if words and words != self.n_ctx:
            raise ValueError(
                f"ctx_init '{self.ctx_init}' has {words} words but n_ctx = {self.n_ctx}: "
                f"give n_ctx = {words}, or an empty ctx_init for a random start"
            )
        return self


class CoOpOptions(ContextOptions):
    # Two options with one value each: stored runs have both in their identity.
    class_position: Literal["end"] = Field("end", description="where the class name stands")
    csc: Literal[False] = Field(False, description="class-specific context")


class KgCoOpOptions(ContextOptions):
    kg_weight: float = Field(8.0, ge=0, description="weight of the distance to the reference features (lambda)")
    reference_template: str | None = Field(None, description="template of the reference; none: the data set's own")


class VPTOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(8, ge=1, description="vision tokens per layer")
    depth: int = Field(12, ge=1, description="prompted layers, the input counted")
    template: str = Field("a photo of a {}.", description="prompt of every class, on every data set")


class IVLPOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(2, ge=1, description="text tokens per layer; above 4 the phrase is not used")
    vision_tokens: int = Field(2, ge=0, description="vision tokens per layer; 0 prompts the text tower only")
    depth: int = Field(12, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(12, ge=0, description="prompted layers of the vision tower; 0 is no vision token at all")
    ctx_init: str = Field("a photo of a", description="phrase whose first n_ctx tokens start the text input")


class MaPLeOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(2, ge=1, description="prompt tokens per layer; above 4 the phrase is not used")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")
    ctx_init: str = Field(
        "a photo of a", description="phrase whose first n_ctx tokens start the input prompt; the rest stays, fixed"
    )
    fp16_rounding: bool = Field(
        False, description="round vision and deep text prompts to fp16 at insertion, as the public code does"
    )


class PromptSRCOptions(IVLPOptions):
    n_ctx: int = Field(4, ge=1, description="text tokens per layer; above 4 the phrase is not used")
    vision_tokens: int = Field(4, ge=0, description="vision tokens per layer")
    depth: int = Field(9, ge=1, description="prompted layers of the text tower, the input counted")
    vision_depth: int = Field(9, ge=0, description="prompted layers of the vision tower")
    text_weight: float = Field(25.0, ge=0, description="weight of the L1 distance of the class features")
    image_weight: float = Field(10.0, ge=0, description="weight of the L1 distance of the image features")
    logit_weight: float = Field(1.0, ge=0, description="weight of the KL divergence of the predictions")
    kl_mean: Literal["pairs", "images"] = Field(
        "pairs", description="divide the KL divergence by images times classes, as the public code, or by images"
    )
    teacher_average: Literal["average-first", "normalise-first"] = Field(
        "average-first", description="average class features over templates before normalising, as the public code"
    )


class CoPromptOptions(MaPLeOptions):
    sentences: str = Field(
        "",
        description="JSON file of sentences by class name, {dataset} in its path is the data set; or templates: "
        "hand-written ones; training needs one of the two",
    )
    n_ctx: int = Field(4, ge=1, description="prompt tokens per layer; above 4 the phrase is not used")
    depth: int = Field(12, ge=1, description="prompted layers of both towers, the input counted")
    weight: float = Field(8.0, ge=0, description="weight of both consistency terms (lambda)")
    image_share: float = Field(0.1, ge=0, le=1, description="share of the adapter's output in an image feature")
    text_share: float = Field(0.2, ge=0, le=1, description="share of the adapter's output in a class feature")
    sentence_draw: Literal["step", "class"] = Field(
        "step",
        description="step: one sentence number for all classes, as the public code draws; class: one per class",
    )
    adapter_relu: bool = Field(True, description="end the adapters in a ReLU, as the public code does")


class TCPOptions(ContextOptions):
    ctx_init: str = Field("", description="words to start from; empty draws N(0, 0.02)")
    hidden: int = Field(128, ge=1, description="hidden width of the network that makes the class tokens")
    block: int = Field(8, ge=0, description="block (0-based) at whose input the class tokens replace the context")
    kg_weight: float = Field(8.0, ge=0, description="weight of the distance to the reference features")
    reference_template: str | None = Field(
        None, description="template of the reference; none: the public code's, which differs from its prompts"
    )


class MMAOptions(BaseModel):
    model_config = STRICT

    width: int = Field(32, ge=1, description="width of the adapters")
    scale: float = Field(0.001, gt=0, description="factor of what the adapters add")
    first_block: int = Field(4, ge=0, description="first block (0-based) with an adapter")
    last_block: int | None = Field(None, ge=0, description="last block with an adapter; none: the tower's last")
    template: str = Field("a photo of a {}.", description="prompt of every class, on every data set")
    scale_gradient: bool = Field(
        True, description="give the adapters the gradient of a scale of 1, as the public code does; else the true one"
    )

    @model_validator(mode="after")
    def _has_blocks(self) -> MMAOptions:
        if self.last_block is not None and self.last_block < self.first_block:
            raise ValueError(f"last_block = {self.last_block} is before first_block = {self.first_block}")
        return self


class MMRLOptions(BaseModel):
    model_config = STRICT

    n_tokens: int = Field(5, ge=1, description="representation tokens")
    width: int = Field(512, ge=1, description="width of the tokens, before they are projected to each tower")
    first_block: int = Field(5, ge=0, description="first block (0-based) that gets tokens; all later ones do as well")
    alpha: float = Field(0.7, ge=0, le=1, description="weight of the class branch, out of 1")
    reg_weight: float = Field(0.5, ge=0, description="weight of both distances to the frozen features (lambda)")
    scale: float = Field(100.0, gt=0, description="factor of the cosines")
    inference: Literal["task", "fused", "class"] = Field(
        "task",
        description="branches that classify; task: both for training classes, class for others",
    )


class SkipTOptions(BaseModel):
    model_config = STRICT

    first_block: int = Field(6, ge=0, description="first block (0-based) of both towers that is trained")
    top_ratio: float = Field(0.5, gt=0, le=1, description="share of the classes, the most similar, that is always used")
    max_top: int = Field(50, ge=1, description="most classes that are always used")
    decay: float = Field(0.3, gt=0, description="scale of the exponential decay over the other classes (lambda)")
    draw: Literal["run", "step"] = Field(
        "run", description="how often the used ranks of similarity are drawn; the public code does it once"
    )
    keep_labels: bool = Field(
        True, description="use the classes of all images of a batch; the published recipe does not, see `SkipT.loss`"
    )


class TwoSFSOptions(BaseModel):
    model_config = STRICT

    first_vision_block: int = Field(0, ge=0, description="first vision block (0-based) whose LayerNorms are tuned")
    first_text_block: int = Field(0, ge=0, description="first text block whose LayerNorms are tuned")
    first_stage: float = Field(0.6, ge=0, le=1, description="share of the steps that tune the LayerNorms")
    template: str = Field("a photo of a {}.", description="prompt of every class, on every data set")
    final_norms: bool = Field(
        False, description="tune ln_post and ln_final too, which the public code lists but leaves frozen"
    )
    first_norm: bool = Field(False, description="tune ln_pre too, which the public code leaves frozen")


class MMLoPOptions(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(4, ge=1, description="prompt tokens per layer and tower")
    rank: int = Field(1, ge=1, description="rank of the prompts of a layer")
    depth: int = Field(9, ge=1, description="prompted layers of both towers, the input counted")
    init_std: float = Field(0.05, gt=0, description="standard deviation of every factor at the start")
    shared_factor: bool = Field(True, description="one token-side factor per layer for both towers, or one each")
    drift_correction: bool = Field(True, description="move the class features so that their mean is the frozen one")
    text_weight: float = Field(25.0, ge=0, description="weight of the L1 distance of the class features")
    image_weight: float = Field(10.0, ge=0, description="weight of the L1 distance of the image features")
    logit_weight: float = Field(1.0, ge=0, description="weight of the symmetric KL divergence of the predictions")


class ProCAPOptions(BaseModel):
    model_config = STRICT

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
    nce_activation: Literal["gelu", "relu"] = Field("gelu", description="between the two layers of a head")
    nce_hidden_width: int | None = Field(None, ge=1, description="hidden width of the InfoNCE heads; none: CLIP's own")
    learn_logit_scale: bool = Field(False, description="learn CLIP's temperature, in training and test")

    logvar_init: float = Field(-9.0, description="initial log-variance: sigma about 0.011, as large as word embeddings")
    logvar_min: float = Field(-12.0, description="lower clamp a of the log-variance")
    logvar_max: float = Field(2.0, description="upper clamp b of the log-variance")
    logvar_lr_scale: float = Field(
        1.0, ge=0, description="factor on the learning rate of the log-variances; 0 keeps their initial value"
    )

    init_templates: str | None = Field(
        None, description="templates, separated by ||, that start the text tokens; none: those of the data set"
    )
    template_init_combine: Literal["mean", "first", "features"] = Field(
        "mean",
        description="of several templates: text tokens start at the mean of their words, or at the first one's; "
        "features: at the first one's, and class features are means over prompts with each template's fixed words",
    )
    init_std: float = Field(0.02, gt=0, description="text tokens beyond the template's words, and further token sets")
    vision_init_std: float = Field(0.02, gt=0, description="vision tokens")
    class_prompt: Literal["phrase", "maple", "template"] = Field(
        "phrase",
        description="phrase: the first template; learned tokens replace its first n_ctx, as in MaPLe's code; "
        "maple: learned tokens only before the class name, so a longer template loses words; "
        "template: learned tokens, then the whole first template",
    )
    target_prefix: Literal["training", "target"] = Field(
        "training", description="whose fixed words continue the tokens of `phrase` when testing on another data set"
    )
    target_suffix: Literal["target", "training", "none"] = Field(
        "target", description="whose words follow the class name when testing on another data set"
    )

    deep_tokens: Literal["refined", "independent"] = Field(
        "refined", description="one token set refined level by level, or a set per level, each refined once"
    )
    inject: Literal["levels", "final", "final-all"] = Field(
        "levels",
        description="where refined tokens enter: those of level l at layer l; or those of the last level, at the input "
        "only (final) or at every prompted layer (final-all)",
    )
    shared_attention: bool = Field(False, description="one attention block per direction for all levels")
    heads: int = Field(8, ge=1, description="attention heads, in both directions")
    head_width: int = Field(64, ge=1, description="width of one head")
    norm: Literal["pre", "post", "none"] = Field("pre", description="place of the LayerNorms in the residual update")
    zero_output: bool = Field(True, description="output projections start at zero, so training starts at the template")

    @field_validator("init_templates")
    @classmethod
    def _readable(cls, templates: str | None) -> str | None:
        if templates is not None:
            split_templates(templates)
        return templates

    @model_validator(mode="after")
    def _clamp_holds(self) -> ProCAPOptions:
        if not self.logvar_min <= self.logvar_init <= self.logvar_max:
            raise ValueError(
                f"logvar_init = {self.logvar_init} is outside its clamp: give {self.logvar_min} to {self.logvar_max}"
            )
        return self

    @model_validator(mode="after")
    def _every_token_set_enters(self) -> ProCAPOptions:
        if self.inject != "levels" and self.deep_tokens == "independent":
            raise ValueError(
                f"inject = {self.inject} takes the last level's tokens, but with deep_tokens = independent each level "
                "has its own: give inject = levels or deep_tokens = refined"
            )
        return self


def words_of(phrase: str) -> list[str]:
    """Split a phrase into words; underscores count as spaces."""
    return phrase.replace("_", " ").split()


def split_templates(text: str) -> tuple[str, ...]:
    """Split a `||`-separated string into templates without full stops; one without {} ends in the class name.

    Raises ValueError (for an options model) for an empty template or one with several {}.
    """
    templates = []
    for part in text.split("||"):
        template = part.strip().rstrip(". ")
        if not template or template.count("{}") > 1:
            raise ValueError(f"template {part!r} needs words and one {{}} for the class name; || separates templates")
        templates.append(template if "{}" in template else f"{template} {{}}")
    return tuple(templates)


OPTIONS: dict[str, type[BaseModel]] = {
    "zeroshot": ZeroShotOptions,
    "coop": CoOpOptions,
    "cocoop": ContextOptions,
    "kgcoop": KgCoOpOptions,
    "vpt": VPTOptions,
    "ivlp": IVLPOptions,
    "maple": MaPLeOptions,
    "promptsrc": PromptSRCOptions,
    "coprompt": CoPromptOptions,
    "tcp": TCPOptions,
    "mma": MMAOptions,
    "mmrl": MMRLOptions,
    "skipt": SkipTOptions,
    "2sfs": TwoSFSOptions,
    "mmlop": MMLoPOptions,
    "procap": ProCAPOptions,
}
"""The options of the built-in methods."""
