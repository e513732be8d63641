"""PromptKD: an image tower with prompts and a projector learns a tuned teacher's predictions on images without labels.

Source: Li et al. 2024, "PromptKD: Unsupervised Prompt Distillation for Vision-Language Models", and its public code.
Learns 1,013,760 parameters on ViT-B/16 with 4 tokens at depth 9 under a teacher with features of width 768.

Shapes: B images, C classes, N features, E joint embedding of the student, W that of the teacher, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import Classifier, cosine_logits
from procap.clip import CLIP
from procap.errors import UsageError
from procap.initialisation import linear, normal
from procap.methods.method import Noise, PublicLayout, PublishedOptions, name_options
from procap.methods.options import PoolOptions
from procap.methods.prompts import ClassPrompts, check_blocks, deep_plans
from procap.methods.taught import Taught, TaughtOptions, divergence
from procap.plan import Plan
from procap.recipe import Recipe
from procap.text import LabelSpace


class PromptKDOptions(TaughtOptions, PoolOptions):
    """The options of PromptKD; the published teacher is a run of PromptSRC on ViT-L/14."""

    n_ctx: int = Field(4, ge=1, description="vision tokens per layer")
    depth: int = Field(9, ge=1, description="prompted layers of the image tower, the input counted")
    width: int = Field(768, ge=1, description="width of the projector: that of the teacher's features")
    temperature: float = Field(1.0, gt=0, description="divides the logits of teacher and student in the loss")
    weight: float = Field(1000.0, gt=0, description="weight of the loss, which is divided by the number of classes")


class BatchNorm(nn.Module):
    """torch's batch norm without its number of batches, which is no floating-point number and not needed here."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [N, W, 1, 1] by the batch in training, else by the running statistics."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


class Projector(nn.Sequential):
    """Two layers with a batch norm between them, as convolutions of one pixel, which the public code saves."""

    def __init__(self, inputs: int, width: int, generator: torch.Generator) -> None:
        first, second = _pixel(inputs, width, generator), _pixel(width, width, generator)
        super().__init__(first, BatchNorm(width), nn.ReLU(), second)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [N, E] that are not normalised to [N, W], in float32."""
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float()[:, :, None, None])[:, :, 0, 0]


def _pixel(inputs: int, outputs: int, generator: torch.Generator) -> nn.Conv2d:
    """Build a convolution of one pixel with torch's default initialisation, which is that of a linear layer."""
    layer, values = nn.Conv2d(inputs, outputs, 1, device="meta"), linear(inputs, outputs, generator)
    layer.weight, layer.bias = nn.Parameter(values.weight.detach()[:, :, None, None]), values.bias
    return layer


class PromptKD(Taught):
    """PromptKD (Li et al. 2024): an image tower learns a tuned teacher's predictions without labels."""

    Options = PromptKDOptions
    title = "PromptKD"
    groups = ("prompts", "unlabelled")
    changes = ("image",)
    learns_unlabelled = True
    varying_rows = ("class_features",)
    mini_lr = 1.6e-2
    mini_options: ClassVar[Mapping[str, object]] = {"teacher": "mini", "width": 128}
    published: ClassVar[PublishedOptions] = {
        "transfer": {"depth": 3},
        **name_options(("weight",), dict.fromkeys(("fgvc-aircraft", "oxford-flowers", "dtd"), (200.0,))),
    }
    public_layout = PublicLayout(
        "VLPromptLearner",
        {
            "tokens": "image_encoder.transformer.resblocks.{}.VPT_shallow",
            "tokens.0": "image_encoder.VPT",
            "image_adapter": "VPT_image_trans.conv1.{}",
        },
        unused=("VPT_image_trans.conv1.1.num_batches_tracked",),
    )
    options: PromptKDOptions
    class_features: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: PromptKDOptions, generator: torch.Generator) -> None:
        check_blocks(clip, clip.geometry.vision_layers, depth=options.depth)
        super().__init__(clip, space, options, generator)
        shape = (options.n_ctx, clip.geometry.vision_width)
        self.tokens = nn.ParameterList(normal(shape, generator) for _ in range(options.depth))
        self.image_adapter = Projector(clip.geometry.embed_dim, options.width, generator)
        # Those of a trained method, so that the classes it has learned need no teacher any more.
        self.register_buffer("class_features", torch.zeros(0, options.width))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.005, batch 8, 20 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.005, epochs=20, batch_size=8)

    def teacher_scale(self, clip: CLIP) -> Tensor:
        return clip.logit_scale.exp()

    def prepare_training(self) -> None:
        """Make the teacher, and keep its class features. Raises UsageError for features of another width."""
        super().prepare_training()
        self.class_features = self.encode_classes(self.space)

    def encode_classes(self, space: LabelSpace) -> Tensor:
        """Compute the teacher's features [C, W] of the classes of `space`, normalised.

        Raises UsageError for a teacher without fixed ones, or of another width than the projector.
        """
        teacher = self.make_teacher(space)
        if type(teacher) is not Classifier:
            raise UsageError("the teacher has no class features that are the same for all images: name another one")
        width = teacher.class_features.shape[1]
        if width != self.options.width:
            name = teacher.clip.name
            raise UsageError(
                f"width = {self.options.width}, but features of the teacher {name} have {width}: give that"
            )
        return teacher.class_features.clone()

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return deep_plans(self.clip, list(self.tokens), ())

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the divergence of teacher and student, divided by B x C as in the public code; reads no labels."""
        o = self.options
        raw = self._encode_batch(images, self.plans(self.prompts, noise)[0])
        # Behind the gather: the batch norm sees the global batch.
        student = cosine_logits(self.image_adapter(raw), self.class_features, self.scale())
        kl = divergence(self.teacher_logits(images), student, o.temperature)
        return {"kl": o.weight * kl / len(self.class_features)}

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        """Make a classifier from the teacher's class features; only new classes need the teacher."""
        space = space or self.space
        positions = self.known(space)
        stored = len(self.class_features) and bool((positions >= 0).all())
        text = self.class_features[positions] if stored else self.encode_classes(space)
        with torch.no_grad():
            return self.make_classifier(self.plans(self.prompts)[0], text, space)
