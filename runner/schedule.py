"""Plan the steps of a training: their batches, learning rates and stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice, pairwise

from torch import Tensor

from procap.methods.method import Method
from procap.recipe import Recipe, learning_rate, step_rate
from shards.loader import TrainStream


class Schedule:
    """The steps of a training, counted from 0; `stage_starts` are the first steps of the method's stages."""

    def __init__(self, recipe: Recipe, stream: TrainStream, method: Method) -> None:
        self.recipe = recipe
        self.stream = stream
        peaks = [recipe.lr, *([recipe.vision_lr] if recipe.vision_lr else [])]
        self._recipes = [recipe.model_copy(update={"lr": peak}) for peak in peaks]
        self.steps = recipe.iterations or recipe.epochs * stream.steps_per_epoch
        self.stage_starts = method.stage_starts(self.steps)

    def first_step(self, epoch: int) -> int:
        """Return the first step of `epoch`."""
        return self.steps * epoch // self.recipe.epochs

    def stage(self, step: int) -> int:
        """Return the stage that trains `step`."""
        return sum(start <= step for start in self.stage_starts) - 1

    def rates(self, step: int, epoch: int) -> list[float]:
        """Return the learning rate of `step`, which is in `epoch`, and that of the vision tower if it has its own."""
        if self.recipe.schedule == "epoch":
            return [learning_rate(recipe, epoch) for recipe in self._recipes]
        stages = list(pairwise((*self.stage_starts, self.steps)))
        start, end = stages[self.stage(step)]
        warm = self._warm_steps() if start == 0 else 0
        return [step_rate(recipe, step - start, end - start, warm) for recipe in self._recipes]

    def _warm_steps(self) -> int:
        """Return the number of steps of the warm-up per step."""
        recipe = self.recipe
        if recipe.schedule != "warmup-step" or recipe.warmup == "none":
            return 0
        return self.first_step(min(recipe.warmup_epochs, recipe.epochs))

    def images(self, step: int) -> int:
        """Return the number of images of the global batch of `step`."""
        position = step % self.stream.steps_per_epoch
        return min(self.recipe.batch_size, len(self.stream.split) - position * self.recipe.batch_size)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of `TrainStream.epoch` for the steps of `epoch` from its step `start_step` on."""
        step, end = self.first_step(epoch) + start_step, self.first_step(epoch + 1)
        while step < end:
            number, position = divmod(step, self.stream.steps_per_epoch)
            with closing(self.stream.epoch(number, start_step=position)) as batches:
                for batch in islice(batches, end - step):
                    yield batch
                    step += 1
