"""What a suite is: an experiment as a list of runs, where each is evaluated, and how they are laid out in tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results.scores import TITLES
from benchmarks.suites.profiles import Profile, find_profile
from cluster.job import RunSpec
from procap.errors import UsageError, UserError
from runner.collection import COLLECTION_NAME
from runner.config import RunConfig, RuntimeConfig, Target, plan_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.suites.done import SuiteResults
    from benchmarks.tables.table import Sheet


SHOTS = 16
"""Training images per class where neither an variant nor a person says how many; those of all published figures."""


@dataclass(frozen=True)
class Variant:
    """One of the things that a suite compares: a method, and what is changed of it.

    key: what varies within the suite, by name, as tables and figures look it up: {"n_ctx": 8}. options are the
    method's, overrides the recipe's. recipe: "published" or "procap" where the suite prescribes one. part: share of the
    epochs is trained. shots: where the suite prescribes how many.
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
        """Whether it is another method than the one whose figures the paper's main tables print."""
        control = self.recipe == "procap" and self.method not in ("procap", "zeroshot")
        return control or bool(self.options or self.overrides) or self.part != 1.0 or self.shots not in (None, SHOTS)


@dataclass(frozen=True)
class SuiteOptions:
    """What a person may choose of any suite. recipe: empty for the profile's; data: where their own sets are packed.

    shots: of all runs, or those of a curve, for a suite that draws one; 0 takes every image. Empty: the suite's own.
    """

    profile: Profile
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    shots: tuple[int, ...] = ()
    recipe: str = ""
    quick: bool = False
    backbone: str = ""
    pretrained: str | None = None
    precision: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None

    def run(self, variant: Variant, dataset: str, seed: int, classes: str, task: str | None = None) -> RunConfig:
        """The run of one variant on one data set, as the profile wants it.

        The profile's own changes of the recipe belong to its recipe; another that is asked for stays as published.
        """
        profile, method = self.profile, variant.method
        recipe = variant.recipe or self.recipe or profile.recipe
        changes = dict(profile.changes) if recipe == profile.recipe else {}
        changes |= profile.quick if self.quick else {}
        if recipe == profile.recipe and method in profile.rates:
            changes["lr"] = profile.rates[method]
        planned = partial(
            plan_run,
            method=method,
            dataset=dataset,
            classes=classes,
            shots=(*self.shots, SHOTS)[0] if variant.shots is None else variant.shots,
            seed=seed,
            backbone=self.backbone or profile.backbone,
            pretrained=self.pretrained if self.backbone else profile.pretrained,
            precision=self.precision or profile.precision,
            recipe=recipe,
            task=task,
            options=variant.options,
            data=self.data,
        )
        changes |= {**self.overrides, **variant.overrides}
        config = planned(overrides=changes)
        epochs = config.recipe.epochs
        further = {} if variant.part == 1.0 else {"epochs": max(1, round(variant.part * epochs))}
        epochs = further.get("epochs", epochs)
        shortened = "epochs" in {**changes, **further} and "warmup_epochs" not in {
            **self.overrides,
            **variant.overrides,
        }
        if shortened and 0 < epochs <= config.recipe.warmup_epochs:
            # What is all warm-up teaches nothing.
            further["warmup_epochs"] = epochs - 1
        return planned(overrides={**changes, **further}) if further else config

    def plain(self) -> dict[str, Any]:
        """As JSON, for `settings` of a collection."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("profile", "data")}
        return json.loads(json.dumps({"profile": self.profile.name, **said}))

    @classmethod
    def of_plain(cls, said: Mapping[str, Any], data: Path | None = None) -> SuiteOptions:
        """What `plain` gave. Raises UserError for what is none."""
        try:
            lists = {name: tuple(said[name]) for name in ("datasets", "methods", "seeds", "shots") if name in said}
            return cls(**{**said, "profile": find_profile(said["profile"]), **lists}, data=data)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"a collection whose settings are no options of a suite ({error}); run the suite again"
            ) from error


def plain(options: SuiteOptions, method: str) -> list[Variant]:
    """The method as it is."""
    return [Variant(method)]


def halves(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """Base and novel test images of the data set that was trained on."""
    return Target(dataset, "base"), Target(dataset, "novel")


def everything(options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
    """All test images of the data set that was trained on."""
    return (Target(dataset, "all"),)


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: which variant it is, and what is sent to a machine."""

    variant: Variant
    dataset: str
    seed: int
    spec: RunSpec

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.spec.config.path


