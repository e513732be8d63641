"""What is there of a suite: the figures of its runs, from result files alone, as tables and figures look them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from benchmarks.results.scores import Cell, Score, average, cell_of, hm_of, over_seeds, score_of, variants_of
from benchmarks.results.variant import SuiteDefinition, SuiteOptions, SuiteRun, Variant, is_trained
from procap.errors import UserError
from runner.config import RunConfig, Target
from runner.results import RunFolder


@dataclass(frozen=True)
class SuiteResults:
    """A suite as it was chosen, and the scores that there are of it.

    paper_rounding: every accuracy is taken with one decimal, as the logs had it that older tables were read from, and
    its mean over seeds with two. unreadable: why, by run, where files of the plan's runs cannot be read; what they held
    is missing.
    """

    suite: SuiteDefinition
    options: SuiteOptions
    runs: tuple[SuiteRun, ...]
    scores: Mapping[tuple[str, str], Score]
    results: Path
    paper_rounding: bool = False
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(
        cls, suite: SuiteDefinition, options: SuiteOptions, results: Path, *, paper_rounding: bool = False
    ) -> SuiteResults:
        entries = tuple(suite.plan(options))
        scores: dict[tuple[str, str], Score] = {}
        unreadable: dict[str, str] = {}
        planned = {(entry.path, target): entry.spec.config for entry in entries for target in entry.spec.targets}
        for (path, target), config in planned.items():
            try:
                score = _read_score(RunFolder(results / path), config, Target.recorded(target))
            except UserError as error:
                unreadable[path] = str(error)
            else:
                if score is not None:
                    scores[path, target] = score
        return cls(suite, options, entries, scores, results, paper_rounding, unreadable)

    @cached_property
    def variants(self) -> list[Variant]:
        """What is compared, in the order of the plan."""
        found: list[Variant] = []
        for entry in self.runs:
            if entry.variant not in found:
                found.append(entry.variant)
        return found

    @property
    def datasets(self) -> tuple[str, ...]:
        return self.options.datasets

    @cached_property
    def missing(self) -> list[tuple[str, str]]:
        """Runs and targets of the plan without a result, as (path, target)."""
        planned = {(entry.path, target): None for entry in self.runs for target in entry.spec.targets}
        return [place for place in planned if place not in self.scores]

    @cached_property
    def shorter(self) -> list[tuple[str, str]]:
        """Runs and targets with a limited result where another seed of theirs has a whole one."""
        found: dict[tuple[str, str], None] = {}
        for variant, dataset in ((variant, dataset) for variant in self.variants for dataset in self.datasets):
            own = [entry for entry in self.runs if (entry.variant, entry.dataset) == (variant, dataset)]
            for target in own[0].spec.targets if own else ():
                there = [place for entry in own if (place := (entry.path, target)) in self.scores]
                limited = [place for place in there if self.scores[place].result.limited]
                found |= dict.fromkeys(limited if len(limited) < len(there) else ())
        return list(found)

    @cached_property
    def changed_sets(self) -> dict[str, str]:
        """The data sets that are not as published, and how they differ."""
        return variants_of(self.scores.values())

    def found(self, variant: Variant, dataset: str, target: Target) -> list[Score]:
        """The scores of a variant that was trained on `dataset`, one for each seed that is there."""
        paths = [entry.path for entry in self.runs if entry.dataset == dataset and entry.variant == variant]
        return self.for_all_seeds(
            variant, [self.scores[path, str(target)] for path in paths if (path, str(target)) in self.scores]
        )

    def for_all_seeds(self, variant: Variant, scores: list[Score]) -> list[Score]:
        """`scores`, of which those of a method without training count for every seed."""
        if is_trained(variant.method):
            return scores
        return [
            replace(score, config=score.config.model_copy(update={"seed": seed}))
            for score in scores
            for seed in self.options.seeds
        ]

    def cell(self, variant: Variant, dataset: str, target: Target) -> Cell | None:
        """The accuracy over seeds; None unless every seed that was chosen is there, all whole or all limited.

        Whatever is missing is missing: a mean over fewer seeds than asked for is none.
        """
        cell = cell_of(self.found(variant, dataset, target))
        if cell is None or set(cell.seeds) != set(self.options.seeds):
            return None
        if not self.paper_rounding:
            return cell
        rounded = {seed: round(value, 1) for seed, value in zip(cell.seeds, cell.values, strict=True)}
        means = over_seeds(rounded, limited=cell.limited)
        return means and replace(means, mean=round(means.mean, 2))

    def halves(self, variant: Variant, dataset: str) -> tuple[Cell | None, Cell | None, Cell | None]:
        """Base, novel, and their harmonic mean."""
        base, novel = (self.cell(variant, dataset, Target(dataset, half)) for half in ("base", "novel"))
        return base, novel, hm_of(base, novel)

    def average_halves(self, variant: Variant) -> tuple[Cell | None, Cell | None, Cell | None]:
        """Average base, average novel, and their harmonic mean; nothing where a data set is missing."""
        rows = [self.halves(variant, dataset) for dataset in self.datasets]
        base, novel = average([row[0] for row in rows]), average([row[1] for row in rows])
        return base, novel, hm_of(base, novel)

    def mean_of_hms(self, variant: Variant) -> Cell | None:
        """The other reading of an average HM: the mean of the data sets' own."""
        return average([self.halves(variant, dataset)[2] for dataset in self.datasets])


def _read_score(folder: RunFolder, config: RunConfig, target: Target) -> Score | None:
    """None where the run is not finished or was not tested on `target`."""
    training, result = folder.train(), folder.evaluation(target)
    return score_of(folder, config, training, result) if training and result else None
