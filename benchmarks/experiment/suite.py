"""Define an experiment: a suite, the variants that it compares, its options, and the runs that it plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from benchmarks.experiment.profiles import Profile, find_profile
from benchmarks.experiment.published import COMPONENTS
from benchmarks.experiment.titles import title_method
from cluster.trial import validation_targets
from procap.errors import UsageError, UserError, describe_invalid
from procap.methods import METHODS, learns_from_features
from procap.recipe import Recipe
from runner.config import EvalSettings, RunConfig, Target
from runner.planning import can_classify, check_read, control_options, plan_run
from runner.run_state import RunSpec
from runner.session import Session
from shards.uneven_samples import BALANCED

SHOTS = 16
"""Training images per class unless a variant or the user says otherwise, as in all published numbers."""
INDEPENDENT: Mapping[str, Any] = {"deep_tokens": "independent", "inject": "levels"}
"""Options of ProCAP with a token set for each layer, which enters that layer."""
ALL_OFF: Mapping[str, Any] = {**dict.fromkeys(COMPONENTS, False), **INDEPENDENT}
"""Options of ProCAP without any of its components: deep prompts of both towers, a token set for each layer."""
QUICK_VIEWS = 2
"""Random views of an image under `--quick`, of a method that encodes several."""


def _choices_by_origin(options: SuiteOptions, variant: Variant, recipe_name: str) -> dict[str, dict[str, Any]]:
    """List the arguments of `plan_run` by where they come from: later ones replace earlier ones, empty ones do not."""
    from procap.methods import method_class

    profile, method, is_fast = options.profile, variant.method, learns_from_features(variant.method)
    has_views = options.quick and "views" in method_class(method).Options.model_fields
    in_profiles_recipe = recipe_name == profile.recipe and not is_fast
    rate = method_class(method).mini_lr if in_profiles_recipe and profile.is_generated and method in METHODS else None
    return {
        "profile": {
            "backbone": profile.backbone,
            # The profile's weights are those of its backbone; a different backbone has its own default.
            "pretrained": "" if options.backbone else profile.pretrained,
            "precision": profile.precision,
            "shots": SHOTS,
            "overrides": profile.overrides if in_profiles_recipe else {},
            "options": profile.options(method),
        },
        "rate of the profile": {"overrides": {"lr": rate} if rate else {}},
        "--quick": {
            "overrides": profile.quick if options.quick and not is_fast else {},
            "options": {"views": QUICK_VIEWS} if has_views else {},
        },
        "recipe by name": {"options": control_options(method, variant.recipe or options.recipe)},
        "user": {
            **{name: getattr(options, name) for name in ("backbone", "pretrained", "precision")},
            "shots": options.shots[0] if options.shots else None,
            "overrides": options.overrides,
            "options": options.options.get(method, {}),
        },
        # What a suite compares, whatever the user chooses.
        "variant": {
            name: getattr(variant, name) for name in ("precision", "shots", "sampling", "overrides", "options")
        },
    }


def _shorten(recipe: Recipe, part: float, *, keep_warmup: bool) -> dict[str, int]:
    """Return the changes of a recipe of which a `part` is trained, with a warm-up that ends before the training."""
    # A change of `epochs` would turn a recipe of iterations into passes over the images.
    unit, length = ("iterations", recipe.iterations) if recipe.iterations else ("epochs", recipe.epochs)
    changes = {} if part == 1.0 else {unit: max(1, round(part * length))}
    epochs = changes.get("epochs", recipe.epochs)
    if recipe.warmup != "none" and epochs <= recipe.warmup_epochs and not keep_warmup:
        # With epochs of warm-up only, the learning rate would never reach its full value.
        changes["warmup_epochs"] = epochs - 1
    return changes


@dataclass(frozen=True)
class Variant:
    """A method with changed options or recipe, as a suite compares it.

    key: what varies within the suite, by name: {"n_ctx": 8}. options are the method's, overrides the recipe's. recipe:
    "published" or "procap" if the suite prescribes one. part: share of the epochs to train. shots, sampling,
    precision: as prescribed.
    """

    method: str
    title: str = ""
    key: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    recipe: str = ""
    part: float = 1.0
    shots: int | None = None
    sampling: str = ""
    precision: str = ""

    @property
    def name(self) -> str:
        return self.title or title_method(self.method)

    @property
    def changed(self) -> bool:
        """Whether the variant differs from the method whose numbers the paper's main tables print."""
        control = self.recipe == "procap" and self.method not in ("procap", "zeroshot")
        other = bool(self.options or self.overrides or self.precision) or self.part != 1.0
        other |= self.sampling not in ("", BALANCED)
        return control or other or self.shots not in (None, SHOTS)