Drawings = Mapping[str, Callable[[], "Figure | None"]]


@dataclass(frozen=True)
class Quick:
    """What `--quick` takes of a suite's own lists; nothing given: all of it."""

    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Suite:
    """An experiment: what is run and where it is evaluated, for whatever was chosen, and what is made of it.

    name, title: for the command line and for people. published: the file of published/ that has the paper's figures.
    methods, seeds: what is run unless a person chooses. datasets: those trained on, by profile; all of a profile that
    is not named. classes: which of them are trained on. task: whose published recipes count, see `plan_run`.
    variants: what is compared of a method. targets: where a run on a data set is evaluated.
    sheets: its tables; figures: its figures; finish: what else is made when its runs are done, again if told to.
    typed: the word for it on the command line where that is not its name: a file, or what a package calls it.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    sheets: Callable[[SuiteResults], list[Sheet]]
    seeds: tuple[int, ...] = (1, 2, 3)
    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: str = "base"
    task: str | None = None
    variants: Callable[[SuiteOptions, str], Sequence[Variant]] = plain
    targets: Callable[[SuiteOptions, str], tuple[Target, ...]] = halves
    figures: Callable[[SuiteResults], Drawings] | None = None
    finish: Callable[[SuiteResults, RuntimeConfig, bool], None] | None = None
    quick: Quick = Quick()
    published: str = ""
    typed: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(COLLECTION_NAME, self.name):
            raise UsageError(f"a suite cannot be called '{self.name}': letters, digits, dots, dashes, underscores")

    @property
    def heading(self) -> str:
        """The title, as it begins a line."""
        return self.title[:1].upper() + self.title[1:]

    def options(self, profile: Profile, *, quick: bool = False, **more: Any) -> SuiteOptions:
        """The suite's own options in `profile`; `more` are fields of Choice that are chosen otherwise, None: not."""
        datasets = self.quick.datasets.get(profile.name) if quick else None
        own: dict[str, Any] = {
            "datasets": datasets or self.datasets.get(profile.name, profile.datasets),
            "methods": self.methods,
            "seeds": (self.quick.seeds if quick else ()) or self.seeds,
        }
        return SuiteOptions(
            profile, **own | {name: value for name, value in more.items() if value is not None}, quick=quick
        )

    def plan(self, options: SuiteOptions) -> list[SuiteRun]:
        """Every run, data set by data set; one that two variants share is there twice."""
        variants = [variant for method in options.methods for variant in self.variants(options, method)]
        if len(options.shots) > 1 and any(variant.shots is None for variant in variants):
            listed = ",".join(map(str, options.shots))
            raise UsageError(f"--shots {listed}: {self.name} takes one number; few-shot draws curves over several")
        for number, variant in enumerate(variants):
            if any(
                (variant.name, variant.key) == (other.name, other.key) and variant != other
                for other in variants[:number]
            ):
                raise UsageError(f"two variants are called '{variant.name}': give each a title or a key of its own")
        return [
            SuiteRun(variant, dataset, seed, self._spec(options, variant, dataset, seed))
            for dataset in options.datasets
            for variant in variants
            for seed in options.seeds
        ]

    def _spec(self, options: SuiteOptions, variant: Variant, dataset: str, seed: int) -> RunSpec:
        config = options.run(variant, dataset, seed, self.classes, self.task)
        return RunSpec(config=config, targets=tuple(map(str, self.targets(options, dataset))))
