"""Combine a suite's plan with its existing results and look up metrics for tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from benchmarks.experiment.profiles import PAPER
from benchmarks.experiment.published import AVERAGE
from benchmarks.experiment.suite import SHOTS, Suite, SuiteOptions, SuiteRun, Variant
from benchmarks.experiment.titles import choose_reference, find_differences
from benchmarks.results.detection import MEASURES
from benchmarks.results.frame import check_contents, make_frame, make_records
from benchmarks.results.metrics import Metric, average, harmonic, metric_over_seeds
from procap.errors import UserError
from runner.config import Target
from runner.results import write_json
from runner.run_collection import COLLECTIONS
from runner.run_folders import RunFolder
from shards.files import read_regular
from shards.image_selection import Classes
from shards.names import NAME
from shards.resolve import kind_of_name

if TYPE_CHECKING:
    import pandas as pd

BACKBONE = "ViT-B-16"
"""The backbone of every published number, with its default weights, which are OpenAI's."""
MACRO = "macro_accuracy"
RUNS = TypeAdapter(tuple[SuiteRun, ...])
PLAN = "plan.json"
"""The last planned runs of a suite: planning them again imports the methods, and with them torch."""
PICTURES = "pictures.json"
"""Pictures of more than results: the planned `runs`, `seconds` and `environment` of making them, caption and text
(`alt`) of `pictures` by the name of their files, and the data that they show."""


