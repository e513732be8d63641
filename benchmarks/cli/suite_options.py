"""From the flags of `procap bench` to the plan of a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cli.flags import RuntimeFlags, SuiteFlags
from benchmarks.console.parse import parse_datasets, parse_integers, parse_methods, parse_shot_counts, split_names
from benchmarks.results.profiles import MINI, PAPER, Profile, find_profile
from benchmarks.suites.planning import SuitePlan
from benchmarks.suites.suite import Suite
from shards.home import data_is_named


def plan_suite(
    suite: Suite, flags: SuiteFlags, runtime: RuntimeFlags, data: Path, *, several: bool = False
) -> SuitePlan:
    """The plan of `suite` with the options that the flags choose.

    The profile is that of the data sets where these are named and known, else the paper's where there is a data root,
    else the generated one.
    several: planned beside other suites, where --datasets does not apply to a suite with a list of its own.
    """
    named = tuple(parse_datasets(flags.datasets, data)) if split_names(flags.datasets) else ()
    profile = find_profile(flags.profile) if flags.profile else _profile_of(named, runtime)
    options = suite.options(
        profile,
        quick=flags.quick,
        datasets=named if named and not (several and suite.datasets) else None,
        methods=tuple(parse_methods(flags.methods)) if split_names(flags.methods) else None,
        seeds=tuple(parse_integers(flags.seeds, "--seeds")) or None,
        shots=parse_shot_counts(flags.shots),
        recipe=flags.recipe,
        backbone=flags.backbone,
        pretrained=flags.pretrained or None,
        precision=flags.precision,
        overrides={} if flags.epochs is None else {"epochs": flags.epochs},
        data=data,
    )
    return SuitePlan.of(suite, options)


def _profile_of(datasets: Sequence[str], runtime: RuntimeFlags) -> Profile:
    if not {*datasets}.isdisjoint(PAPER.datasets):
        return PAPER
    generated = datasets and {*datasets} <= {*MINI.datasets}
    return MINI if generated or not data_is_named(runtime.data) else PAPER
