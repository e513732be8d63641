"""MoCoOp: several soft prompts that start from hand-written templates, of which a router mixes two for each image.

Source: Du et al. 2024, "Mixture of Prompt Learning for Vision Language Models", and its public code. Learns 54,277
parameters on ViT-B/16 with the templates of FGVCAircraft, of which 36,864 are LayerNorms of the image tower.

Shapes: B images, C classes, G prompts (experts), N = G C prompts of classes, P rows of a prompt, L learned vectors,
T token ids per prompt, D text width, E joint embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, HeadClassifier, unit
from procap.clip import CLIP
from procap.errors import UserError
from procap.initialisation import linear
from procap.methods.method import Method, MethodOptions, Noise, PublicLayout
from procap.methods.prompts import ClassPrompts, context_plan, phrase_tokens, tokenize_classes
from procap.methods.twosfs import tuned_norms
from procap.plan import Plan
from procap.recipe import Recipe
from procap.teacher import text_bank
from procap.text import LabelSpace

Groups = tuple[tuple[str, ...], ...]
BLURRED = tuple(f"a {how} photo of {word} {{}}." for how in ("low resolution", "pixelated") for word in ("the", "a"))
COMMON: Groups = (
    ("a photo of a {}.",), ("a photo of many {}.",), BLURRED, ("a good photo of the {}.", "a good photo of a {}."),
)  # fmt: skip
"""The groups of templates of every data set; each is a prompt, which starts from the first of the group."""
FIRST: Mapping[str, Groups] = {
    "caltech101": (("{} texture.",),), "dtd": (("{} texture.",),),
    "fgvc-aircraft": (("a photo of a {}, a type of aircraft.",),),
    "oxford-flowers": (("a photo of a {}, a type of flower.",),),
    "ucf101": (("a photo of a person doing {}.",), ("a {} in a video game.",)),
}  # fmt: skip
"""Further groups of a data set, before the common ones; of others the template of the data set."""
CHOSEN, RAISED = 2, 10.0
"""Prompts of an image, and what their cosines gain in the target of the router."""
SMALL_BATCH = 4
"""From this batch size on, prompts that the router chose for no image are held near their templates as well."""


def template_groups(space: LabelSpace) -> Groups:
    """Return the groups of hand-written templates of a data set."""
    first = FIRST.get(space.dataset, ((space.template,),))
    return *(group for group in first if group not in COMMON), *COMMON


def split_template(template: str) -> tuple[str, str]:
    """Split a template into the text before and behind the name, without full stops and the space before the name."""
    before, after = template.replace(".", "").split("{}")
    return before[:-1], after


def count_vectors(part: str) -> int:
    """Count the pieces of a text between single spaces, as many as the public code has vectors for it.

    A text that begins with a space has one more than words: its last vector takes the place of the end token.
    """
    return len(part.split(" ")) if part else 0


class MoCoOpOptions(MethodOptions):
    text_weight: float = Field(5.0, ge=0, description="weight of the prompts' nearness to their hand-written templates")
    gate_weight: float = Field(1.0, ge=0, description="weight of the router's loss")
    new_names: str = Field(
        "",
        description="file with names of new classes, one a line, {dataset} in its path is the data set; the public "
        "code's training sees their prompts too",
    )


class Shift(nn.Module):
    """A learned vector that is added to the class features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(1, width))

    def forward(self, features: Tensor) -> Tensor:
        """Map features [N, E]."""
        return features + self.vector


def mix_weights(gate: Tensor) -> Tensor:
    """Compute the weights [B, G] of each image's prompts from router logits: a softmax over the two largest."""
    values, chosen = gate.topk(min(CHOSEN, gate.shape[1]), dim=1)
    return torch.zeros_like(gate).scatter(1, chosen, values.softmax(dim=1))