@dataclass(frozen=True)
class SuiteResults:
    """A suite with chosen options, its planned runs, and a frame of the results that exist.

    frame: columns of `benchmarks.results.load`, and `number`, the variant's index in `variants`. A result that depends
    on no seed has one row for each. unreadable: why files of a run cannot be read, or
    how it differs from other seeds in more than the seed; its results are missing.
    """

    suite: Suite
    options: SuiteOptions
    runs: tuple[SuiteRun, ...]
    frame: pd.DataFrame
    results: Path
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, suite: Suite, options: SuiteOptions, results: Path) -> SuiteResults:
        """Read existing results below `results` of the suite's plan."""
        runs = read_plan(results / COLLECTIONS / "suite" / suite.name, options) or tuple(suite.plan(options))
        variants = _list_variants(runs)
        records: list[dict[str, Any]] = []
        unreadable: dict[str, str] = {}
        for run in runs:
            folder, config = RunFolder(results / run.path), run.spec.config
            # The one run of a method that draws nothing counts for all seeds.
            seeds = [config.seed] if "seed" in options.eval_settings.sample_fields(config) else options.seeds
            columns = {"dataset": run.dataset, "number": variants.index(run.variant)}
            try:
                training, eval_settings = folder.read_training(), options.eval_settings.for_run(config)
                evaluations = [folder.read_evaluation(target, eval_settings) for target in run.spec.parse_targets()]
                made = make_records(folder, config, training, filter(None, evaluations)) if training else ()
                records += [record | columns | {"seed": seed} for record, seed in product(made, seeds)]
            except UserError as error:
                unreadable[run.path] = str(error)
        frame = make_frame(records).assign(number=[record["number"] for record in records])
        check_contents(frame)
        unlike = {}
        for _, rows in frame.groupby(["number", "dataset", "target"]):
            for row in rows[rows.limited].itertuples() if not rows.limited.all() else ():
                unlike[row.path] = f"{row.target} is limited to {row.total} images, other seeds are whole: repeat it"
            for name, values in find_differences(rows.settings).items():
                usual = values.most_common(1)[0][0]
                for path, settings in zip(rows.path, rows.settings, strict=True):
                    if (value := settings.get(name, usual)) != usual:
                        unlike[path] = f"its {name} is {value}, that of other seeds {usual}: repeat it with --force"
        frame = frame[~frame.path.isin(list(unlike))]
        return cls(suite, options, runs, frame, results, unreadable | unlike)

    @cached_property
    def variants(self) -> list[Variant]:
        """The compared variants, in the order of the plan."""
        return _list_variants(self.runs)

    @property
    def name(self) -> str:
        return self.suite.name

    @property
    def datasets_and_average(self) -> list[str]:
        """The data sets, then AVERAGE if there are several."""
        return [*self.options.datasets, *([AVERAGE] if len(self.options.datasets) > 1 else [])]

    @property
    def folder(self) -> Path:
        """The folder of the suite's tables and plots."""
        return self.results / COLLECTIONS / "suite" / self.name

    def make_tables(self) -> list[Any]:
        """Make the suite's tables; their titles say whether its trainings were quick."""
        quick = " (quick run)" * (self.options.quick and self.suite.trains)
        return [replace(table, title=table.title + quick) for table in self.suite.tables(self)]

    @cached_property
    def paths(self) -> list[str]:
        """The planned runs in order, each once."""
        return list(dict.fromkeys(run.path for run in self.runs))

    @property
    def pictures(self) -> dict[str, Any]:
        """The contents of PICTURES if it covers exactly the planned runs, in their order; else empty."""
        try:
            record = json.loads(read_regular(self.folder / PICTURES))
            is_current = record["runs"] == self.paths and all(map(NAME.fullmatch, record["pictures"]))
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return {}
        return record if is_current else {}

    @cached_property
    def planned(self) -> list[tuple[str, str]]:
        """Path and target of every planned evaluation, each once."""
        return list(dict.fromkeys((run.path, target) for run in self.runs for target in run.spec.targets))

    @cached_property
    def missing(self) -> list[tuple[str, str]]:
        """Planned evaluations without a result."""
        existing = set(zip(self.frame.path, self.frame.target, strict=True))
        return [evaluation for evaluation in self.planned if evaluation not in existing]

    @property
    def in_paper(self) -> bool:
        """Whether the suite ran on published data sets, so that published rows are in the same tables."""
        return "published" in map(kind_of_name, self.options.datasets)

    @cached_property
    def why_incomparable(self) -> str:
        """The reason why no result is comparable with published numbers; empty if they are."""
        if not self.in_paper:
            return f"they use {' and '.join(sorted({*map(kind_of_name, self.options.datasets)}))} data sets"
        backbones = {(run.spec.config.backbone, run.spec.config.pretrained) for run in self.runs}
        if different := backbones - {(BACKBONE, None)}:
            names = sorted(f"{name} with {weights or 'default'} weights" for name, weights in different)
            return f"the backbone is {', '.join(names)}, not {BACKBONE} with OpenAI's weights"
        chosen = self.options
        changes = [f"{name} {value}" for name, value in chosen.overrides.items()]
        for method, options in chosen.options.items():
            # A file of sentences is data that the published recipe of CoPrompt needs as well.
            named = {name: value for name, value in options.items() if name != "sentences" or value == "templates"}
            changes += [f"{method}.{name} {value}" for name, value in named.items()]
        changes += ["the short schedules of --quick"] if chosen.quick else []
        changes += ["each method in ProCAP's recipe"] if chosen.recipe == "procap" else []
        changes += [f"the profile {chosen.profile.name}"] if chosen.profile != PAPER else []
        # A suite that measures without runs has no variants.
        has_own_shots = self.suite.trains and all(variant.shots is not None for variant in self.variants)
        if chosen.shots not in ((), (SHOTS,)) and not has_own_shots:
            changes.append(f"shots {chosen.shots[0] or 'all'} instead of {SHOTS}")
        if chosen.eval_settings.name:
            changes.append(f"evaluation with {chosen.eval_settings.name}")
        if chosen.precision not in ("", PAPER.precision):
            changes.append(f"precision {chosen.precision} instead of {PAPER.precision}")
        return f"settings differ from the published ones: {', '.join(changes)}" if changes else ""

    def with_published(self, metric: Metric | None, published: Metric | None) -> Metric | None:
        """Attach the published number to a result if they are comparable; limited results get none."""
        if metric is None or published is None or metric.limited or self.why_incomparable:
            return metric
        return replace(metric, published=published.mean)

    def group_by_title(self, column: str = "") -> dict[str, list[Variant]]:
        """Group the variants by title, the reference last; titles that would be equal get the keys except `column`."""
        names = [variant.name for variant in self.variants]
        groups: dict[str, list[Variant]] = {}
        for variant, name in zip(self.variants, names, strict=True):
            words = [f"{key} {value}" for key, value in variant.key.items() if key != column]
            parts = [name, *words] if names.count(name) > 1 else [name]
            groups.setdefault(", ".join(parts), []).append(variant)
        last = choose_reference((variant.method for variant in self.variants), self.options.reference) if groups else ""
        # False sorts before True, and the sort is stable: only the reference moves.
        return dict(sorted(groups.items(), key=lambda group: group[1][0].method == last))

    @cached_property
    def by_title(self) -> dict[str, Variant]:
        """The variants by title."""
        return {title: variants[0] for title, variants in self.group_by_title().items()}

    def reference(self, column: str = "") -> str:
        """Return the title of `group_by_title` that plots highlight; "" for a single method."""
        titled = {title: variants[0] for title, variants in self.group_by_title(column).items()}
        is_single = len({variant.method for variant in self.variants}) < 2
        return "" if is_single else reference_title(titled, self.options.reference)

    def rows(self, variant: Variant, dataset: str = "") -> pd.DataFrame:
        """Return the rows of one variant, optionally of one training data set."""
        selected = self.frame.number == self.variants.index(variant)
        return self.frame[selected & (self.frame.dataset == dataset) if dataset else selected]

    def complete_rows(self, variant: Variant) -> pd.DataFrame:
        """Return the rows of one variant on targets on which every chosen seed has a result."""
        rows, number = self.rows(variant), self.variants.index(variant)
        tasks = zip(rows.dataset, rows.target, strict=True)
        return rows.loc[[(number, *task, "accuracy") in self._metrics for task in tasks]]

    @cached_property
    def _metrics(self) -> dict[tuple[int, str, str, str], Metric]:
        """Metrics over seeds by variant, data set, target and column. Limited results count only if all are limited."""
        metrics: dict[Any, Metric] = {}
        for key, rows in self.frame.groupby(["number", "dataset", "target"]):
            for column in ("accuracy", MACRO, *MEASURES):
                # A mean over fewer seeds than were asked for is a missing cell.
                if metric := metric_over_seeds(rows, column, self.options.seeds):
                    metrics[*key, column] = metric
        return metrics

    def metric(self, variant: Variant, dataset: str, target: Target, column: str = "accuracy") -> Metric | None:
        """Return a column over seeds; None unless every chosen seed has a result, all or none limited."""
        return self._metrics.get((self.variants.index(variant), dataset, str(target), column))

    def on_classes(
        self, variant: Variant, dataset: str, classes: Classes = "all", column: str = "accuracy"
    ) -> Metric | None:
        """Return a column on classes of the data set trained on, for AVERAGE the mean over data sets."""
        sets = self.options.datasets if dataset == AVERAGE else (dataset,)
        return average([self.metric(variant, name, Target(name, classes), column) for name in sets])

    def halves(
        self, variant: Variant, dataset: str, column: str = "accuracy"
    ) -> tuple[Metric | None, Metric | None, Metric | None]:
        """Return base and novel accuracy, and their harmonic mean; for AVERAGE those of accuracies averaged first."""
        base = self.on_classes(variant, dataset, "base", column)
        novel = self.on_classes(variant, dataset, "novel", column)
        return base, novel, harmonic(base, novel)

    def hm(self, variant: Variant, dataset: str) -> Metric | None:
        """Return the harmonic mean; for AVERAGE the mean of the data sets' HMs, the other reading of an average HM."""
        sets = self.options.datasets if dataset == AVERAGE else (dataset,)
        return average([self.halves(variant, name)[2] for name in sets])


