"""Define a suite: an experiment as a list of runs, their evaluation targets, and its tables and plots."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results.profiles import Profile
from benchmarks.results.variant import SuiteOptions, SuiteRun, Variant
from cluster.run import RunSpec, validation_targets
from procap.errors import UsageError
from runner.config import RuntimeConfig, Target
from runner.run_collection import COLLECTION_NAME
from shards.default_paths import data_root

if TYPE_CHECKING:
    from benchmarks.plots.style import Plots
    from benchmarks.results.suite import SuiteResults
    from benchmarks.tables.table import Table


def unchanged(options: SuiteOptions, method: str) -> list[Variant]:
    """Return the method without changes."""
    return [Variant(method)]


def halves(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """Return base and novel test images of the data set that was trained on."""
    return Target(dataset, "base"), Target(dataset, "novel")


def all_classes(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """Return all test images of the data set that was trained on."""
    return (Target(dataset, "all"),)


@dataclass(frozen=True)
class Suite:
    """An experiment: its runs for given options, and the tables and plots of their results.

    name, title: for the command line and for headings.
    methods, seeds: the defaults. datasets: those trained on, by profile; all of a profile that is not named.
    classes: the classes trained on. class_choices: what `--classes` may name instead; none: nothing.
    task: whose published recipes count, see `plan_run`.
    held_out: also train on half of the base classes and validate on both halves, as `procap sweep --metric held-out`.
    variants: the variants of a method. trains: whether they are runs; else `finish` measures them by itself.
    targets: the evaluation targets of a run on a data set.
    tables, plots: make its tables and plots.
    finish: makes further results when all runs are done; the flag says whether to make them again.
    quick_datasets, quick_seeds: shorter lists under `--quick`, unless they are empty.
    published: the file of `results/published/` with published numbers; `prompt_picture` is a caption.
    typed: its name on the command line if that is not `name`: a file, or the name that a package gives it.
    flags: makes the flags of its command from options, if they are not those of other suites.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    tables: Callable[[SuiteResults], list[Table]]
    seeds: tuple[int, ...] = (1, 2, 3)
    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: str = "base"
    class_choices: tuple[str, ...] = ()
    held_out: bool = False
    task: str | None = None
    variants: Callable[[SuiteOptions, str], Sequence[Variant]] = unchanged
    trains: bool = True
    targets: Callable[[SuiteOptions, str], tuple[Target, ...]] = halves
    plots: Callable[[SuiteResults], Plots] | None = None
    finish: Callable[[SuiteResults, RuntimeConfig, bool], None] | None = None
    quick_datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quick_seeds: tuple[int, ...] = ()
    published: str = ""
    typed: str = ""
    flags: Callable[[SuiteOptions], list[str]] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(COLLECTION_NAME, self.name):
            raise UsageError(f"a suite cannot be called '{self.name}': letters, digits, dots, dashes, underscores")

    @property
    def heading(self) -> str:
        """The title with a capital letter."""
        return self.title[:1].upper() + self.title[1:]

    def options(self, profile: Profile, *, quick: bool = False, **more: Any) -> SuiteOptions:
        """Return the suite's defaults in `profile`; `more` are fields of SuiteOptions, None keeps the default."""
        datasets = self.quick_datasets.get(profile.name) if quick else None
        own: dict[str, Any] = {
            "datasets": datasets or self.datasets.get(profile.name, profile.datasets),
            "methods": self.methods,
            "seeds": (self.quick_seeds if quick else ()) or self.seeds,
        }
        given = {name: value for name, value in more.items() if value is not None}
        return SuiteOptions(profile, **own | given, quick=quick)

    def trained_classes(self, options: SuiteOptions) -> str:
        """Return the classes trained on. Raises UsageError for a choice that the suite does not offer."""
        if options.classes and options.classes not in self.class_choices:
            known = f"one of {', '.join(self.class_choices)}" if self.class_choices else f"{self.classes} alone"
            raise UsageError(f"--classes {options.classes}: {self.name} has its own classes to train on, {known}")
        return options.classes or self.classes

    def plan(self, options: SuiteOptions) -> list[SuiteRun]:
        """List every run, data set by data set; a run that two variants share is listed for both."""
        chosen = self.trained_classes(options)
        variants = [variant for method in options.methods for variant in self.variants(options, method)]
        if len(options.shots) > 1 and any(variant.shots is None for variant in variants):
            listed = ",".join(map(str, options.shots))
            raise UsageError(f"--shots {listed}: {self.name} takes one number; few-shot draws curves over several")
        for one, other in combinations(variants, 2):
            if (one.name, one.key) == (other.name, other.key) and one != other:
                raise UsageError(f"two variants are called '{one.name}': give each a title or a key of its own")
        runs: list[SuiteRun] = []
        for dataset in options.datasets if self.trains else ():
            trainings = {chosen: tuple(map(str, self.targets(options, dataset)))}
            if self.held_out:
                trainings["dev-base"] = validation_targets(dataset, "dev-base")
            for variant, (classes, targets) in product(variants, trainings.items()):
                try:
                    configs = [options.run(variant, dataset, seed, classes, self.task) for seed in options.seeds]
                except UsageError as error:
                    if not variant.key:
                        raise
                    raise UsageError(f"suite '{self.name}', variant '{variant.name}': {error}") from error
                runs += [
                    SuiteRun(variant, dataset, config.seed, RunSpec(config=config, targets=targets))
                    for config in {config.path: config for config in configs}.values()
                ]
        return runs

    def command(self, options: SuiteOptions, results: str | Path) -> str:
        """Return the command line that runs the suite with these options."""
        words = ["procap", "bench", self.typed or self.name, *(self.flags or self._changed_flags)(options)]
        words += ["--data", str(options.data)] if options.data and options.data != data_root("") else []
        return shlex.join([*words, "--results", str(results)])

    def _changed_flags(self, options: SuiteOptions) -> list[str]:
        own = self.options(options.profile, quick=options.quick, data=options.data)
        words = ["--profile", options.profile.name, *(["--quick"] if options.quick else [])]
        for name in ("datasets", "methods", "seeds", "shots"):
            chosen = ",".join("full" if name == "shots" and not one else str(one) for one in getattr(options, name))
            words += [f"--{name}", chosen] if getattr(options, name) != getattr(own, name) else []
        for name in ("recipe", "classes", "backbone", "pretrained", "precision"):
            words += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
        words += [word for option in options.option_flags for word in ("--option", option)]
        words += options.eval_settings.flags
        return words + (["--epochs", str(options.overrides["epochs"])] if "epochs" in options.overrides else [])
