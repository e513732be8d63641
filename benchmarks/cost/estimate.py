"""What a run costs before it was ever run: seconds of its start, its training steps and its evaluations.

A step's counted operations go at the pace that the runtime benchmark measured (`benchmarks.cost.pace`), and every
estimate says on what it rests. Runs that finish correct the estimates of those to come: every method's by the median of
its own ratios of seconds taken to seconds estimated, as far as it has any, else by that of all.

Not foreseen: image features that another run left in the cache, which make evaluations of methods without prompts in
the image tower all but free; options that change the number of tokens; runs that share a processor.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cost.figures import read
from benchmarks.cost.pace import Machine, Paces, here
from runner.config import RunConfig, Target
from runner.results import find_runs

if TYPE_CHECKING:
    from benchmarks.cli.plan import PlannedRun

__all__ = ["CostModel", "Estimate", "Machine", "here", "makespan"]

START_SECONDS: Mapping[str, float] = {"cpu": 1.0, "cuda": 20.0}
"""Of a run until its first step, in a process that is there already, as a suite's runs follow each other in few.

On a processor: mini's runs were measured at 0.3 to 0.6 s, the first of a process at 2 s; larger weights take longer. On
a GPU assumed: weights, compiling (kept on the disk) and recording.
"""
WARM_UP_BATCHES = 2
"""Of blank images before each evaluation, as in `runner.inference`, which cannot be imported without torch."""
DECODERS = 12
"""Threads that decode beside a GPU."""
WEIGHT_OF_OTHERS = 0.5
"""How many runs of its own a method's correction counts what all runs took for."""
MOST_READ = 400


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run: until its first step, of its training and of each evaluation, as nothing has corrected them.

    basis: "measured here" where runs of this method and backbone finished on this machine, else "scaled from ..." or
    "assumed: ...". correction: what they are multiplied by, as finished runs took that much longer.
    """

    start: float
    training: float
    evaluations: tuple[float, ...]
    basis: str
    correction: float = 1.0

    @property
    def uncorrected(self) -> float:
        return self.start + self.training + sum(self.evaluations)

    @property
    def seconds(self) -> float:
        return self.uncorrected * self.correction


@dataclass(frozen=True)
class SuiteOptions:
    """A split of some classes of a data set."""

    classes: int
    images: float
    photographs: bool


class CostModel:
    """Estimates for one machine.

    data: where packed sets are that the catalogue does not know. reached: the share of its peak that a GPU without
    figures is taken to reach; None: the table's. start: seconds until the first step; None: as `START_SECONDS` assumes.
    """

    def __init__(
        self,
        machine: Machine,
        data: Path | None = None,
        *,
        reached: float | None = None,
        start: float | None = None,
    ) -> None:
        self.machine, self.data = machine, data
        self.start = START_SECONDS[machine.device] if start is None else start
        self.paces = Paces(machine, read(), reached)
        self._choices: dict[tuple[str, str, str], SuiteOptions] = {}
        self._ratios: dict[tuple[str, str], list[float]] = {}

    @classmethod
    def of(cls, results: Path, machine: Machine, data: Path | None = None) -> CostModel:
        """A model that has learned from the newest finished runs below `results` that this machine carried out."""
        model = cls(machine, data)
        newest = sorted((folder.train_file for folder in find_runs(results)), key=_age)[:MOST_READ]
        for file in newest:
            # What cannot be read teaches nothing; whoever needs that run will say what is wrong with it.
            with suppress(OSError, ValueError, KeyError, TypeError):
                model._learn_from(file)
        return model

    def estimate(
        self,
        config: RunConfig,
        targets: Iterable[Target] = (),
        *,
        train: bool = True,
        limit: int | None = None,
        ranks: int = 1,
    ) -> Estimate:
        """A run of `config` on `ranks` GPUs, with its evaluation on `targets`, on `limit` images of each at most.

        Raises DataUsageError for a data set that nothing is known of.
        """
        most = math.inf if limit is None else limit
        choices = [self._choice(one.dataset, one.classes, one.split) for one in targets]
        choices = [replace(one, images=min(most, one.images)) for one in choices]
        return self._estimate(config, config.recipe.epochs if train else 0, choices, ranks)

    def of_plan(self, run: PlannedRun, ranks: int = 1) -> Estimate:
        """What is left of a planned run; nothing of one that is done."""
        left = [one for one in run.targets if not one.done]
        if run.state == "finished" and not left:
            return Estimate(0.0, 0.0, (), "done")
        choices = [
            replace(self._choice(one.target.dataset, one.target.classes, one.target.split), images=one.images)
            for one in left
        ]
        images = self._shots(run.config).images
        return self._estimate(run.config, run.train_images / images if images else 0.0, choices, ranks)

    def learn(self, config: RunConfig, seconds_estimated: Estimate | float, seconds_taken: float) -> None:
        """Correct what is to come by a run that finished.

        seconds_estimated: what `estimate` gave for it, at any time; a bare number is one that nothing had corrected.
        """
        first = seconds_estimated.uncorrected if isinstance(seconds_estimated, Estimate) else seconds_estimated
        if first > 0 and seconds_taken > 0:
            self._ratios.setdefault((config.method, config.backbone), []).append(math.log(seconds_taken / first))

    def correction(self, config: RunConfig) -> float:
        """What estimates of such a run are multiplied by."""
        if not self._ratios:
            return 1.0
        alike = [found for (_, backbone), found in self._ratios.items() if backbone == config.backbone]
        shared = statistics.median([ratio for found in alike or self._ratios.values() for ratio in found])
        own = self._ratios.get((config.method, config.backbone), [])
        weight = len(own) / (len(own) + WEIGHT_OF_OTHERS)
        return math.exp(weight * statistics.median(own) + (1 - weight) * shared if own else shared)

    def _estimate(self, config: RunConfig, epochs: float, choices: Sequence[SuiteOptions], ranks: int) -> Estimate:
        basis = self.paces.pace(config).basis
        if (config.method, config.backbone) in self._ratios:
            basis = "measured here"
        elif not self.paces.counted(config):
            basis = f"{basis}; {config.method} on {config.backbone} was never counted"
        training = self._training(config, epochs, ranks)
        evaluations = tuple(self._evaluation(config, choice, ranks) for choice in choices)
        return Estimate(self.start, training, evaluations, basis, self.correction(config))

    def _training(self, config: RunConfig, epochs: float, ranks: int) -> float:
        shots, batch = self._shots(config), config.recipe.batch_size
        if not epochs or not shots.images:
            return 0.0
        step = self.paces.step(config, shots.classes, min(batch, round(shots.images)), ranks)
        # The first step is taken once more, to warm up; the last incomplete batch of an epoch is left out.
        steps = step + epochs * max(1, round(shots.images) // batch) * step
        decode = self.paces.figures["decode"]
        once, again = ("photograph", "photograph_again") if shots.photographs else ("small", "small_again")
        if self.machine.device == "cuda":
            # Images stay on the GPU, which crops and resizes them itself.
            return steps + shots.images * decode[once] / DECODERS
        return steps + shots.images * (decode[once] + epochs * decode[again])

    def _evaluation(self, config: RunConfig, choice: SuiteOptions, ranks: int) -> float:
        pace, work = self.paces.pace(config), self.paces.work(config)
        text = (work["classes"][0] + work["classes"][1] * choice.classes) * pace.encode
        each = (work["encode"] + work["logits"] * choice.classes) * pace.encode + text * work["conditional"]
        on_gpu = self.machine.device == "cuda"
        # A processor has no kernels or memory pools for one size of batch: a single image warms it up.
        blank = min(math.ceil(choice.images / ranks), config.recipe.test_batch_size) if on_gpu else 1
        warm_up = WARM_UP_BATCHES * blank * each
        read = self.paces.figures["decode"]["photograph" if choice.photographs else "small"]
        # Threads decode while a GPU computes; a processor does one after the other.
        each = max(each, read / DECODERS) / ranks if on_gpu else each + read
        return warm_up + text + choice.images * each

    def _shots(self, config: RunConfig) -> SuiteOptions:
        """What an epoch goes through."""
        found = self._choice(config.dataset, config.classes, "train")
        return replace(found, images=min(config.shots * found.classes, found.images)) if config.shots else found

    def _choice(self, dataset: str, classes: str, split: str) -> SuiteOptions:
        key = (dataset, classes, split)
        if key not in self._choices:
            from shards.fewshot import select_labels
            from shards.resolve import known

            found = known(dataset, self.data)
            chosen = len(select_labels(range(found.classes), classes))
            images = found.counts.get(split, 0) * chosen / found.classes
            self._choices[key] = SuiteOptions(chosen, images, found.source in ("folder", "packed"))
        return self._choices[key]

    def _learn_from(self, train: Path) -> None:
        """Learn from the files of a finished run, unless another machine or several processes carried it out."""
        done = json.loads(train.read_bytes())
        if done.get("ranks") or not self._was_here(done["environment"]):
            return
        config = RunConfig.model_validate_json((train.parent / "config.json").read_bytes())
        first, taken = self.estimate(config), done["seconds"]
        expected = first.uncorrected
        for file in sorted((train.parent / "eval").glob("*.json")):
            result = json.loads(file.read_bytes())
            target = self.estimate(config, [Target.recorded(result["target"])], train=False, limit=result["total"])
            expected += sum(target.evaluations)
            taken += result["seconds"]
        # Nobody timed the start.
        self.learn(config, expected, taken + self.start)

    def _was_here(self, environment: Mapping[str, Any]) -> bool:
        if self.machine.device == "cuda":
            return environment.get("gpu") == self.machine.name
        return environment.get("gpu") is None and environment["cpu"]["name"] == self.machine.name


def makespan(seconds: Iterable[float], slots: int) -> float:
    """When the last of some runs ends, begun in the order given, each as soon as one of `slots` is free."""
    free = [0.0] * slots
    for one in seconds:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return math.inf
