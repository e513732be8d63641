"""Merge the planned runs of suites, count their images, find what stops a suite, and read its last options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiment.profiles import MINI, find_profile
from benchmarks.experiment.suite import Suite, SuiteOptions, SuiteRun
from procap.errors import UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.run_collection import COLLECTIONS, Collection, read_collection
from runner.run_state import RunSpec, RunState
from shards.image_selection import select_labels
from shards.resolve import kind_of_name, resolve_dataset


@dataclass(frozen=True)
class SuitePlan:
    """A suite with its options and its runs."""

    suite: Suite
    options: SuiteOptions
    runs: Sequence[SuiteRun]

    @property
    def collection(self) -> Collection:
        """The record of the suite next to its tables."""
        runs = tuple(dict.fromkeys(run.path for run in self.runs))
        suite, settings = self.suite, self.options.to_json()
        return Collection(kind="suite", name=suite.name, runs=runs, settings=settings, source=suite.source)


def last_options(suite: Suite, results: Path, data: Path | None = None, *, profile: str = "") -> SuiteOptions:
    """Return the options of the last `procap bench` of a suite, else its default options in `profile`.

    Raises UserError if another file, or another content of the file, defined the suite then.
    """
    collection = read_collection(results / COLLECTIONS / "suite" / suite.name)
    if collection and collection.source not in ("", suite.source):
        raise UserError(
            f"the results of suite '{suite.name}' are of {collection.source}, not of {suite.source}: repeat procap "
            "bench with this file, or give its suite another name"
        )
    if collection and collection.settings and profile in ("", collection.settings.get("profile")):
        return SuiteOptions.from_json(collection.settings, data)
    return suite.options(find_profile(profile or MINI.name), data=data)


def merge_runs(plans: Iterable[SuitePlan]) -> list[RunSpec]:
    """List every run of the plans once, with the evaluation targets of all plans."""
    configs: dict[str, RunConfig] = {}
    targets: dict[str, dict[str, None]] = {}
    for run in (run for plan in plans for run in plan.runs):
        # Compare paths, not configs, as equal recipes may have different names.
        configs.setdefault(run.path, run.spec.config)
        targets.setdefault(run.path, {}).update(dict.fromkeys(run.spec.targets))
    return [RunSpec(config=config, targets=tuple(targets[path])) for path, config in configs.items()]


def count_images_left(run: RunSpec, state: RunState, runtime: RuntimeConfig) -> float:
    """Count the images that are left for a run: those of its training in all epochs, and of its open targets.

    Halves of the classes count as all of them; infinite for an unknown data set.
    """
    config, images = run.config, 0.0
    with suppress(UserError):
        if not state.is_trained:
            dataset = resolve_dataset(config.dataset, runtime.data)
            count = dataset.counts.get("train", 0)
            drawn = min(count, config.shots * dataset.num_classes) if config.shots else count
            images += drawn * config.recipe.passes(max(1, drawn))
        for target in map(Target.parse_unchecked, state.open):
            count = resolve_dataset(target.dataset, runtime.data).counts.get(target.split, 0)
            images += min(count, runtime.limit or count)
        return images
    return math.inf


def find_obstacle(suite: Suite, options: SuiteOptions, *, several: bool = False) -> str:
    """Explain why a suite cannot run on a user's data set; "" if it can. several: it may not need further data sets."""
    if not options.methods:
        return "no method reads images alone: name --methods"
    for name in (name for name in options.datasets if kind_of_name(name) == "own"):
        dataset, targets = resolve_dataset(name, options.data), suite.targets(options, name)
        further = sorted({target.dataset for target in targets} - {name, *options.datasets})
        if further and several:
            return f"it needs data sets besides '{name}': {', '.join(further)}"
        tested = [target.classes for target in targets if target.dataset == name]
        for classes in dict.fromkeys((suite.classes, *tested)):
            # With one class every answer is right.
            if len(select_labels(range(dataset.num_classes), classes)) < 2:
                return f"'{name}' has fewer than 2 classes in its part {classes}"
    return ""
