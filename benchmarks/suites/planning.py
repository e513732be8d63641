"""Plan the runs of one or several suites from options, merge them, and find recorded ones in a results folder."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from benchmarks.console.output import plural, quote
from benchmarks.results.frame import sort_methods
from benchmarks.results.profiles import MINI, PROFILES, find_profile
from benchmarks.results.variant import SHOTS, SuiteOptions, SuiteRun
from benchmarks.suites import SUITES, load_suite, suite_paths
from benchmarks.suites.suite import Suite
from cluster.run import RunSpec
from procap.errors import UsageError, UserError, unknown_name
from procap.methods import METHODS, loading_error, method_paths
from runner.config import RunConfig, RuntimeConfig, Target
from runner.run_collection import COLLECTIONS, Collection, find_collections, read_collection
from runner.run_folders import OtherContent, RunFolder, check_content, check_training_content, find_runs
from shards.catalogue import Dataset
from shards.default_paths import data_root
from shards.fewshot import check_shots, select_labels
from shards.reader import open_dataset
from shards.resolve import is_packed, kind_of_name, resolve_dataset

T = TypeVar("T")


@dataclass(frozen=True)
class SuitePlan:
    """A suite with its options and its runs."""

    suite: Suite
    options: SuiteOptions
    runs: Sequence[SuiteRun]

    @classmethod
    def make(cls, suite: Suite, options: SuiteOptions) -> SuitePlan:
        """Plan the runs. An error in the file of a user's own suite becomes a UsageError."""
        try:
            return cls(suite, options, suite.plan(options))
        except UserError:
            raise
        except Exception as error:
            if suite.name in SUITES:
                raise
            raise UsageError(f"the plan of suite '{suite.name}' fails: {type(error).__name__}: {error}") from error

    @property
    def collection(self) -> Collection:
        """What is recorded of the suite beside its tables."""
        runs, typed = tuple(dict.fromkeys(run.path for run in self.runs)), self.suite.typed
        file = str(Path(typed).resolve()) if typed.endswith(".py") else ""
        return Collection(kind="suite", name=self.suite.name, runs=runs, settings=self.options.to_json(), file=file)


def find_suite(name: str, results: Path) -> Suite:
    """Load a suite by its name or file, or from the file that is recorded with its runs below `results`.

    Raises UsageError if there is no such suite, or its file is not there any more or may come from other people.
    """
    known = name.endswith(".py") or name in suite_paths()
    collection = None if known else read_collection(results / COLLECTIONS / "suite" / name)
    if collection is None or not collection.file:
        if not known:
            made = {folder.name for folder in find_collections(results)}
            raise unknown_name("suite", name, sorted({*suite_paths(), *made} - {name}))
        return load_suite(name)
    # The file is code, and results can come from other people.
    file = Path(collection.file)
    if not file.is_file() or file.resolve().is_relative_to(results.resolve()):
        raise UsageError(
            f"suite '{name}' was run from {file}, which is not there or lies among the results: name its file"
        )
    if file.stat().st_uid not in (0, os.geteuid()):
        raise UsageError(f"suite '{name}' was run from {file}, which belongs to another user: name its file instead")
    suite = load_suite(collection.file)
    if suite.name != name:
        raise UsageError(f"{file}, from which suite '{name}' was run, now defines suite '{suite.name}'")
    return suite


def merge_runs(plans: Iterable[SuitePlan]) -> list[RunSpec]:
    """List every run of the plans once, with the evaluation targets of all plans."""
    configs: dict[str, RunConfig] = {}
    targets: dict[str, dict[str, None]] = {}
    for run in (run for plan in plans for run in plan.runs):
        # Compare paths, not configs, as equal recipes may have different names.
        configs.setdefault(run.path, run.spec.config)
        targets.setdefault(run.path, {}).update(dict.fromkeys(run.spec.targets))
    return [RunSpec(config=config, targets=tuple(targets[path])) for path, config in configs.items()]


class RunState(NamedTuple):
    """What exists of a run. trained: share of its training that is saved; open: targets without a current result."""

    status: Literal["finished", "resume", "new", "repeat", "other data", "other code"]
    trained: float
    open: list[Target]


