"""ReBaPL: MaPLe sampled by SGD with noise over cycles of the learning rate; the mean logits of the samples classify.

Source: "ReBaPL: Repulsive Bayesian Prompt Learning" (2025), and the behaviour of its public code on MaPLe in one
sequential chain. Learns 3,555,072 parameters per sample on ViT-B/16, as MaPLe; inference costs as much as three MaPLes.

Shapes: B images, C classes, R reference images, N parameters, M samples, E joint embedding.
"""

from __future__ import annotations

import copy
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from procap.classifier import AveragedClassifier, Classifier, cosine_logits, unit
from procap.clip import CLIP
from procap.losses import mmd
from procap.methods.maple import MaPLe, MaPLeOptions
from procap.methods.method import Noise
from procap.recipe import Recipe
from procap.text import LabelSpace


class ReBaPLOptions(MaPLeOptions):
    samples: int = Field(3, ge=1, description="cycles of the training; the weights at the end of each are a sample")
    noisy_epochs: int = Field(3, ge=0, description="last epochs of a cycle that have noise; 0 has none")
    temperature: float = Field(100.0, ge=0, description="multiplies the noise")
    repulsion: float = Field(0.001, ge=0, description="strength of the repulsion from the sample before")
    distance: Literal["mmd", "mse"] = Field("mmd", description="between features now and those of the sample before")
    rows: int = Field(32, ge=1, description="features that each step compares, images and texts together")
    references: int = Field(128, ge=1, description="training images whose features are compared")


class ReBaPL(MaPLe):
    """ReBaPL (2025) on MaPLe: mean logits of samples from cycles with noise and repulsion."""

    Options = ReBaPLOptions
    title = "ReBaPL"
    groups = ("prompts", "probabilistic")
    mini_lr = 4e-2
    # The public code writes a folder for each sample.
    public_layout = None  # type: ignore[assignment]
    varying_rows = ("samples",)
    options: ReBaPLOptions
    samples: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: ReBaPLOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.cycles = options.samples
        # Until `build_method` moves them all, some parameters are on the device of `clip` and others on the CPU.
        self.register_buffer("samples", torch.zeros(0, sum(parameter.numel() for parameter in self.parameters())))
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._noise, self._images, self._past = 0.0, torch.empty(0), torch.empty(0)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return SGD 0.002, one image per step, 15 epochs, for every task and data set."""
        return Recipe(optimizer="sgd", lr=0.002, epochs=15, batch_size=1)

    def begin_epoch(self, epoch: int, rate: float, recipe: Recipe) -> bool:
        """Set the noise of the epoch, which only SGD has, and compute the features of the sample before."""
        pool, o, cycle = self.training_images, self.options, max(1, recipe.epochs // self.cycles)
        position, first_noisy = epoch % cycle, max(0, cycle - o.noisy_epochs)
        is_noisy = recipe.optimizer == "sgd" and position >= first_noisy
        # As in the public code: SGHMC would take the square roots of the temperature and of the number of images.
        self._noise = o.temperature * (2 * rate * recipe.momentum) ** 0.5 / len(pool.labels) if is_noisy else 0.0
        # At the start of a cycle, and after a resume, which restores samples alone; always of the same views.
        if len(self.samples) and (not position or not len(self._past)):
            draws = torch.Generator().manual_seed(self._seed)
            chosen = torch.randperm(len(pool.labels), generator=draws)[: o.references].tolist()
            self._images = torch.stack([pool.image(i, draws) for i in chosen]).to(self.clip.device)
            with torch.no_grad():
                image_plan, text_plan = self._sampled(self.samples[-1]).plans(self.prompts)
                text = self.clip.encode_text(self.prompts.tokenized, text_plan)
                self._past = torch.cat([unit(self.clip.encode_image(self._images, image_plan)), unit(text)])
        return position in (0, first_noisy)

    def end_epoch(self, epoch: int, recipe: Recipe) -> None:
        """Keep the weights at the end of a cycle; an incomplete one leaves no sample, as in the public code."""
        if (epoch + 1) % max(1, recipe.epochs // self.cycles) == 0 and len(self.samples) < self.cycles:
            self.samples = torch.cat([self.samples, parameters_to_vector(self.parameters()).detach()[None]])

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the noise [N] of the momentum, if the epoch has any, and the rows that are compared."""
        noise = [self._noise * torch.randn(self.samples.shape[1], generator=generator)] if self._noise else []
        if len(self._past):
            rows = torch.randperm(len(self._past), generator=generator)
            # Compared with the number of images alone, although classes are rows as well, as in the public code.
            noise.append(rows[: self.options.rows] if self.options.rows < len(self._images) else rows)
        return tuple(noise)

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy and, from the second cycle on, the repulsion from the sample before."""
        o, (image, text) = self.options, self.features(images, noise)
        terms = {"ce": F.cross_entropy(cosine_logits(image, text, self.scale()), labels)}
        for drawn in noise:
            if drawn.is_floating_point():
                # Adds nothing to the value and the noise to the gradient, with which it enters the momentum.
                shift = (drawn * parameters_to_vector(self.parameters())).sum()
                terms["ce"] = terms["ce"] + (shift - shift.detach())
            else:
                # A cycle starts at the sample: float32 would round away a distance near 0, which is divided by.
                now, past = self._features(drawn, text).double(), self._past[drawn].double()
                distance = mmd(now, past) if o.distance == "mmd" else (now - past).square().sum(dim=1).mean()
                terms["repulsion"] = (o.repulsion / (distance + 1e-6)).float()
        return terms

    def _features(self, rows: Tensor, text: Tensor) -> Tensor:
        """Return `rows` [K] of the features [R + C, E] of the reference images and of the classes, normalised."""
        references, image_plan = len(self._images), self.plans(self.prompts)[0]
        # K images in every step, however many of the rows are classes, so that the step can be captured as a graph.
        image = self.clip.encode_image(self._images[rows.clamp(max=references - 1)], image_plan)
        return torch.where((rows < references)[:, None], unit(image), unit(text[(rows - references).clamp(min=0)]))

    def classifier(self, space: LabelSpace | None = None) -> Classifier:
        members = [super(ReBaPL, self._sampled(sample)).classifier(space) for sample in self.samples]
        return AveragedClassifier(members, probabilities=False) if members else super().classifier(space)

    def _sampled(self, sample: Tensor) -> Self:
        """Return the same method with the parameters `sample` [N]."""
        twin = copy.copy(self)
        # Deep copies, because `vector_to_parameters` changes the parameters that it is given.
        twin._parameters, twin._modules = copy.deepcopy((self._parameters, self._modules))
        vector_to_parameters(sample, twin.parameters())
        return twin