@dataclass(frozen=True)
class SuiteOptions:
    """Options that a user may choose for any suite; empty ones take the suite's or the profile's.

    shots: 0 is all. evaluation: the fields of `EvalSettings` that differ from the default. reference: the method that
    statistics compare with the others, see `choose_reference`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    profile: Profile
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    shots: tuple[int, ...] = ()
    recipe: str = ""
    quick: bool = False
    backbone: str = ""
    pretrained: str | None = None
    precision: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""
    data: Path | None = None

    @property
    def eval_settings(self) -> EvalSettings:
        """How the suite's runs are evaluated."""
        return EvalSettings.model_validate(self.evaluation)

    def plan_run(self, variant: Variant, dataset: str, seed: int, classes: str, task: str | None = None) -> RunConfig:
        """Plan the run of a variant on a data set by `_choices_by_origin`."""
        recipe_name = self.choose_recipe_name(variant)
        settings: dict[str, Any] = {"overrides": {}, "options": {}}
        for chosen in _choices_by_origin(self, variant, recipe_name).values():
            for name, value in chosen.items():
                if isinstance(value, Mapping):
                    settings[name] = {**settings[name], **value}
                elif value not in ("", None):
                    settings[name] = value
        settings |= {"recipe": recipe_name, "seed": seed}
        planned = partial(plan_run, method=variant.method, dataset=dataset, classes=classes, task=task, data=self.data)
        config = planned(**settings)
        if not config.recipe.epochs:
            # Without training no recipe is read, and runs with equal results are one.
            read = self.eval_settings.sample_fields(config)
            usual = {"seed": 1, "shots": SHOTS, "sampling": BALANCED}
            return planned(**settings | {name: value for name, value in usual.items() if name not in read})
        check_read([config], variant.overrides)
        # A share of the epochs, and a shorter warm-up, follow from the resolved recipe, which may be the published one.
        changes = _shorten(
            config.recipe, variant.part, keep_warmup="warmup_epochs" in {**self.overrides, **variant.overrides}
        )
        return planned(**settings | {"overrides": settings["overrides"] | changes}) if changes else config

    def choose_recipe_name(self, variant: Variant) -> str:
        """Return the name of the recipe: that of the variant, the user, or the profile.

        The profile's is for the built-in methods for which rates were chosen; plug-ins, and methods that learn from
        features in seconds, have their published one.
        """
        follows_profile = variant.method in METHODS and not learns_from_features(variant.method)
        return variant.recipe or self.recipe or (self.profile.recipe if follows_profile else "published")

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, for `settings` of a collection."""
        # `data` is a folder of this machine, and the profile is known by its name.
        names = [field.name for field in fields(self) if field.name not in ("profile", "data")]
        values = {name: getattr(self, name) for name in names}
        return json.loads(json.dumps({"profile": self.profile.name, **values}))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], data: Path | None = None) -> SuiteOptions:
        """Convert back from `to_json`. Raises UserError for anything else."""
        try:
            profile = find_profile(str(values.get("profile")))
            options = TypeAdapter(cls).validate_python({**values, "profile": profile, "data": data})
            EvalSettings.model_validate(options.evaluation)
        except ValidationError as error:
            raise UserError(f"{describe_invalid(error)} in the settings of a suite; run it again") from error
        return options


@dataclass(frozen=True)
class SuiteRun:
    """One run of a suite: its variant, and the run that is sent to a machine."""

    variant: Variant
    dataset: str
    seed: int
    spec: RunSpec

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.spec.config.path


@dataclass(frozen=True)
class Suite:
    """An experiment: its runs for given options, and the tables and plots of their results.

    name, title: for the command line and for headings.
    methods, seeds: the defaults. datasets: those trained on, by profile; all of a profile that is not named.
    classes: the classes trained on. task: whose published recipes count, see `plan_run`.
    dev_runs: also train on half of the base classes and validate on both halves, as `procap sweep --metric held-out`.
    variants: those of a method, by default itself. trains: whether they are runs; else `finish` measures them.
    tested: the classes, or classes:split, of the data set trained on that are evaluated.
    other_sets: further data sets, of which all classes are evaluated.
    tables, plots: make its tables and plots from a `SuiteResults`.
    finish: makes further results from a `SuiteResults` when all runs are done; its flag: make them again.
    quick_datasets, quick_seeds: shorter lists under `--quick`; data sets by profile, as above; one seed by default.
    unread: flags of `procap bench` without effect on the suite, which its command refuses.
    source: name and digest of the user's file that defines it, as `load_suite` sets it; empty for one of ours.
    """

    name: str
    title: str
    methods: tuple[str, ...]
    tables: Callable[[Any], list[Any]]
    seeds: tuple[int, ...] = (1, 2, 3)
    datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: str = "base"
    dev_runs: bool = False
    task: str | None = None
    variants: Callable[[SuiteOptions, str], Sequence[Variant]] = lambda options, method: [Variant(method)]
    trains: bool = True
    tested: tuple[str, ...] = ("base", "novel")
    other_sets: Callable[[SuiteOptions], Sequence[str]] = lambda options: ()
    plots: Callable[[Any], Mapping[str, Any]] | None = None
    finish: Callable[[Any, Session, bool], None] | None = None
    quick_datasets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quick_seeds: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()
    source: str = ""

    @property
    def heading(self) -> str:
        """The title with a capital letter."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def has_default_methods(self) -> bool:
        """Whether its methods are a default: a user's suite names its own, and what is timed need not be accurate."""
        return self.trains and not self.source

    def with_image_methods(self, methods: tuple[str, ...]) -> Suite:
        """Compare `methods`, which read no class names, instead; none if the suite is about parts of its methods."""
        if not self.has_default_methods:
            return self
        return replace(self, methods=methods if "zeroshot" in self.methods else ())

    def options(self, profile: Profile, *, quick: bool = False, **more: Any) -> SuiteOptions:
        """Return the suite's defaults in `profile`; `more` are fields of SuiteOptions, None keeps the default."""
        datasets = self.quick_datasets.get(profile.name) if quick else None
        defaults: dict[str, Any] = {
            "datasets": datasets or self.datasets.get(profile.name, profile.datasets),
            "methods": self.methods,
            "seeds": (self.quick_seeds or self.seeds[:1]) if quick else self.seeds,
        }
        chosen = {name: value for name, value in more.items() if value is not None}
        return SuiteOptions(profile, **defaults | chosen, quick=quick)

    def targets(self, options: SuiteOptions, dataset: str) -> tuple[Target, ...]:
        """Return the evaluation targets of a run on a data set."""
        parts = [Target.parse_unchecked(f"{dataset}:{part}") for part in self.tested]
        return tuple(dict.fromkeys([*parts, *map(Target, self.other_sets(options))]))

    def plan(self, options: SuiteOptions) -> list[SuiteRun]:
        """List every run, data set by data set; a run that two variants share is listed for both."""
        variants = [variant for method in options.methods for variant in self.variants(options, method)]
        if len(options.shots) > 1 and any(variant.shots is None for variant in variants):
            listed = ",".join(map(str, options.shots))
            raise UsageError(f"--shots {listed}: {self.name} takes one number; few-shot draws curves over several")
        for first, second in combinations(variants, 2):
            if (first.name, first.key) == (second.name, second.key) and first != second:
                raise UsageError(f"two variants are called '{first.name}': give each a different title or key")
        # Also on half of the base classes the recipe is that of the suite's classes.
        task = self.task or ("few-shot" if self.classes == "all" else None)
        runs: list[SuiteRun] = []
        for dataset in options.datasets if self.trains else ():
            # Evaluation targets by the classes trained on; each entry is a separate training of every variant and seed.
            trainings = {self.classes: tuple(map(str, self.targets(options, dataset)))}
            if self.dev_runs:
                trainings["dev-base"] = validation_targets(dataset, "dev-base")
            for variant, (classes, targets) in product(variants, trainings.items()):
                configs = [options.plan_run(variant, dataset, seed, classes, task) for seed in options.seeds]
                parsed = map(Target.parse_unchecked, targets)
                known = tuple(str(target) for target in parsed if can_classify(configs[0], target, options.data))
                runs += [
                    SuiteRun(variant, dataset, config.seed, RunSpec(config=config, targets=known))
                    # The configurations of a method that draws nothing are equal for all seeds: they are one run.
                    for config in {config.path: config for config in configs}.values()
                ]
        return runs
