"""How configurations are chosen and which are given up early: by Optuna and Ray Tune, told what is known already."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from cluster.job import Report
from cluster.space import Dimension, Space, Values, digest_of
from cluster.sweep_record import SweepSettings, TrialRecord
from procap.errors import UsageError
from shards.rng import stream_seed

SCORE = "score"
MOST_REPEATED = 200
"""Proposals in a row that are known already, after which a searcher is taken to have no others."""


class Proposer(Protocol):
    """Where configurations come from."""

    def ask(self) -> Values | None:
        """The next one, never one that was given or told before; None when there is no other."""
        ...

    def told(self, record: TrialRecord) -> None:
        """A configuration, asked for here or known from before, has ended."""
        ...


def proposer_for(settings: SweepSettings) -> Proposer:
    """Raises UsageError for a space that the searcher cannot search."""
    space = settings.searched()
    if settings.search == "tpe":
        return Tpe(space, settings)
    if settings.search == "grid":
        if not space.listed:
            ranges = [one.field for one in space.dimensions if one.kind != "list"]
            raise UsageError(f"a grid needs lists: {', '.join(ranges)} is a range; use --search random or tpe")
        return Listed(space.grid())
    return Listed(space.draws(settings.search_seed))


class Listed:
    """Configurations whose order nothing changes."""

    def __init__(self, values: Iterable[Values]) -> None:
        self._values = iter(values)
        self._known: set[str] = set()

    def ask(self) -> Values | None:
        return next((values for values in self._values if digest_of(values) not in self._known), None)

    def told(self, record: TrialRecord) -> None:
        self._known.add(digest_of(record.values))


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), through Ray Tune's searcher.

    Lists are categories, without an order. A configuration that failed counts as a bad one, one that was stopped early
    by how far it got. Draws depend on the seed, on what is known when it is made, and on the order of what it is told.
    """

    def __init__(self, space: Space, settings: SweepSettings) -> None:
        self._space, self._settings = space, settings
        self._given: dict[str, TrialRecord | None] = {}
        self._asked: dict[str, str] = {}
        self._known: list[TrialRecord] = []
        self._count = 0
        self._search: Any = None

    def ask(self) -> Values | None:
        if self._search is None:
            self._search = self._opened()
        for _ in range(MOST_REPEATED):
            if self._space.size is not None and len(self._given) >= self._space.size:
                return None
            self._count += 1
            name = str(self._count)
            suggested = self._search.suggest(name)
            values = {one.field: _decoded(one, suggested[one.field]) for one in self._space.dimensions}
            digest = digest_of(values)
            if digest not in self._given:
                self._given[digest], self._asked[digest] = None, name
                return values
            # With few values to choose from it comes back to good ones; they are not tried twice.
            self._complete(name, self._given[digest])
        return None

    def told(self, record: TrialRecord) -> None:
        digest = digest_of(record.values)
        self._given[digest] = record
        if digest in self._asked:
            self._complete(self._asked.pop(digest), record)
        elif self._search is None:
            self._known.append(record)
        else:
            self._add(self._search, record)

    def _opened(self) -> Any:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = stream_seed(self._settings.search_seed, "tpe", len(self._known)) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            # Others are under way while one is chosen: it should not be their neighbour.
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        space = {one.field: _distribution(one) for one in self._space.dimensions}
        search = OptunaSearch(space, metric=SCORE, mode=self._settings.direction, sampler=sampler)
        for record in self._known:
            self._add(search, record)
        return search

    def _add(self, search: Any, record: TrialRecord) -> None:
        point = {one.field: _encoded(one, record.values[one.field]) for one in self._space.dimensions}
        finished = record.state == "finished" and record.figure is not None
        curve = [] if finished else [figure for _, figure in sorted(record.curve.items())]
        search.add_evaluated_point(
            point, record.figure if finished else None, pruned=not finished, intermediate_values=curve or None
        )

    def _complete(self, name: str, record: TrialRecord | None) -> None:
        finished = record is not None and record.state == "finished" and record.figure is not None
        if record is not None and not finished:
            for epoch, figure in sorted(record.curve.items()):
                self._search.on_trial_result(name, {SCORE: figure, "training_iteration": epoch})
        result = {SCORE: record.figure} if record is not None and finished else None
        self._search.on_trial_complete(name, result)


def _distribution(one: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if one.kind == "list":
        return CategoricalDistribution([_encoded(one, value) for value in one.values])
    if one.kind == "integers":
        return IntDistribution(int(one.low), int(one.high))
    return FloatDistribution(one.low, one.high, log=one.kind == "log")


def _encoded(one: Dimension, value: Any) -> Any:
    """As Optuna has it, whose categories are plain values."""
    return json.dumps(value) if one.kind == "list" else value


def _decoded(one: Dimension, value: Any) -> Any:
    if one.kind == "list":
        return json.loads(value)
    return int(value) if one.kind == "integers" else one.rounded(value)


def rungs(epochs: int, grace: int, reduction: int) -> tuple[int, ...]:
    """The epochs after which `halving` decides about a configuration of so many epochs; never its last."""
    found, rung = [], grace
    while rung < epochs:
        found.append(rung)
        rung *= reduction
    return tuple(found)


def halving(settings: SweepSettings, epochs: int, known: Mapping[str, TrialRecord]) -> tuple[Any, set[str]]:
    """Ray Tune's asynchronous successive halving (Li et al. 2020), and the trials that it has stopped so far.

    epochs: the most that a configuration has. known: configurations that ended before; those that follow have to keep
    up with them.
    """
    from types import SimpleNamespace

    from ray.tune.schedulers import ASHAScheduler

    stopped: set[str] = set()
    nobody: Any = None

    class Halving(ASHAScheduler):
        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            decided: str = super().on_trial_result(tune_controller, trial, result)
            if decided != self.STOP:
                return decided
            report = Report.of_flat(result)
            if report.state != "running" or report.epoch >= report.of > 0:
                # Whose schedule is a short one is at its end anyway.
                return str(self.CONTINUE)
            stopped.add(trial.trial_id)
            return decided

    # A configuration at its last epoch has nothing left to be stopped from: rungs end before it. Ray Tune counts them
    # with logarithms, whose rounding loses epoch 243 as the last of 1, 3, 9, ...: an end between two epochs loses none.
    end: Any = epochs - 0.5
    scheduler = Halving(
        time_attr="epoch",
        metric=SCORE,
        mode=settings.direction,
        max_t=end,
        grace_period=settings.grace,
        reduction_factor=settings.reduction,
        stop_last_trials=False,
    )
    for digest, record in known.items():
        if record.state in ("finished", "stopped") and record.curve:
            before: Any = SimpleNamespace(trial_id=digest)
            scheduler.on_trial_add(nobody, before)
            for epoch, figure in sorted(record.curve.items()):
                scheduler.on_trial_result(nobody, before, {"epoch": epoch, SCORE: figure})
    stopped.clear()
    return scheduler, stopped


def as_searcher(next_task: Any) -> Any:
    """A searcher of Ray Tune that takes each trial from `next_task`, which gives its configuration or None."""
    from ray.tune.search import Searcher

    class Handed(Searcher):
        def suggest(self, trial_id: str) -> Any:
            task = next_task()
            return Searcher.FINISHED if task is None else task

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            """Everything is heard by the listener."""

    return Handed(metric=SCORE, mode="max")
