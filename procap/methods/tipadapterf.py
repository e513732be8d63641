"""Tip-Adapter-F: Tip-Adapter whose features of the training images are trained.

Source: Zhang et al. 2022, "Tip-Adapter: Training-free Adaption of CLIP for Few-shot Classification", section 3.2, and
its public code. Learns 512 parameters per training image on ViT-B/16.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from procap.clip import CLIP
from procap.methods.features import FeatureBank, accuracy
from procap.methods.tipadapter import TipAdapter, TipAdapterOptions
from procap.recipe import Recipe
from procap.text import LabelSpace


class TipAdapterF(TipAdapter):
    """Tip-Adapter-F: the keys are trained. With the public rule, those of the epoch with the best test accuracy count.

    best_keys, best_accuracy: of the epochs so far; tensors of the method, so that a resumed training has them.
    """

    title: ClassVar[str] = "Tip-Adapter-F"
    summary: ClassVar[str] = "Tip-Adapter-F (Zhang et al. 2022): Tip-Adapter with trained features"
    takes_steps: ClassVar[bool] = True
    best_keys: Tensor
    best_accuracy: Tensor

    def __init__(self, clip: CLIP, space: LabelSpace, options: TipAdapterOptions, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        self.keys.requires_grad_()
        if options.selection == "test":
            self.register_buffer("best_keys", torch.zeros_like(self.keys))
            self.register_buffer("best_accuracy", torch.tensor(-1.0))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 1e-3, batch 256, 20 epochs and 100 on EuroSAT; the public code is for few-shot only."""
        changes = {"optimizer": "adamw", "eps": 1e-4, "weight_decay": 0.01, "schedule": "step"}
        changes["epochs"] = 100 if dataset == "eurosat" else 20
        return super().recipe(task, shots, dataset).model_copy(update=changes)

    @torch.no_grad()
    def end_epoch(self, epoch: int, recipe: Recipe) -> None:
        # With the alpha and beta of the start, as in the public code: `finish` searches others afterwards.
        if self.options.selection == "test" and (score := self._test_accuracy(self.bank)) > self.best_accuracy:
            self.best_accuracy.fill_(score)
            self.best_keys = self.keys.detach().clone()

    @torch.no_grad()
    def finish(self, bank: FeatureBank) -> None:
        """Choose alpha and beta for the trained keys; by the public rule only if that has a higher test accuracy."""
        if self.options.selection == "validation":
            return super().finish(bank)
        self.keys.copy_(self.best_keys)
        start = self.alpha.clone(), self.beta.clone()
        super().finish(bank)
        if self._test_accuracy(bank) <= self.best_accuracy:
            self.alpha.copy_(start[0])
            self.beta.copy_(start[1])

    def _test_accuracy(self, bank: FeatureBank) -> float:
        return accuracy(self.head(self.space)(bank.test_features), bank.test_labels)
