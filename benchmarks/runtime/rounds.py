"""Run the cases of one data set in turns, round by round, until they are done or the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.console.output import note
from benchmarks.runtime.case import Case
from benchmarks.runtime.data import CaseData
from benchmarks.runtime.measure import REPEATS, time_in_turns
from benchmarks.runtime.settings import Settings, list_cases
from benchmarks.runtime.workload import MODES, Models
from runner.setup import clip_transform, train_augment
from shards.loader import TrainStream, evaluation_batches

MIN_ROUNDS = 3
SAFE_SHARE = 0.9
"""Share of the remaining seconds to plan for, as the cost of a step is only known from the first rounds."""


@dataclass(frozen=True)
class TimeBudget:
    """A limit of `seconds`; None: no limit."""

    seconds: float | None
    began: float = field(default_factory=time.perf_counter)

    def left(self, share: float = 1.0) -> float | None:
        """Return the seconds until `share` of them is used up."""
        return None if self.seconds is None else max(0.0, share * self.seconds - (time.perf_counter() - self.began))


def run_cases(
    data: CaseData,
    settings: Settings,
    models: Models,
    peaks: dict[str, float],
    load_seconds: float,
    budget: TimeBudget,
    ends: tuple[float, float],
) -> list[dict[str, Any]]:
    """Train and evaluate all cases of a data set; returns rows. ends: shares of the budget for both parts."""
    cases = [
        Case(name, config, data, models, mode, settings)
        for precision in settings.precisions
        for name, config in list_cases(precision, settings, dataset=data.name, data=data.root, classes=data.classes)
        for mode in MODES
    ]
    _train([case for case in cases if case.trains], settings, budget, ends[0])
    encoder = _evaluate(cases, settings, budget, ends[1])
    return [
        case.row(seconds, peaks[case.config.precision], load_seconds)
        for case, seconds in zip(cases, encoder, strict=True)
    ]


def _train(cases: Sequence[Case], settings: Settings, budget: TimeBudget, end: float) -> None:
    """Run training rounds in turns, until all steps are done or as many of each training as the time allows."""
    if not cases:
        return
    images, labels = (tensor.to(cases[0].device) for tensor in _first_batch(cases[0]))
    for case in cases:
        assert case.training is not None
        case.training.prepare(images, labels)
    # Take one step of each training to measure its cost; every row then has a number even if time runs out.
    for case in cases:
        case.train_round(1)
    left = budget.left(end)
    goal = total = cases[0].steps
    if left is not None:
        goal = max(1, min(goal, int(SAFE_SHARE * left / sum(case.rounds[-1].seconds for case in cases))))
    rounds = max(MIN_ROUNDS, -(-goal // cases[0].stream.steps_per_epoch))
    for number in range(rounds):
        done = -(-goal * (number + 1) // rounds)
        for position in range(len(cases)):
            case = cases[(position + number) % len(cases)]
            case.train_round(max(0, done - case.steps_done))
        note(f"  {cases[0].data.name}: {done} of {total} steps of {len(cases)} trainings")
        if budget.left(end) == 0.0:
            break
    for case in cases:
        case.release()


def _first_batch(case: Case) -> tuple[Tensor, Tensor]:
    recipe = case.config.recipe
    # Use a separate stream, so that no case has decoded images before it is timed.
    augment = train_augment(recipe, case.method.clip, case.method.views)
    stream = TrainStream(case.data.fewshot.train, recipe.batch_size, augment, case.config.seed)
    with closing(stream.epoch(0)) as batches:
        return next(batches)


def _evaluate(cases: Sequence[Case], settings: Settings, budget: TimeBudget, end: float) -> list[list[float]]:
    """Run passes over the test images, and repeated batches of the encoder alone, both in turns."""
    device, test = cases[0].device, cases[0].data.test.images
    batch = min(settings.test_batch, len(test))
    clip = cases[0].method.clip
    transform = clip_transform(clip)
    images = next(evaluation_batches(test, transform, batch, limit=batch))[0].to(device)
    repeats, rounds, once = REPEATS[device.type], settings.repeats, 0.0
    for case in cases:
        once += case.evaluation.prepare(images, len(test) % batch).once
    if (left := budget.left(end)) is not None:
        rounds = max(1, min(rounds, int(left / 3 / max(once * repeats, 1e-9))))
    work: list[Callable[[], object]] = [partial(case.evaluation, images) for case in cases]
    encoder = time_in_turns(work, rounds, device, repeats)
    # If time is short, make the passes over fewer images.
    per_image, wanted = sum(min(seconds) for seconds in encoder) / batch, len(test)
    if (left := budget.left(end)) is not None and left < per_image * wanted:
        wanted = min(wanted, max(batch, int(left / per_image) // batch * batch))
    for number in range(settings.repeats):
        for position in range(len(cases)):
            cases[(position + number) % len(cases)].evaluate_pass(wanted)
        if budget.left(end) == 0.0:
            break
    return encoder