def read_state(
    config: RunConfig, targets: Sequence[Target], runtime: RuntimeConfig, *, force: bool = False
) -> RunState:
    """Read what exists of a run, with `force` to be repeated.

    Raises UserError for a file that cannot be read, and OtherContent.
    """
    folder = RunFolder(runtime.results / config.path)
    training = folder.train()
    is_started = training is not None or folder.state.is_dir()
    if force:
        return RunState("repeat" if is_started else "new", 0.0, [*targets])
    if training is not None:
        check_training_content(config, training, runtime.data)
        settings = runtime.evaluation.for_run(config)
        results = {target: folder.evaluation(target, settings) for target in targets}
        current = {target: one for target, one in results.items() if one and one.is_current(training, runtime.limit)}
        for target, one in current.items():
            check_content(config, target.dataset, one.manifest_digest, runtime.data)
        # A run of other code or files than those here is not done: its training is refused with what to do.
        if training.changed_code(config):
            current = {}
        elif training.files:
            # This imports torch.
            from runner.setup import changed_file

            current = {} if changed_file(config, training.files) else current
        return RunState("finished", 1.0, [target for target in targets if target not in current])
    progress = folder.progress() if is_started else None
    trained = progress.step / progress.steps if progress and progress.steps else 0.0
    return RunState("resume" if is_started else "new", trained, [*targets])


def is_done(run: RunSpec, runtime: RuntimeConfig) -> bool:
    """Whether the run and all its evaluations exist, with unreadable files as missing. Raises OtherContent."""
    try:
        state = read_state(run.config, [Target.parse_unchecked(target) for target in run.targets], runtime)
    except OtherContent:
        raise
    except UserError:
        return False
    return state.status == "finished" and not state.open


def count_images(name: str, classes: str, split: str, data: Path, *, most: int = 0) -> tuple[Dataset, int, float]:
    """Return a data set, the number of chosen classes, and of images in a split, `most` of each class (0: all).

    Those of a part of the classes are exact if the set is packed, else estimated, as for `most`, from equal classes.
    """
    dataset = resolve_dataset(name, data)
    labels = select_labels(range(dataset.classes), classes)
    chosen = len(labels)
    images = dataset.counts.get(split, 0) * chosen / dataset.classes
    if chosen < dataset.classes and not most and is_packed(data, dataset.name):
        with suppress(UserError):
            images = float(np.isin(open_dataset(data, dataset.name).labels(split), labels).sum())
    return dataset, chosen, min(images, most * chosen) if most else images


def find_obstacle(suite: Suite, options: SuiteOptions, *, several: bool = False) -> str:
    """Explain why a suite cannot run on an own data set; "" if it can.

    several: other suites run too; reject one that needs further data sets.
    """
    for name in options.datasets:
        if kind_of_name(name) != "own":
            continue
        dataset, targets = resolve_dataset(name, options.data), suite.targets(options, name)
        if "train" not in dataset.counts:
            return f"'{name}' has no images to train on"
        if not suite.trains:
            try:
                check_shots(open_dataset(data_root("") if options.data is None else options.data, name), SHOTS)
            except UsageError as error:
                reason = str(error).partition(": ")[2].partition(";")[0]
                return f"it always trains on {SHOTS} images per class: {reason}"
            continue
        others = sorted({target.dataset for target in targets} - {name, *options.datasets})
        if others and several:
            return f"it needs other data sets than '{name}': {', '.join(others)}"
        for classes in dict.fromkeys(
            (suite.trained_classes(options), *(t.classes for t in targets if t.dataset == name))
        ):
            if (count := len(select_labels(range(dataset.classes), classes))) < 2:
                has = f"'{name}' has {dataset.classes} class{'es' * (dataset.classes != 1)}"
                return f"{has}, of which {classes} would be {count}; 2 are needed"
    return ""


def last_options(suite: Suite, results: Path, data: Path | None = None, *, profile: str = "") -> SuiteOptions:
    """Return the options of the last `procap bench` of a suite, else its default options in `profile`."""
    collection = read_collection(results / COLLECTIONS / "suite" / suite.name)
    if collection and collection.settings and profile in ("", collection.settings.get("profile")):
        return SuiteOptions.from_json(collection.settings, data)
    return suite.options(find_profile(profile or MINI.name), data=data)


def recorded_options(
    suite: Suite, collection: Collection | None, results: Path, data: Path | None = None, *, profile: str = ""
) -> SuiteOptions:
    """Return the options of the suite's last run, of a requested `profile` or any, with the defaults of its runs.

    If none are recorded, return the default options whose plan has most of the existing runs. Recorded methods that
    cannot be used here are left out, see `describe_unusable`; raises UsageError if there are no others.
    """
    settings = collection.settings if collection else {}
    if collection and settings and profile in ("", settings.get("profile")):
        options = SuiteOptions.from_json(settings, data)
        unusable = find_unusable(options.methods)
        options = replace(options, methods=tuple(name for name in options.methods if name not in unusable))
        if not options.methods:
            raise UsageError(describe_unusable(collection))
        return options
    existing = {folder.path.relative_to(results).as_posix() for folder in find_runs(results)}
    profiles = [find_profile(profile)] if profile else PROFILES.values()
    candidates = [suite.options(one, quick=quick, data=data) for one in profiles for quick in (False, True)]

    def count_existing(options: SuiteOptions) -> tuple[int, int]:
        planned = {run.path for run in suite.plan(options)}
        return len(planned & existing), sum(path.split("/")[1] in options.profile.datasets for path in existing)

    return max(candidates, key=count_existing)


