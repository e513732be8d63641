"""The contest on one data set: contestants take turns, round by round, until they are done or the time is used up.

Shapes: B images, S image size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.console.output import note
from benchmarks.runtime.case import Contestant, Passes
from benchmarks.runtime.data import Contest, open_contest
from benchmarks.runtime.measure import interleaved, times_on
from benchmarks.runtime.modes import Models
from benchmarks.runtime.rows import row
from benchmarks.runtime.settings import SEED, SHOTS, Settings, run_config
from runner.setup import train_augment
from shards.loader import TrainStream, evaluation_batches
from shards.transforms import eval_transform

FEW_ROUNDS = 3
# Of the seconds that a training may take: those that its start has shown are a guess.
SAFE = 0.9


@dataclass
class Clock:
    """The time there is: `budget` seconds of measuring, `limit` seconds in all; None: no end.

    apart: seconds that do not count as measuring.
    """

    budget: float | None
    limit: float | None = None
    began: float = field(default_factory=time.perf_counter)
    apart: float = 0.0

    def left(self, share: float = 1.0) -> float | None:
        """Seconds until `share` of the budget is used up, or until the limit."""
        now = time.perf_counter() - self.began
        ends = [] if self.budget is None else [share * self.budget + self.apart]
        ends += [] if self.limit is None else [self.limit]
        return max(0.0, min(ends) - now) if ends else None


def contest_rows(
    name: str,
    root: Path,
    settings: Settings,
    models: Models,
    peaks: dict[str, float],
    loading: float,
    clock: Clock,
    ends: tuple[float, float],
) -> list[dict[str, Any]]:
    """Train and evaluate every contestant on one data set and give their rows.

    ends: shares of the clock's budget at which training and evaluation have to end.
    """
    configs = [
        run_config(method, precision, settings, dataset=name, data=root)
        for precision in settings.precisions
        for method in settings.methods
    ]
    contest = open_contest(name, root, SHOTS, SEED, models["fast"], configs[0].recipe)
    contestants = [
        Contestant(config, contest, models, mode, settings.workers, settings.ways)  # type: ignore[arg-type]
        for config in configs
        for mode in settings.modes
    ]
    _train(contestants, settings, clock, ends[0])
    passes, encoder = _evaluate(contestants, settings, clock, ends[1])
    return [
        row(c, contest, settings, seen, batches, peaks[c.config.precision], loading)
        for c, seen, batches in zip(contestants, passes, encoder, strict=True)
    ]


def affordable(costs: Sequence[float], wanted: int, seconds: float | None) -> list[int]:
    """Steps of each training, a step of which takes `costs` seconds: all `wanted` where they fit into an equal part.

    What the short ones leave is shared among the long ones; each takes a step at least.
    """
    if seconds is None:
        return [wanted] * len(costs)
    steps = [wanted] * len(costs)
    for done, which in enumerate(sorted(range(len(costs)), key=lambda i: costs[i])):
        part = max(0.0, seconds) / (len(costs) - done)
        steps[which] = max(1, min(wanted, int(part / max(costs[which], 1e-9))))
        seconds -= steps[which] * costs[which]
    return steps


def in_turns(goals: Sequence[int], per_round: int) -> list[list[int]]:
    """For each round the steps of every training, `goals` in all: about `per_round`, and a few rounds at least.

    Trainings of unequal length end together, a short one in fewer rounds: two steps would say little.
    """
    if not any(goals):
        return []
    rounds = [min(goal, max(FEW_ROUNDS, math.ceil(goal / per_round))) for goal in goals]
    most = max(rounds)

    def after(number: int, goal: int, own: int) -> int:
        # Rounded up: whoever has few rounds begins with the others.
        return goal * -(-number * own // most) // own if own else 0

    pairs = list(zip(goals, rounds, strict=True))
    return [[after(number + 1, *pair) - after(number, *pair) for pair in pairs] for number in range(most)]


def _train(contestants: Sequence[Contestant], settings: Settings, clock: Clock, end: float) -> None:
    """Until the training, the steps asked for or the time is over."""
    able = [c for c in contestants if c.trains]
    if not able:
        return
    images, labels = (tensor.to(able[0].device) for tensor in _first_batch(able[0]))
    for contestant in able:
        started = contestant.start_training(images, labels)
        _leave_out(started.seconds, contestant, clock)
    total = able[0].steps
    # A first step each shows what steps take, and gives every row a figure whatever the clock says.
    for contestant in able:
        contestant.train_round(1)
    left = clock.left(end)
    costs = [c.expected_seconds() for c in able]
    goals = affordable(costs, min(total, settings.steps or total), None if left is None else SAFE * left)
    more = [goal - c.steps_done for goal, c in zip(goals, able, strict=True)]
    for number, turns in enumerate(in_turns(more, able[0].stream.steps_per_epoch)):
        for place in range(len(able)):
            which = (place + number) % len(able)
            if turns[which]:
                able[which].train_round(turns[which])
        done = [c.steps_done for c in able]
        fewest = "" if min(done) == max(done) else f"{min(done)} to "
        note(f"  {able[0].contest.name}: {fewest}{max(done)} of {total} steps of {len(able)} trainings")
        if clock.left(end) == 0.0:
            break
    for contestant in able:
        contestant.release()


def _leave_out(seconds: float, contestant: Contestant, clock: Clock) -> None:
    """Compiling and recording are no measuring; a plain warm-up takes no longer than what it warms up for."""
    if contestant.ways.compile or contestant.ways.graphs:
        clock.apart += seconds
        note(f"  {contestant.contest.name}: {contestant.name} ready after {seconds:.1f} s")


def _first_batch(contestant: Contestant) -> tuple[Tensor, Tensor]:
    config = contestant.config
    augment = train_augment(config.recipe, contestant.method.clip)
    # A stream of its own, so that no contestant has decoded anything before its clock runs.
    stream = TrainStream(contestant.contest.fewshot.train, config.recipe.batch_size, augment, config.seed)
    with closing(stream.epoch(0)) as batches:  # type: ignore[type-var]
        return next(batches)


def _evaluate(
    contestants: Sequence[Contestant], settings: Settings, clock: Clock, end: float
) -> tuple[list[Passes], list[list[float]]]:
    """Passes over the test images and repeated batches of the encoder alone, both in turns."""
    device, contest = contestants[0].device, contestants[0].contest
    count = len(contest.test.images)
    batch = min(settings.test_batch, count)
    images = _test_batch(contest, contestants[0], batch)
    for contestant in contestants:
        started = contestant.start_evaluation(images, count % batch)
        _leave_out(started.seconds, contestant, clock)
    once = sum(c.eval_start.once for c in contestants if c.eval_start is not None)
    times, rounds, left = times_on(device), settings.repeats, clock.left(end)
    if left is not None:
        rounds = max(1, min(rounds, int(left / 3 / max(once * times, 1e-9))))
    work: list[Callable[[], object]] = [partial(c.evaluation, images) for c in contestants]
    encoder = interleaved(work, rounds, device, times)
    wanted, per_image = count, sum(min(values) for values in encoder) / batch
    per_image += len(contestants) * (contest.decode + contest.transform) / max(1, settings.workers)
    left = clock.left(end)
    if left is not None and per_image * wanted > left:
        wanted = max(batch, int(left / per_image) // batch * batch)
    passes = [Passes(min(wanted, count)) for _ in contestants]
    for number in range(settings.repeats):
        for place in range(len(contestants)):
            turn = (place + number) % len(contestants)
            contestants[turn].evaluate_pass(passes[turn])
        if clock.left(end) == 0.0:
            break
    return passes, encoder


def _test_batch(contest: Contest, contestant: Contestant, batch: int) -> Tensor:
    clip = contestant.method.clip
    transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
    images, _, _ = next(evaluation_batches(contest.test.images, transform, batch, limit=batch))
    return images.to(contestant.device)
