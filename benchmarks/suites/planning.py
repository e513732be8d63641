"""What a suite's command is about to do: the suites that were named, what was chosen of each, and the runs of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cli.flags import RuntimeFlags, SuiteFlags
from benchmarks.cli.selection import dataset_names, method_names, names, numbers, shot_counts
from benchmarks.results.profiles import MINI, PAPER, Profile, find_profile
from benchmarks.results.variant import SuiteOptions, SuiteRun
from benchmarks.suites import ALL, SUITES
from benchmarks.suites.suite import Suite
from cluster.job import RunSpec
from procap.errors import UsageError, UserError
from runner.collection import Collection
from runner.config import RunConfig, RuntimeConfig, Target
from runner.results import RunFolder
from shards.errors import DataError
from shards.home import data_is_named


@dataclass(frozen=True)
class Planned:
    """A suite as it was chosen, and its runs."""

    suite: Suite
    options: SuiteOptions
    runs: Sequence[SuiteRun]

    @property
    def collection(self) -> Collection:
        runs = tuple(dict.fromkeys(entry.path for entry in self.runs))
        return Collection(kind="suite", name=self.suite.name, runs=runs, settings=self.options.plain())


def chosen(name: str) -> list[str]:
    """The suites that a word of the command line stands for."""
    return list(SUITES) if name == ALL else [name]


def plan(suite: Suite, suited: SuiteFlags, place: RuntimeFlags, data: Path, *, several: bool = False) -> Planned:
    """What the flags choose of `suite`.

    The profile is that of the data sets where these are named and known, else the paper's where there is a data root,
    else the generated one.
    several: beside other suites, where data sets are not chosen of one that has a list of its own.
    """
    named = tuple(dataset_names(suited.datasets, data)) if names(suited.datasets) else ()
    profile = find_profile(suited.profile) if suited.profile else _world_of(named, place)
    datasets = named if named and not (several and suite.datasets) else None
    options = suite.options(
        profile,
        quick=suited.quick,
        datasets=datasets,
        methods=tuple(method_names(suited.methods)) if names(suited.methods) else None,
        seeds=tuple(numbers(suited.seeds, "--seeds")) or None,
        shots=shot_counts(suited.shots),
        recipe=suited.recipe,
        backbone=suited.backbone,
        pretrained=suited.pretrained or None,
        precision=suited.precision,
        overrides={} if suited.epochs is None else {"epochs": suited.epochs},
        data=data,
    )
    try:
        entries = suite.plan(options)
    except (UserError, DataError):
        raise
    except Exception as error:
        if suite.name in SUITES:
            raise
        raise UsageError(f"the plan of suite '{suite.name}' fails: {type(error).__name__}: {error}") from error
    return Planned(suite, options, entries)


def _world_of(datasets: Sequence[str], place: RuntimeFlags) -> Profile:
    if not {*datasets}.isdisjoint(PAPER.datasets):
        return PAPER
    generated = datasets and {*datasets} <= {*MINI.datasets}
    return MINI if generated or not data_is_named(place.data) else PAPER


def merged(plans: Iterable[Planned]) -> list[RunSpec]:
    """Every run of the plans once, with the targets of all of them."""
    configs: dict[str, RunConfig] = {}
    targets: dict[str, dict[str, None]] = {}
    for entry in (entry for one in plans for entry in one.runs):
        # By path: one suite may call a recipe "published" that another calls "procap".
        configs.setdefault(entry.path, entry.spec.config)
        targets.setdefault(entry.path, {}).update(dict.fromkeys(entry.spec.targets))
    return [RunSpec(config=config, targets=tuple(targets[path])) for path, config in configs.items()]


def is_done(piece: RunSpec, at: RuntimeConfig) -> bool:
    """Whether the run and all its evaluations are there. What is broken is not: whoever does the run says why."""
    folder = RunFolder(at.results / piece.config.path)
    try:
        training = folder.train()
        found = [folder.evaluation(Target.recorded(target)) for target in piece.targets]
    except UserError:
        return False
    return training is not None and all(known and known.answers(training, at.limit) for known in found)
