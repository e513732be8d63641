"""A suite's plan with the results that exist of it, as its tables and plots look them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results.frame import (
    TITLES,
    accuracy_over_seeds,
    changed_datasets,
    check_weights,
    make_frame,
    make_record,
)
from benchmarks.results.metrics import Halves, Metric, average, harmonic, mean_over_seeds
from cluster.job import RunSpec
from procap.errors import UserError
from runner.collection import COLLECTIONS
from runner.config import Target
from runner.results import EvalResult, RunFolder, TrainResult

if TYPE_CHECKING:
    import pandas as pd

SHOTS = 16
"""Training images per class unless a variant or the options say otherwise; those of all published results."""


@dataclass(frozen=True)
class Variant:
    """One of the things that a suite compares: a method, and what is changed of it.

    key: what varies within the suite, by name, as tables and plots look it up: {"n_ctx": 8}. options are the
    method's, overrides the recipe's. recipe: "published" or "procap" where the suite prescribes one. part: share of the
    epochs that is trained. shots: where the suite prescribes how many.
    """

    method: str
    title: str = ""
    key: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    part: float = 1.0
    shots: int | None = None

    @property
    def name(self) -> str:
        """The method's title where the variant has none of its own."""
        return self.title or TITLES.get(self.method, self.method)

    @property
    def changed(self) -> bool:
        """Whether it differs from the method whose results the paper's main tables print."""
        control = self.recipe == "procap" and self.method not in ("procap", "zeroshot")
        return control or bool(self.options or self.overrides) or self.part != 1.0 or self.shots not in (None, SHOTS)


@dataclass(frozen=True)
class SuiteRun:
    """One planned run of a suite: its variant, and the configuration with its evaluation targets.

    seed: the seed whose column of a table it fills; a method without seeds has one run for all of them.
    """

    variant: Variant
    dataset: str
    seed: int
    spec: RunSpec

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.spec.config.path


