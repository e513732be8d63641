"""Plan the steps of a training: their batches, learning rates and stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice, pairwise

from torch import Tensor

from procap.methods.method import Method
from procap.recipe import Recipe, epoch_rate, step_rate
from shards.loader import TrainLoader

UNCHANGED = {"lr": 0.0, "warmup_lr": 0.0, "min_lr": 0.0}
"""Rates of parameters that a factor of 0 keeps as they are: in the warm-up, too."""


def peak_rates(method: Method, recipe: Recipe) -> dict[str, float]:
    """Return the peak learning rate of each parameter: `vision_lr` or `lr`, times its factor from `lr_scales`."""
    scales, rates = method.lr_scales(), {method.vision_weights: recipe.vision_lr or recipe.lr}
    names = [name for name, _ in method.named_parameters()]
    return {name: scales.get(name, 1.0) * rates.get(name.partition(".")[0], recipe.lr) for name in names}


def distinct_peak_rates(method: Method, recipe: Recipe) -> list[float]:
    """List the recipe's rate, then the values of `peak_rates` that differ from it."""
    return [recipe.lr, *sorted({*peak_rates(method, recipe).values()} - {recipe.lr})]


class StepSchedule:
    """The `total` steps of a training, from 0 on: batches, stages, and rates, by step or epoch (`Recipe.schedule`)."""

    def __init__(self, recipe: Recipe, loader: TrainLoader, method: Method) -> None:
        self.recipe = recipe
        self.loader = loader
        # One recipe for each peak rate, from which the rate of a step or epoch is computed.
        peaks = ({"lr": peak} if peak else UNCHANGED for peak in distinct_peak_rates(method, recipe))
        self._recipe_per_peak = [recipe.model_copy(update=update) for update in peaks]
        self.total = recipe.iterations or recipe.epochs * loader.steps_per_pass
        self.stage_starts, self.cycles = method.stage_starts(self.total), method.cycles

    def first_step(self, epoch: int) -> int:
        """Return the first step of `epoch`."""
        return self.total * epoch // self.recipe.epochs

    def stage(self, step: int) -> int:
        """Return the stage that trains `step`."""
        return sum(start <= step for start in self.stage_starts) - 1

    def rates(self, step: int, epoch: int) -> list[float]:
        """Return the learning rates of `step`, which is in `epoch`, in the order of `distinct_peak_rates`.

        In a constant warm-up, and in the first step or epoch of a linear one, all are equal but those of factor 0.
        """
        if self.recipe.schedule == "epoch":
            return [epoch_rate(recipe, epoch, self.cycles) for recipe in self._recipe_per_peak]
        stages = list(pairwise((*self.stage_starts, self.total)))
        start, end = stages[self.stage(step)]
        warms_up = start == 0 and self.recipe.warmup != "none"
        warm = self.first_step(min(self.recipe.warmup_epochs, self.recipe.epochs)) if warms_up else 0
        return [step_rate(recipe, step - start, end - start, warm) for recipe in self._recipe_per_peak]

    def images(self, step: int) -> int:
        """Return the number of images of the global batch of `step`."""
        position = step % self.loader.steps_per_pass
        return min(self.recipe.batch_size, self.loader.num_samples - position * self.recipe.batch_size)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the loader for the steps of `epoch` from its step `start_step` on."""
        # With a budget of iterations an epoch is no pass over the images: it can begin inside one.
        step, end = self.first_step(epoch) + start_step, self.first_step(epoch + 1)
        while step < end:
            pass_number, position = divmod(step, self.loader.steps_per_pass)
            with closing(self.loader.batches(pass_number, start_step=position)) as batches:
                # `end - step` is computed once, before the loop counts on.
                for batch in islice(batches, end - step):
                    yield batch
                    step += 1
