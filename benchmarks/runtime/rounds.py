"""Run the cases of one data set in turns, round by round, until they are done or the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.console.output import note
from benchmarks.runtime.case import Case, Passes
from benchmarks.runtime.data import load_case_data
from benchmarks.runtime.measure import repeats_on, time_in_turns
from benchmarks.runtime.settings import SEED, SHOTS, Settings, run_config
from benchmarks.runtime.workload import Models, Start
from runner.setup import train_augment
from shards.loader import TrainStream, evaluation_batches
from shards.transforms import eval_transform

MIN_ROUNDS = 3
SAFE_SHARE = 0.9
"""Share of the remaining seconds to plan for, as the cost of a step is only known from the first rounds."""


@dataclass
class Clock:
    """Time limits: `budget` seconds of measuring and `limit` seconds in all; None: no limit.

    excluded: seconds of starts, which do not count as measuring.
    """

    budget: float | None
    limit: float | None = None
    began: float = field(default_factory=time.perf_counter)
    excluded: float = 0.0

    def left(self, share: float = 1.0) -> float | None:
        """Return the seconds until `share` of the budget is used up, or until the limit."""
        now = time.perf_counter() - self.began
        ends = [] if self.budget is None else [share * self.budget + self.excluded]
        ends += [] if self.limit is None else [self.limit]
        return max(0.0, min(ends) - now) if ends else None


def run_cases(
    name: str,
    root: Path,
    settings: Settings,
    models: Models,
    peaks: dict[str, float],
    load_seconds: float,
    clock: Clock,
    ends: tuple[float, float],
) -> list[dict[str, Any]]:
    """Train and evaluate every case on one data set and return their rows.

    ends: shares of the clock's budget at which training and evaluation have to end.
    """
    configs = [
        run_config(method, precision, settings, dataset=name, data=root)
        for precision in settings.precisions
        for method in settings.methods
    ]
    data = load_case_data(name, root, SHOTS, SEED)
    cases = [
        Case(config, data, models, mode, settings)  # type: ignore[arg-type]
        for config in configs
        for mode in settings.modes
    ]
    _train(cases, settings, clock, ends[0])
    passes, encoder = _evaluate(cases, settings, clock, ends[1])
    return [
        case.row(settings, seen, batches, peaks[case.config.precision], load_seconds)
        for case, seen, batches in zip(cases, passes, encoder, strict=True)
    ]


def affordable_steps(costs: Sequence[float], wanted: int, seconds: float | None) -> list[int]:
    """Choose the steps of each training, given the seconds of one step: `wanted` if they fit into an equal share.

    Time that short trainings do not need is shared among the long ones; each takes at least one step.
    """
    if seconds is None:
        return [wanted] * len(costs)
    steps = [wanted] * len(costs)
    for done, which in enumerate(sorted(range(len(costs)), key=lambda i: costs[i])):
        share = max(0.0, seconds) / (len(costs) - done)
        steps[which] = max(1, min(wanted, int(share / max(costs[which], 1e-9))))
        seconds -= steps[which] * costs[which]
    return steps


def _train(cases: Sequence[Case], settings: Settings, clock: Clock, end: float) -> None:
    """Run training rounds in turns until all steps are done or the time is over."""
    training = [case for case in cases if case.trains]
    if not training:
        return
    images, labels = (tensor.to(training[0].device) for tensor in _first_batch(training[0]))
    for case in training:
        _exclude(case.start_training(images, labels), case, clock)
    # Take one step of each training to measure its cost; every row then has a number even if time runs out.
    for case in training:
        case.train_round(1)
    left, total = clock.left(end), training[0].steps
    costs = [case.expected_step_seconds() for case in training]
    goals = affordable_steps(costs, min(total, settings.steps or total), None if left is None else SAFE_SHARE * left)
    rounds = max(MIN_ROUNDS, -(-max(goals) // training[0].stream.steps_per_epoch))
    for number in range(rounds):
        for position in range(len(training)):
            which = (position + number) % len(training)
            # Round up, so that also a short training takes a step in the first round; all end together.
            goal = -(-goals[which] * (number + 1) // rounds)
            if goal > training[which].steps_done:
                training[which].train_round(goal - training[which].steps_done)
        done = [case.steps_done for case in training]
        fewest = "" if min(done) == max(done) else f"{min(done)} to "
        note(f"  {training[0].data.name}: {fewest}{max(done)} of {total} steps of {len(training)} trainings")
        if clock.left(end) == 0.0:
            break
    for case in training:
        case.release()


def _exclude(start: Start, case: Case, clock: Clock) -> None:
    """Exclude compiling and graph capture from the budget; a plain warm-up takes no longer than a step."""
    if case.accelerations.compile or case.accelerations.graphs:
        clock.excluded += start.seconds
        note(f"  {case.data.name}: {case.name} ready after {start.seconds:.1f} s")


def _first_batch(case: Case) -> tuple[Tensor, Tensor]:
    config = case.config
    augment = train_augment(config.recipe, case.method.clip)
    # Use a separate stream, so that no case has decoded images before it is timed.
    stream = TrainStream(case.data.fewshot.train, config.recipe.batch_size, augment, config.seed)
    with closing(stream.epoch(0)) as batches:  # type: ignore[type-var]
        return next(batches)


def _evaluate(
    cases: Sequence[Case], settings: Settings, clock: Clock, end: float
) -> tuple[list[Passes], list[list[float]]]:
    """Run passes over the test images, and repeated batches of the encoder alone, both in turns."""
    device, data = cases[0].device, cases[0].data
    count = len(data.test.images)
    batch = min(settings.test_batch, count)
    clip = cases[0].method.clip
    transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
    images = next(evaluation_batches(data.test.images, transform, batch, limit=batch))[0].to(device)
    for case in cases:
        _exclude(case.start_evaluation(images, count % batch), case, clock)
    once = sum(case.eval_start.once for case in cases if case.eval_start is not None)
    repeats, rounds, left = repeats_on(device), settings.repeats, clock.left(end)
    if left is not None:
        rounds = max(1, min(rounds, int(left / 3 / max(once * repeats, 1e-9))))
    work: list[Callable[[], object]] = [partial(case.evaluation, images) for case in cases]
    encoder = time_in_turns(work, rounds, device, repeats)
    # If time is short, make the passes over fewer images.
    per_image, left = sum(min(seconds) for seconds in encoder) / batch, clock.left(end)
    wanted = count
    if left is not None and per_image * count > left:
        wanted = max(batch, int(left / per_image) // batch * batch)
    passes = [Passes(min(wanted, count)) for _ in cases]
    for number in range(settings.repeats):
        for position in range(len(cases)):
            turn = (position + number) % len(cases)
            cases[turn].evaluate_pass(passes[turn])
        if clock.left(end) == 0.0:
            break
    return passes, encoder