def mixed_logits(features: Tensor, text: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """Compute logits [B, C] of image features [B, E] against the mixture of normalised class features [G, C, E]."""
    image = unit(features)
    cosines = torch.einsum("be,gce->bgc", image, text)
    return scale * (mix_weights(F.linear(image, weight, bias))[..., None] * cosines).sum(dim=1)


class MoCoOp(Method):
    """MoCoOp (Du et al. 2024): a router mixes two of several soft prompts for each image."""

    Options = MoCoOpOptions
    title = "MoCoOp"
    mini_lr = 4e-2
    public_layout = PublicLayout(
        "prompt_learner",
        {"before": "prompt_learner.ctx_before_{}", "after": "prompt_learner.ctx_after_{}", "vision": "image_encoder.{}",
         "gate": "prompt_learner.gate.{}", "text_adapter": "prompt_learner.w"},
        unused=("text_encoder.", *(f"prompt_learner.{name}" for name in ("token_", "text_", "class_", "grouped_"))),
    )  # fmt: skip
    file_option = "new_names"
    options: MoCoOpOptions
    _all_prompts: ClassPrompts | None

    def __init__(self, clip: CLIP, space: LabelSpace, options: MoCoOpOptions, generator: torch.Generator) -> None:
        self.groups_of_templates = template_groups(space)
        self.parts = [split_template(group[0]) for group in self.groups_of_templates]
        super().__init__(clip, space, options, generator)
        self.before, self.after = (
            nn.ParameterDict({
                str(number): nn.Parameter(first_tokens(clip, part, count))
                for number, part in enumerate(parts)
                if (count := count_vectors(part))
            })
            for parts in zip(*self.parts, strict=True)
        )  # fmt: skip
        self.gate = linear(clip.geometry.embed_dim, len(self.parts), generator)
        self.text_adapter = Shift(clip.geometry.embed_dim)
        self.vision = tuned_norms(clip.visual, 0)
        # The classes whose prompts are held near their templates; `prepare_training` may add new ones.
        self.text_space, self._all_prompts = space, None

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.032 (LayerNorms 0.0032), batch 32, 25 epochs with three of warm-up, for every task."""
        return Recipe(
            optimizer="sgd", lr=0.032, epochs=25, batch_size=32, warmup_epochs=3, grad_clip=1.0, test_batch_size=32
        )

    def lr_scales(self) -> dict[str, float]:
        return {f"vision.{name}": 0.1 for name, _ in self.vision.named_parameters()}

    def prepare_training(self) -> None:
        """Read the names of new classes. Raises UserError for a file that cannot be read."""
        super().prepare_training()
        if file := self.option_file(self.options, self.space.dataset):
            try:
                lines = file.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeError) as error:
                raise UserError(f"new_names = {file}: {error}; a text with one class name a line is needed") from error
            # A list of all names has those trained on as well: twice they would be two classes with one prompt.
            names = dict.fromkeys(line.strip().replace("_", " ") for line in lines if line.strip())
            new = [name for name in names if name not in self.space.names()]
            self.text_space = replace(self.space, classnames=(*self.space.classnames, *new))

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return self.expert_prompts(space, "")

    def expert_prompts(self, space: LabelSpace, end: str) -> ClassPrompts:
        """Tokenize each prompt with each name, ids [N, T]; `reference` [N, P] has the learned vector of each row.

        Rows without one have -1. The vectors replace as many rows before and behind those of the name. end: of a text.
        """
        names = space.names()
        texts = [f"{before} {name}{after}{end}" for before, after in self.parts for name in names]
        ids = tokenize_classes(self.clip, names * len(self.parts), texts)
        lengths = [len(phrase_tokens(self.clip, name)) for name in names]
        counts = [(count_vectors(before), count_vectors(after)) for before, after in self.parts]
        rows = max(before + after for before, after in counts) + max(lengths)
        sources, vector = [], 0
        for before, after in counts:
            for length in lengths:
                source = torch.full((rows,), -1)
                source[:before] = torch.arange(vector, vector + before)
                behind = before + length
                source[behind : behind + after] = torch.arange(vector + before, vector + before + after)
                sources.append(source)
            vector += before + after
        return ClassPrompts(ids, torch.stack(sources).to(ids.device))

    def vectors(self) -> Tensor:
        """Return all learned vectors [L, D], those before a name and then those behind it, prompt by prompt."""
        parts = ((learned, str(number)) for number in range(len(self.parts)) for learned in (self.before, self.after))
        return torch.cat([learned[name] for learned, name in parts if name in learned])

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        source = prompts.reference
        assert source is not None
        # From row 1 on, behind the start token; rows without a learned vector keep their words.
        words = self.clip.token_embedding(prompts.ids[:, 1 : 1 + source.shape[1]])
        tokens = torch.where((source >= 0)[..., None], self.vectors()[source], words)
        return Plan(weights=self.vision.weights()), context_plan(tokens)

    def prototypes(self) -> Tensor:
        """Return the features [G, C, E] of the groups of hand-written templates, normalised."""

        def compute() -> Tensor:
            return torch.stack([text_bank(self.clip, self.text_space, group) for group in self.groups_of_templates])

        return self.constant("prototypes", compute)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropies of the mixture, of the prompts against the templates, and of the router.

        The router's target are the cosines of an image to the templates with its label, the two largest raised; it
        has a gradient, which reaches the LayerNorms of the image tower, as in the public code.
        """
        image, text = self.features(images, noise)
        compared = text if self.text_space == self.space else self._encode_all_names()
        with torch.autocast(image.device.type, enabled=False):
            image, text, compared = unit(image), self._by_prompt(text), self._by_prompt(compared)
            logits = mixed_logits(image, text, self.gate.weight, self.gate.bias, self.scale())
            similar = torch.einsum("gce,gde->gcd", compared, self.prototypes())
            if len(labels) < SMALL_BATCH:
                similar = similar * mix_weights(self.gate(image)).sum(dim=0).sign().detach()[:, None, None]
            same_class = torch.arange(similar.shape[1], device=text.device).repeat(len(text))
            cosines = torch.einsum("be,gbe->bg", image, self.prototypes()[:, labels])
            largest = cosines.topk(min(CHOSEN, len(text)), dim=1).indices
            target = cosines.scatter_add(1, largest, cosines.new_full(largest.shape, RAISED)).softmax(dim=1)
            return {
                "ce": F.cross_entropy(logits, labels),
                "text": self.options.text_weight * F.cross_entropy(similar.flatten(0, 1), same_class),
                "gate": self.options.gate_weight * F.cross_entropy(self.gate(image), target),
            }

    def _encode_all_names(self) -> Tensor:
        """Compute the features [N, E] of all names that training sees, in prompts that end with a full stop."""
        if self._all_prompts is None:
            self._all_prompts = self.expert_prompts(self.text_space, ".")
        plan = self.plans(self._all_prompts)[1]
        return self.text_adapter(self.clip.encode_text(self._all_prompts.tokenized, plan))

    def _by_prompt(self, text: Tensor) -> Tensor:
        """Normalise class features [N, E] and arrange them as [G, C, E]."""
        return unit(text).unflatten(0, (len(self.parts), -1))

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        gate = {"weight": self.gate.weight, "bias": self.gate.bias}
        head = partial(mixed_logits, text=self._by_prompt(text), scale=self.scale(), **gate)
        return HeadClassifier(self.clip, head, len(space.classnames), image_plan)


def first_tokens(clip: CLIP, part: str, count: int) -> Tensor:
    """Embed the `count` tokens behind the start token of `part`, the end token and padding among them: [count, D]."""
    return clip.token_embedding(clip.tokenize([part])[0][1 : 1 + count]).detach().clone()
