"""CoCoOp: CoOp's context, shifted for each image by a small network of its feature.

Source: Zhou et al. 2022, "Conditional Prompt Learning for Vision-Language Models", section 3.2, and its public code.
Learns 35,360 parameters on ViT-B/16: 4 context tokens and a meta-network of width E/16.

Shapes: B images, C classes, P context tokens, D text width, E joint embedding.
"""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from procap.classifier import Classifier, unit
from procap.clip import CLIP
from procap.initialisation import linear
from procap.methods.coop import CONTEXT_NAMES, ContextMethod, ContextOptions
from procap.methods.method import MethodOptions, Noise, PublicLayout
from procap.methods.prompts import context_plan
from procap.parallel import gather_batch
from procap.plan import NO_CHANGE
from procap.prompt_packing import PromptSet
from procap.recipe import Recipe
from procap.text import LabelSpace

META_NET_NAMES = {
    "meta_net.0": "prompt_learner.meta_net.linear1.{}",
    "meta_net.2": "prompt_learner.meta_net.linear2.{}",
}
"""The parameters of a network of two layers in the public code of CoCoOp and TCP."""


class CoCoOp(ContextMethod):
    """CoCoOp (Zhou et al. 2022): context shifted for each image, text never cached."""

    Options: ClassVar[type[MethodOptions]] = ContextOptions
    title = "CoCoOp"
    mini_lr = 1e-2
    public_layout = PublicLayout("prompt_learner", CONTEXT_NAMES | META_NET_NAMES, module="prompt_learner")

    def __init__(self, clip: CLIP, space: LabelSpace, options: ContextOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        width, embed = clip.geometry.text_width, clip.geometry.embed_dim
        hidden = max(1, embed // 16)
        self.meta_net = nn.Sequential(linear(embed, hidden, generator), nn.ReLU(), linear(hidden, width, generator))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, one image per step, 10 epochs, for every task (the paper's section 4, its public code)."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=10, batch_size=1)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        image = self.clip.encode_image(images)
        logits = conditional_logits(self.clip, image, self.prompts.tokenized, self.context, self.meta_net, self.scale())
        # Logits are gathered, not features, because the class features belong to single images.
        return {"ce": F.cross_entropy(gather_batch(self.group, logits), labels)}

    def classifier(self, space: LabelSpace | None = None) -> CoCoOpClassifier:
        return CoCoOpClassifier(self, self.class_prompts(space or self.space).tokenized)


class CoCoOpClassifier(Classifier):
    """A classifier that encodes every class again for every image, because each image shifts the context."""

    keeps_class_features = False

    def __init__(self, method: CoCoOp, prompts: PromptSet) -> None:
        self.clip = method.clip
        self.image_plan = NO_CHANGE
        self.scale = method.scale().detach().float().clone()
        self.num_classes = len(prompts)
        self.prompts = prompts
        self.context = method.context.detach().clone()
        self.meta_net = copy.deepcopy(method.meta_net).requires_grad_(False)

    def logits(self, features: Tensor) -> Tensor:
        return conditional_logits(self.clip, features, self.prompts, self.context, self.meta_net, self.scale)


def conditional_logits(
    clip: CLIP, image: Tensor, prompts: PromptSet, context: Tensor, meta_net: nn.Module, scale: Tensor
) -> Tensor:
    """Compute logits [B, C] of image features [B, E] against `prompts` under each image's own context."""
    image = unit(image)
    # [B, P, D], one token set per image: B x C prompts pass the text tower.
    shifted = context + meta_net(image)[:, None]
    text = unit(clip.encode_text(prompts, context_plan(shifted[:, None])))
    with torch.autocast(image.device.type, enabled=False):
        return scale.float() * torch.einsum("be,bce->bc", image, text)
