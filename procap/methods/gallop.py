"""GalLoP: global prompts classify the class token, local prompts the patches that are most similar to a class.

Source: Lafon et al. 2024, "GalLoP: Learning Global and Local Prompts for Vision-Language Models", and its public code.
Learns 606,208 parameters on ViT-B/16.

Shapes: B images, N patches, C classes, G global prompts, L local prompts, P context tokens, D text width, V vision
width, E joint embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from procap.classifier import Classifier, unit
from procap.clip import CLIP
from procap.methods.coop import ContextOptions, initial_context
from procap.methods.method import TRANSFER_TASKS, Method, Noise, PublicLayout
from procap.methods.prompts import PLACEHOLDER, ClassPrompts, context_plan, tokenize_classes
from procap.parallel import gather_batch
from procap.plan import NO_CHANGE, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

DRAWS = 512
"""Images for which a step draws global prompts; of a larger batch, image i has the draw of image i - 512."""


class GalLoPOptions(ContextOptions):
    global_prompts: int = Field(4, ge=1, description="prompts for the class token")
    local_prompts: int = Field(4, ge=0, description="prompts for the patches; 0: those for the class token")
    topk: tuple[int, ...] = Field(
        (5, 10, 15, 20), description="most similar patches that each local prompt averages: one number, or one for each"
    )
    dropout: float = Field(0.75, ge=0, lt=1, description="share of the global prompts that an image does without")

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        count = self.local_prompts or self.global_prompts
        if len(self.topk) not in (1, count) or min(self.topk) < 1:
            raise ValueError(f"topk = {list(self.topk)}: give one number above 0, or one for each of {count} prompts")
        return self


class GalLoP(Method):
    """GalLoP (Lafon et al. 2024): global prompts, and local prompts for the most similar patches."""

    Options = GalLoPOptions
    title = "GalLoP"
    groups = ("prompts", "local")
    mini_lr = 1e-2
    public_layout = PublicLayout(
        "gallop",
        {"global_prompts": "global_prompt", "local_prompts": "local_prompts", "local_map": "local_proj.linear.weight"},
        dassl=False,
    )
    options: GalLoPOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: GalLoPOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)

        def prompts(count: int) -> nn.Parameter:
            return nn.Parameter(torch.stack([initial_context(clip, options, generator) for _ in range(count)]))

        self.global_prompts = prompts(options.global_prompts)
        self.local_prompts = prompts(options.local_prompts) if options.local_prompts else None
        self.local_map = nn.Parameter(torch.eye(clip.geometry.vision_width))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, batch 32 (EuroSAT 10, SUN397 and ImageNet 128), 200 epochs (ImageNet 50), no warm-up."""
        large = dataset == "imagenet" or task in TRANSFER_TASKS
        batch_size = 128 if large else {"eurosat": 10, "sun397": 128}.get(dataset, 32)
        return Recipe(
            optimizer="sgd",
            lr=0.002,
            weight_decay=0.01,
            epochs=50 if large else 200,
            batch_size=batch_size,
            warmup="none",
        )

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        """Tokenize "[SOS] context <class name> [EOS]"; underscores stay in the names, as in the public code."""
        context = " ".join([PLACEHOLDER] * self.options.n_ctx)
        texts = [f"{context} {name}" for name in space.classnames]
        return ClassPrompts(tokenize_classes(self.clip, space.names(), texts))

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the global prompts [DRAWS, K] that each image keeps; one may come twice, as in the public code."""
        count = self.options.global_prompts
        kept = max(1, count - int(self.options.dropout * count))
        return (torch.randint(count, (DRAWS, kept), generator=generator),)

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Put each prompt's context behind the start token: one token set for each prompt, the global ones first."""
        learned = torch.cat([part for part in (self.global_prompts, self.local_prompts) if part is not None])
        return NO_CHANGE, context_plan(learned[:, None])

    def split(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise class features [G + L, C, E] and split them into those of global and of local prompts."""
        text, count = unit(text), self.options.global_prompts
        return text[:count], text[count:] if self.options.local_prompts else text

    def patch_projection(self) -> Tensor:
        """Return the local map and CLIP's projection behind it as one matrix [V, E]."""
        with torch.autocast(self.local_map.device.type, enabled=False):
            return self.local_map.t() @ self.clip.visual.proj

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropies of the global prompts that an image keeps, and of each local prompt alone."""
        patches, image = encode(self.clip, images, self.patch_projection())
        patches, image = gather_batch(self.group, patches), gather_batch(self.group, image)
        text = self._encode_classes(self.prompts.tokenized, self.plans(self.prompts, noise)[1])
        scale = self.scale()
        with torch.autocast(image.device.type, enabled=False):
            global_text, local_text = self.split(text)
            cosines = torch.einsum("be,gce->bcg", unit(image), global_text)
            # All classes of an image have the same global prompts.
            rows = torch.arange(len(labels), device=labels.device) % DRAWS
            kept = noise[0][rows][:, None].expand(-1, cosines.shape[1], -1)
            local = top_cosines(unit(patches), local_text, self.options.topk)
            return {
                "ce": F.cross_entropy(scale * cosines.gather(2, kept).mean(dim=2), labels),
                "local": F.cross_entropy(scale * local, labels[:, None].expand(-1, local.shape[2])),
            }

    def make_classifier(self, image_plan: Plan, text: Tensor, space: LabelSpace) -> Classifier:
        return LocalClassifier(self, *self.split(text))


class LocalClassifier(Classifier):
    """A classifier by the mean of the cosines of the class token and of the most similar patches."""

    score_name = "GL-MCM"

    def __init__(self, method: GalLoP, global_text: Tensor, local_text: Tensor) -> None:
        self.clip, self.image_plan, self.num_classes = method.clip, NO_CHANGE, global_text.shape[1]
        self.scale = method.scale().detach().float().clone()
        self.projection, self.topk = method.patch_projection().detach(), method.options.topk
        # The mean of cosines is the cosine with the mean of normalised features: [C, E].
        self.global_text, self.local_text = global_text.mean(dim=0), local_text

    def encode(self, images: Tensor) -> Tensor:
        """Compute the features [B, 1 + N, E] of the class token and of the patches."""
        patches, image = encode(self.clip, images, self.projection)
        return torch.cat([image[:, None], patches], dim=1)

    def logits(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            features = unit(features)
            local = top_cosines(features[:, 1:], self.local_text, self.topk).mean(dim=2)
            return self.scale * (features[:, 0] @ self.global_text.t() + local) / 2

    def score(self, features: Tensor) -> Tensor:
        """Add the highest probabilities of a class for the class token and for any patch, at temperature 1."""
        with torch.autocast(features.device.type, enabled=False):
            features = unit(features)
            image = (features[:, 0] @ self.global_text.t()).softmax(dim=1).amax(dim=1)
            return image + (features[:, 1:] @ self.local_text.mean(dim=0).t()).softmax(dim=2).amax(dim=(1, 2))


def encode(clip: CLIP, images: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """Compute joint features of patches [B, N, E] by `projection` [V, E], and of images [B, E], not normalised."""
    patches, image = clip.encode_patches(images)
    with torch.autocast(images.device.type, enabled=False):
        return patches.float() @ projection, image


def top_cosines(patches: Tensor, text: Tensor, topk: Sequence[int]) -> Tensor:
    """Average the cosines of each class's most similar patches, for each of L local prompts: [B, C, L].

    patches [B, N, E], text [L, C, E], both of length one. topk: one number of patches for all prompts, or one for each.
    """
    counts = topk if len(topk) > 1 else [topk[0]] * len(text)
    means = []
    # One prompt at a time, because B N C L cosines would fill the memory.
    for prompt, count in zip(text, counts, strict=True):
        cosines = prompt @ patches.transpose(1, 2)
        means.append(cosines.topk(min(count, cosines.shape[2]), dim=2).values.mean(dim=2))
    return torch.stack(means, dim=2)
