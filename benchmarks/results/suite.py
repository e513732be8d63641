"""Combine a suite's plan with its existing results and look up metrics for tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results.frame import accuracy_over_seeds, changed_datasets, check_weights, make_frame, make_record
from benchmarks.results.metrics import Halves, Metric, average, harmonic, mean_over_seeds
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.variant import SuiteDefinition, SuiteOptions, SuiteRun, Variant
from procap.errors import UserError
from runner.config import Target
from runner.results import RunFolder
from runner.run_collection import COLLECTIONS

if TYPE_CHECKING:
    import pandas as pd

PICTURES = "pictures.json"
"""Pictures that a suite made of more than its results: the planned `runs`, the `seconds` that making them took in
`environment`, caption and description (`alt`) of `pictures` by the name of their files, and the data that they show."""


@dataclass(frozen=True)
class SuiteResults:
    """A suite with chosen options, its planned runs, and a frame of the results that exist.

    frame: columns of `benchmarks.results.load`, one row per planned run and target with a result, with `number`, the
    place of its variant in `variants`. A result of a method without training has one row for each seed.
    paper_rounding: accuracies are taken with one decimal and their means over seeds with two, as in logs of older
    code. unreadable: errors of files that could not be read, by run; these results are missing.
    """

    suite: SuiteDefinition
    options: SuiteOptions
    runs: tuple[SuiteRun, ...]
    frame: pd.DataFrame
    results: Path
    paper_rounding: bool = False
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls, suite: SuiteDefinition, options: SuiteOptions, results: Path, *, paper_rounding: bool = False
    ) -> SuiteResults:
        """Read existing results below `results` of the suite's plan."""
        runs = tuple(suite.plan(options))
        variants = _list_variants(runs)
        records: list[dict[str, Any]] = []
        unreadable: dict[str, str] = {}
        for run in runs:
            folder, config = RunFolder(results / run.path), run.spec.config
            for target in run.spec.targets:
                try:
                    training, result = folder.train(), folder.evaluation(Target.recorded(target))
                    if training is None or result is None:
                        continue
                    check_weights(folder.path, config, training, result)
                except UserError as error:
                    unreadable[run.path] = str(error)
                    continue
                record = make_record(config, training, result)
                record |= {"dataset": run.dataset, "number": variants.index(run.variant)}
                # A method without training has one run, whose result counts for all seeds.
                seeds = [config.seed] if config.recipe.epochs else options.seeds
                records += [{**record, "seed": seed} for seed in seeds]
        frame = make_frame(records).assign(number=[record["number"] for record in records])
        return cls(suite, options, runs, frame, results, paper_rounding, unreadable)

    @cached_property
    def variants(self) -> list[Variant]:
        """The compared variants, in the order of the plan."""
        return _list_variants(self.runs)

    @property
    def name(self) -> str:
        return self.suite.name

    @property
    def folder(self) -> Path:
        """The folder of the suite's tables and plots."""
        return self.results / COLLECTIONS / "suite" / self.name

    @cached_property
    def paths(self) -> list[str]:
        """The planned runs in order, each once."""
        return list(dict.fromkeys(run.path for run in self.runs))

    @property
    def pictures(self) -> dict[str, Any]:
        """The contents of PICTURES if it is of exactly the planned runs, in their order; else empty."""
        try:
            record = json.loads((self.folder / PICTURES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and record.get("runs") == self.paths else {}

    @cached_property
    def planned(self) -> list[tuple[str, str]]:
        """Path and target of every planned evaluation, each once."""
        return list(dict.fromkeys((run.path, target) for run in self.runs for target in run.spec.targets))

    @cached_property
    def missing(self) -> list[tuple[str, str]]:
        """Planned evaluations without a result."""
        existing = set(zip(self.frame.path, self.frame.target, strict=True))
        return [evaluation for evaluation in self.planned if evaluation not in existing]

    @cached_property
    def shorter(self) -> list[tuple[str, str]]:
        """Evaluations with a limited result whose other seeds have an unlimited one."""
        cells = self.frame.groupby(["dataset", "number", "target"]).limited
        shorter = self.frame[self.frame.limited & ~cells.transform("all").astype(bool)]
        found = set(zip(shorter.path, shorter.target, strict=True))
        return [evaluation for evaluation in self.planned if evaluation in found]

    @cached_property
    def changed_sets(self) -> dict[str, str]:
        """The data sets that differ from the published ones, and how."""
        return changed_datasets(self.frame)

    def rows(self, variant: Variant, dataset: str = "") -> pd.DataFrame:
        """Return the rows of one variant, optionally of one training data set."""
        wanted = self.frame.number == self.variants.index(variant)
        return self.frame[wanted & (self.frame.dataset == dataset) if dataset else wanted]

    @cached_property
    def _metrics(self) -> dict[tuple[int, str, str], Metric | None]:
        """Accuracy over seeds by variant, data set and target. Limited results count only if all are limited."""
        found: dict[Any, Metric | None] = {}
        for key, own in self.frame.groupby(["number", "dataset", "target"]):
            metric = accuracy_over_seeds(own)
            if metric and set(metric.seeds) != set(self.options.seeds):
                metric = None
            if metric and self.paper_rounding:
                rounded = {seed: round(value, 1) for seed, value in zip(metric.seeds, metric.values, strict=True)}
                metric = mean_over_seeds(rounded, limited=metric.limited)
                metric = metric and replace(metric, mean=round(metric.mean, 2))
            found[key] = metric
        return found

    def metric(self, variant: Variant, dataset: str, target: Target) -> Metric | None:
        """Return the accuracy over seeds; None unless every chosen seed has a result, all or none limited."""
        return self._metrics.get((self.variants.index(variant), dataset, str(target)))

    def halves(self, variant: Variant, dataset: str) -> Halves:
        """Return base and novel accuracy, and their harmonic mean; for AVERAGE those of accuracies averaged first."""
        if dataset == AVERAGE:
            bases, novels, _ = zip(*(self.halves(variant, name) for name in self.options.datasets), strict=True)
            base, novel = average(bases), average(novels)
        else:
            base, novel = (self.metric(variant, dataset, Target(dataset, half)) for half in ("base", "novel"))
        return base, novel, harmonic(base, novel)

    def mean_of_hms(self, variant: Variant) -> Metric | None:
        """Return the mean of the data sets' harmonic means, the other reading of an average HM."""
        return average([self.halves(variant, dataset)[2] for dataset in self.options.datasets])


def _list_variants(runs: Sequence[SuiteRun]) -> list[Variant]:
    found: list[Variant] = []
    for run in runs:
        if run.variant not in found:
            found.append(run.variant)
    return found