@dataclass(frozen=True)
class SuiteResults:
    """The plan of a suite with chosen options, and a frame of what exists of it.

    name, heading, published, classes: of the suite. profile: "paper" or "mini". backbone: the one that was chosen.
    frame: columns of `benchmarks.results.load`, one row per planned run and target with a result, with `number`, the
    place of its variant in `variants`, and `seed` as planned. results: the folder. command: what runs what is missing.
    paper_rounding: accuracies are taken with one decimal and their means over seeds with two, as in logs of older
    code. unreadable: reasons, by run, where files could not be read; these results are missing.
    """

    name: str
    heading: str
    runs: tuple[SuiteRun, ...]
    frame: pd.DataFrame
    results: Path
    profile: str
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    shots: tuple[int, ...] = ()
    recipe: str = ""
    quick: bool = False
    backbone: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    published: str = ""
    classes: str = "base"
    command: str = ""
    paper_rounding: bool = False
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where tables and plots of the suite lie."""
        return self.results / COLLECTIONS / "suite" / self.name

    @cached_property
    def variants(self) -> list[Variant]:
        """What is compared, in the order of the plan."""
        return list_variants(self.runs)

    @cached_property
    def planned(self) -> list[tuple[str, str]]:
        """Path and target of every planned evaluation, each once."""
        return list(dict.fromkeys((run.path, target) for run in self.runs for target in run.spec.targets))

    @cached_property
    def missing(self) -> list[tuple[str, str]]:
        """Planned evaluations without a result."""
        there = set(zip(self.frame.path, self.frame.target, strict=True))
        return [place for place in self.planned if place not in there]

    @cached_property
    def shorter(self) -> list[tuple[str, str]]:
        """Evaluations with a limited result where another seed has a whole one."""
        found: list[tuple[str, str]] = []
        for _, own in self.frame.groupby(["dataset", "number", "target"], sort=False):
            if own.limited.nunique() > 1:
                found += zip(own.path[own.limited], own.target[own.limited], strict=True)
        return list(dict.fromkeys(place for place in self.planned if place in found))

    @cached_property
    def changed_sets(self) -> dict[str, str]:
        """The data sets that are not as published, and how they differ."""
        return changed_datasets(self.frame)

    def rows(self, variant: Variant, dataset: str = "", target: Target | None = None) -> pd.DataFrame:
        """The part of the frame of one variant, of one data set trained on, of one target."""
        wanted = self.frame.number == self.variants.index(variant)
        if dataset:
            wanted &= self.frame.dataset == dataset
        if target:
            wanted &= self.frame.target == str(target)
        return self.frame[wanted]

    @cached_property
    def _metrics(self) -> dict[tuple[int, str, str], Metric | None]:
        """Accuracy over seeds by variant, data set and target. Limited ones count only where no whole one is there."""
        found: dict[Any, Metric | None] = {}
        for key, own in self.frame.groupby(["number", "dataset", "target"]):
            metric = accuracy_over_seeds(own)
            if metric and set(metric.seeds) != set(self.seeds):
                metric = None
            if metric and self.paper_rounding:
                rounded = {seed: round(value, 1) for seed, value in zip(metric.seeds, metric.values, strict=True)}
                metric = mean_over_seeds(rounded, limited=metric.limited)
                metric = metric and replace(metric, mean=round(metric.mean, 2))
            found[key] = metric
        return found

    def metric(self, variant: Variant, dataset: str, target: Target) -> Metric | None:
        """The accuracy over seeds; None unless every chosen seed has a result, all whole or all limited."""
        return self._metrics.get((self.variants.index(variant), dataset, str(target)))

    def halves(self, variant: Variant, dataset: str) -> Halves:
        """Base, novel, and their harmonic mean."""
        base, novel = (self.metric(variant, dataset, Target(dataset, half)) for half in ("base", "novel"))
        return base, novel, harmonic(base, novel)

    def average_halves(self, variant: Variant) -> Halves:
        """Average base, average novel, and their harmonic mean; None where a data set is missing."""
        rows = [self.halves(variant, dataset) for dataset in self.datasets]
        base, novel = average([row[0] for row in rows]), average([row[1] for row in rows])
        return base, novel, harmonic(base, novel)

    def mean_of_hms(self, variant: Variant) -> Metric | None:
        """The other reading of an average HM: the mean of the data sets' own."""
        return average([self.halves(variant, dataset)[2] for dataset in self.datasets])


def list_variants(runs: Iterable[SuiteRun]) -> list[Variant]:
    """The variants of a plan in its order, each once."""
    found: list[Variant] = []
    for run in runs:
        if run.variant not in found:
            found.append(run.variant)
    return found


def read_runs(runs: Iterable[SuiteRun], results: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The frame of planned runs, and why, by run, what is there could not be read."""
    found: dict[tuple[str, str], tuple[TrainResult, EvalResult]] = {}
    unreadable: dict[str, str] = {}
    runs = tuple(runs)
    for run in runs:
        folder = RunFolder(results / run.path)
        for target in run.spec.targets:
            if (run.path, target) in found:
                continue
            try:
                training, result = folder.train(), folder.evaluation(Target.recorded(target))
                if training and result:
                    check_weights(folder.path, run.spec.config, training, result)
                    found[run.path, target] = training, result
            except UserError as error:
                unreadable[run.path] = str(error)
    return frame_of_runs(runs, found), unreadable


def frame_of_runs(
    runs: Iterable[SuiteRun], found: Mapping[tuple[str, str], tuple[TrainResult, EvalResult]]
) -> pd.DataFrame:
    """The frame of planned runs from what was read of them, by path and target."""
    runs = tuple(runs)
    variants = list_variants(runs)
    records, numbers = [], []
    for run in runs:
        number = variants.index(run.variant)
        for target in run.spec.targets:
            if (run.path, target) in found:
                record = make_record(run.spec.config, *found[run.path, target])
                records.append({**record, "dataset": run.dataset, "seed": run.seed})
                numbers.append(number)
    return make_frame(records).assign(number=numbers)