def find_unusable(methods: Iterable[str]) -> dict[str, str]:
    """Map those of the methods that cannot be loaded here to the reason, empty for one that is not installed."""
    errors = {name: loading_error(name) for name in methods if name not in METHODS}
    return {name: why if name in method_paths() else "" for name, why in errors.items() if why}


def describe_unusable(collection: Collection) -> str:
    """Name the methods of a suite that cannot be used here, with the reasons; "" if all can."""
    reasons = [
        f"{name}, which {f'cannot be used here ({why})' if why else 'is not installed here'}"
        for name, why in find_unusable(collection.settings.get("methods", ())).items()
    ]
    text = f"suite '{collection.name}' was run with {'; '.join(reasons)}"
    text += f"; {'its' if len(reasons) == 1 else 'their'} rows are left out"
    return f"{text}: repair or install the package, or see all runs with `procap table`" if reasons else ""


def find_other_runs(collection: Collection, results: Path, planned: Iterable[str]) -> tuple[str, ...]:
    """List the finished runs of a suite that are not `planned`, because of other seeds or settings.

    Those of methods that cannot be used here are left out.
    """
    finished = collection.finished(results, without={*planned})
    unusable = find_unusable(path.split("/")[2] for path in finished)
    return tuple(path for path in finished if path.split("/")[2] not in unusable)


def describe_other_runs(plan: SuitePlan, others: Sequence[str], shown: str) -> str:
    """Count the `others` of a suite and name the command for those of other seeds. shown: the results, as typed."""
    name, by_seed = plan.suite.name, dict[int, list[tuple[str, str]]]()
    parts = zip(*(path.split("/") for path in others), strict=True)
    _, datasets, methods, *_ = (tuple(dict.fromkeys(words)) for words in parts)
    wider = replace(plan.options, datasets=datasets, methods=methods)
    numbers = sorted({int(path.rpartition("/seed")[2].partition("-")[0]) for path in others})
    # A data set of earlier runs may not be here any more. Without training the seed of a run is always the same.
    with suppress(UserError):
        known = {*others, *(run.path for run in plan.runs)}
        for run in plan.suite.plan(replace(wider, seeds=tuple(numbers))):
            if run.path in known and run.spec.config.recipe.epochs:
                by_seed.setdefault(run.seed, []).append((run.dataset, run.variant.method))
    text = (
        f"{plural(len(others), 'further run')} of {name} with other seeds or settings (flags or a method's own recipe)"
    )
    if not by_seed:
        return f"{text}: name them as they were trained"
    # Only seeds of the same runs, as a mean needs every seed.
    most = max(by_seed.values(), key=len)
    seeds = [seed for seed, own in by_seed.items() if own == most]
    lists = (",".join(map(str, words)) for words in (dict.fromkeys(name for name, _ in most), methods, seeds))
    flags = "--datasets {} --methods {} --seeds {}".format(*lists)
    return f"{text}: procap table {name} {flags} --results {quote(shown)}"


def join_recorded(plan: SuitePlan, results: Path) -> SuitePlan:
    """Extend a plan to what earlier commands finished with the same settings; tables show the extended plan.

    Data sets and methods are joined. A plan with other seeds or settings stays as it is, and so does that of a
    suite with further results, which belong to its last command.
    """
    suite, options = plan.suite, plan.options
    collection = read_collection(results / COLLECTIONS / "suite" / suite.name)
    if collection is None or not collection.settings or suite.finish:
        return plan
    try:
        earlier = recorded_options(suite, collection, results, options.data)
        alike = replace(earlier, datasets=options.datasets, methods=options.methods)
        if alike.to_json() != options.to_json():
            return plan
        finished = [run for run in suite.plan(earlier) if RunFolder(results / run.path).train_file.exists()]
        joined = replace(
            options,
            datasets=_join(options.datasets, earlier.datasets, {run.dataset for run in finished}),
            methods=sort_methods(_join(options.methods, earlier.methods, {run.variant.method for run in finished})),
        )
        return SuitePlan.make(suite, joined)
    except UserError:
        # The plan or the method of an earlier command is not here any more.
        return plan


def _join(chosen: tuple[T, ...], earlier: tuple[T, ...], finished: Container[T]) -> tuple[T, ...]:
    """Join values with the earlier ones that are finished, in the order of the longer list."""
    kept = tuple(one for one in earlier if one in finished)
    first, second = (chosen, kept) if set(kept) <= set(chosen) else (kept, chosen)
    return tuple(dict.fromkeys((*first, *second)))
