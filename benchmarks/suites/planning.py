"""Plan the runs of one or several suites from options, merge them, and find recorded ones in a results folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results.profiles import PROFILES, find_profile
from benchmarks.results.variant import SuiteOptions, SuiteRun
from benchmarks.suites import SUITES
from benchmarks.suites.suite import Suite
from cluster.run import RunSpec
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.results import RunFolder, find_runs
from runner.run_collection import Collection
from shards.errors import DataError

PATH_PARTS = 6
"""Parts of a run's path: classes, data set, method, backbone, shots, and seed with hash."""


@dataclass(frozen=True)
class SuitePlan:
    """A suite with its options and its runs."""

    suite: Suite
    options: SuiteOptions
    runs: Sequence[SuiteRun]

    @classmethod
    def of(cls, suite: Suite, options: SuiteOptions) -> SuitePlan:
        """Plan the runs. An error in the file of a user's own suite becomes a UsageError."""
        try:
            return cls(suite, options, suite.plan(options))
        except (UserError, DataError):
            raise
        except Exception as error:
            if suite.name in SUITES:
                raise
            raise UsageError(f"the plan of suite '{suite.name}' fails: {type(error).__name__}: {error}") from error

    @property
    def collection(self) -> Collection:
        """What is recorded of the suite beside its tables."""
        runs = tuple(dict.fromkeys(run.path for run in self.runs))
        return Collection(kind="suite", name=self.suite.name, runs=runs, settings=self.options.plain())


def merge_runs(plans: Iterable[SuitePlan]) -> list[RunSpec]:
    """List every run of the plans once, with the evaluation targets of all plans."""
    configs: dict[str, RunConfig] = {}
    targets: dict[str, dict[str, None]] = {}
    for run in (run for plan in plans for run in plan.runs):
        # Compare paths, not configs, as equal recipes may have different names.
        configs.setdefault(run.path, run.spec.config)
        targets.setdefault(run.path, {}).update(dict.fromkeys(run.spec.targets))
    return [RunSpec(config=config, targets=tuple(targets[path])) for path, config in configs.items()]


def is_done(run: RunSpec, runtime: RuntimeConfig) -> bool:
    """Whether the run and all its evaluations exist. Unreadable files count as missing."""
    folder = RunFolder(runtime.results / run.config.path)
    try:
        training = folder.train()
        results = [folder.evaluation(Target.recorded(target)) for target in run.targets]
    except UserError:
        return False
    return training is not None and all(result and result.is_current(training, runtime.limit) for result in results)


def recorded_options(
    suite: Suite, collection: Collection | None, results: Path, data: Path | None = None, *, profile: str = ""
) -> tuple[SuiteOptions, bool]:
    """Return the options of the suite's last run, and whether they had to be guessed.

    profile: the requested one; empty: any. Options are guessed if none are recorded, or only those of another
    profile: choose the options (of each profile, with and without `--quick`) whose plan shares most runs with existing
    ones, then those whose data sets have most runs. Raises UserError for settings that cannot be read.
    """
    settings = collection.settings if collection else {}
    if settings and profile in ("", settings.get("profile")):
        return SuiteOptions.of_plain(settings, data), False
    recorded = _split_paths(collection.runs if collection else ())
    existing = _split_paths(folder.path.relative_to(results).as_posix() for folder in find_runs(results))
    named: dict[str, Any] = {}
    if recorded and not settings:
        datasets, methods = (tuple(dict.fromkeys(run[part] for run in recorded)) for part in (1, 2))
        seeds = tuple(dict.fromkeys(int(run[-1].removeprefix("seed").partition("-")[0]) for run in recorded))
        named = {"datasets": datasets, "methods": methods, "seeds": seeds}
    profiles = [find_profile(profile)] if profile else PROFILES.values()
    candidates = [suite.options(one, quick=quick, data=data, **named) for one in profiles for quick in (False, True)]

    def count_existing(options: SuiteOptions) -> tuple[int, int]:
        planned = _split_paths(run.path for run in suite.plan(options))
        return len({*planned} & {*existing, *recorded}), sum(run[1] in options.profile.datasets for run in existing)

    return max(candidates, key=count_existing), True


def _split_paths(paths: Iterable[str]) -> list[tuple[str, ...]]:
    return [parts for path in paths if len(parts := tuple(path.split("/"))) == PATH_PARTS]
