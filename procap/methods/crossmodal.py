"""Cross-modal adaptation: a linear classifier that is trained on few-shot images and on the prompts of the classes.

Source: Lin et al. 2023, "Multimodality Helps Unimodality: Cross-Modal Few-Shot Learning with Multimodal Models", and
its public code (linear head). Learns 512 parameters per class on ViT-B/16.

Shapes: N training vectors, B of a batch, G settings of a grid, C classes, P prompts of a class, E joint embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from procap.classifier import unit
from procap.clip import CLIP
from procap.methods.features import ClassWeights, FeatureBank, Head
from procap.methods.method import MethodOptions
from procap.text import LabelSpace

Batches = Iterable[tuple[Tensor, Tensor]]
Grid = Sequence[tuple[float, float]]
GRID: Grid = tuple(product((1e-3, 1e-4), (0.0, 0.01, 1e-4)))
"""Learning rates and weight decays that validation images choose from."""
BATCHES = (8, 32)
WARMUP, WARMUP_RATE = 50, 1e-5
"""Iterations of the linear warm-up, and the rate of its first one."""
VALIDATE_EVERY = 100


class CrossModalOptions(MethodOptions):
    texts: bool = Field(True, description="half of a batch are prompts; without them: uni-modal, images alone")
    iterations: int = Field(12_800, ge=1, description="steps for each rate, weight decay and batch size of the grid")
    wise: bool = Field(False, description="average the trained weights with the zero-shot ones (WiSE-FT)")


def linear_logits(features: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Compute the logits [B, C] of normalised features by rows [C, E], which are not normalised, times `scale`."""
    return scale * unit(features) @ rows.t()


def draw_batches(counts: list[int], sizes: tuple[int, ...], steps: int, draws: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows [B] of each step in several sources of `counts` rows, one behind the other, `sizes` of each.

    Each source is shuffled, left at its last incomplete batch, and shuffled again.
    """
    starts = [sum(counts[:i]) for i in range(len(counts))]
    orders = [torch.empty(0, dtype=torch.int64) for _ in counts]
    for _ in range(steps):
        parts = []
        for i, size in enumerate(sizes):
            if len(orders[i]) < size:
                orders[i] = torch.randperm(counts[i], generator=draws)
            parts.append(starts[i] + orders[i][:size])
            orders[i] = orders[i][size:]
        yield torch.cat(parts)


def rate_factor(step: int, rate: float, steps: int) -> float:
    """Compute the factor on the learning rate: linear in the warm-up, then a cosine that ends above zero."""
    if step < WARMUP:
        return step / WARMUP if step else WARMUP_RATE / rate
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / steps))


def train_heads(start: Tensor, batches: Batches, grid: Grid, scale: float, steps: int) -> Iterator[Tensor]:
    """Train a head for each rate and weight decay of the grid by AdamW; yields all heads [G, C, E] after each step.

    batches: normalised features [B, E] and labels [B], of which all heads see the same.
    """
    heads = start.expand(len(grid), *start.shape).clone()
    gradient = torch.zeros_like(heads)
    groups: list[dict[str, Any]] = []
    for i, (rate, decay) in enumerate(grid):
        parameter = nn.Parameter(heads[i])
        parameter.grad = gradient[i]
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, fused=True)
    for step, (features, labels) in enumerate(batches):
        logits = scale * features @ heads.transpose(1, 2)
        # The gradient of the mean cross-entropy, for all heads at once: autograd takes longer than the step itself.
        error = (logits.softmax(dim=2) - F.one_hot(labels, start.shape[0])) * (scale / len(labels))
        torch.matmul(error.transpose(1, 2), features, out=gradient)
        for group, (rate, _) in zip(optimizer.param_groups, grid, strict=True):
            group["lr"] = rate * rate_factor(step, rate, steps)
        optimizer.step()
        yield heads


class CrossModal(ClassWeights):
    """Cross-modal adaptation (Lin et al. 2023): a linear classifier of images and prompts."""

    Options = CrossModalOptions
    title = "Cross-modal"
    selection = "validation"
    takes_steps = False
    augments = False
    mirrors = True
    mini_options: ClassVar[Mapping[str, object]] = {"iterations": 1_280}
    options: CrossModalOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: CrossModalOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self._seed = int(torch.randint(2**62, (), generator=generator))

    def text(self, space: LabelSpace) -> Tensor:
        """Compute zero-shot weights [C, E]: the normalised mean of features that are not normalised."""
        return unit(self.prompt_features(space).mean(dim=0))

    @torch.no_grad()
    def fit(self, bank: FeatureBank) -> None:
        """Train all settings of the grid; keep the setting and the step of the highest validation accuracy.

        Of equals the first counts. Without validation images it is the last step of the first setting.
        """
        text, views = self.text(self.space), bank.features.shape[1]
        vectors, labels = [unit(bank.features).flatten(0, 1)], [bank.labels.repeat_interleave(views)]
        if self.options.texts:
            prompts = unit(self.prompt_features(self.space)).transpose(0, 1)
            vectors.append(prompts.flatten(0, 1))
            labels.append(torch.arange(len(text), device=text.device).repeat_interleave(prompts.shape[1]))
        trained = [self._train(bank, vectors, labels, sizes) for sizes in batch_parts([*map(len, vectors)])]
        # Rates are the outer loop, then decays, and batch sizes the inner one.
        scores = torch.stack([accuracies for accuracies, _ in trained], dim=1).flatten().tolist()
        setting, number = divmod(scores.index(max(scores)), len(trained))
        rows = trained[number][1][setting]
        self.rows.copy_((rows + text) / 2 if self.options.wise else rows)

    def _train(
        self, bank: FeatureBank, vectors: list[Tensor], labels: list[Tensor], sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Train with batches of `sizes`; returns the best validation accuracy of each setting [G], and its head."""
        samples, targets, steps = torch.cat(vectors), torch.cat(labels), self.options.iterations
        draws = torch.Generator().manual_seed(self._seed)
        rows = draw_batches([*map(len, vectors)], sizes, steps, draws)
        batches = ((samples[batch], targets[batch]) for batch in rows)
        start, best = self.text(self.space), torch.full((len(GRID),), -1.0, dtype=torch.float64)
        kept = start.repeat(len(GRID), 1, 1)
        for step, heads in enumerate(train_heads(start, batches, GRID, float(self.scale()), steps)):
            if len(bank.val_labels) and step % VALIDATE_EVERY == 0:
                predicted = (unit(bank.val_features) @ heads.transpose(1, 2)).argmax(dim=2)
                accuracies = (predicted == bank.val_labels).double().mean(dim=1).cpu()
                for setting in (accuracies > best).nonzero()[:, 0].tolist():
                    best[setting], kept[setting] = accuracies[setting], heads[setting]
        return best, kept if len(bank.val_labels) else heads

    def head(self, space: LabelSpace) -> Head:
        return partial(linear_logits, rows=self.weights_of(space), scale=self.scale())


def batch_parts(counts: list[int]) -> list[tuple[int, ...]]:
    """Return how many rows of each source, of `counts` rows, are in a batch: for all batch sizes that fit.

    As in the public code a source must have more rows than a batch takes; if none fits, the smallest is cut.
    """
    all_parts: list[tuple[int, ...]]
    all_parts = [(size - size // 2, size // 2) if len(counts) > 1 else (size,) for size in BATCHES]
    fitting = [parts for parts in all_parts if all(part < count for part, count in zip(parts, counts, strict=True))]
    return fitting or [tuple(min(part, count) for part, count in zip(all_parts[0], counts, strict=True))]