def write_plan(folder: Path, options: SuiteOptions, runs: Sequence[SuiteRun]) -> None:
    """Write the planned runs of a suite with these options to the suite's folder."""
    # The reference only changes tables: another one must not invalidate the plan.
    shown = replace(options, reference="").to_json()
    write_json(folder / PLAN, {"options": shown, "runs": RUNS.dump_python(tuple(runs), mode="json")})


def read_plan(folder: Path, options: SuiteOptions) -> tuple[SuiteRun, ...]:
    """Read the planned runs of a suite with these options; empty if others or none were planned last."""
    try:
        document = json.loads(read_regular(folder / PLAN))
        is_current = document["options"] == replace(options, reference="").to_json()
        return RUNS.validate_json(json.dumps(document["runs"])) if is_current else ()
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ()


def _list_variants(runs: Sequence[SuiteRun]) -> list[Variant]:
    # Variants contain dicts and cannot be hashed.
    return list({repr(run.variant): run.variant for run in runs}.values())


def reference_title(titled: Mapping[str, Variant], chosen: str) -> str:
    """Return the title of the method of `choose_reference`, unchanged if there is such a variant, else its first."""
    method = choose_reference((variant.method for variant in titled.values()), chosen)
    titles = [title for title, variant in titled.items() if variant.method == method]
    return next((title for title in titles if not titled[title].changed), titles[0])
