"""What was chosen of a suite when it was last run: as its collection records it, else from the runs that are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results.profiles import PROFILES, find_profile
from benchmarks.results.variant import SuiteOptions
from benchmarks.suites.suite import Suite
from runner.collection import Collection
from runner.results import find_runs

PARTS = 6
"""Of a run's path: classes, data set, method, backbone, shots, and seed with hash."""


def choice_of(
    suite: Suite, collection: Collection | None, results: Path, data: Path | None = None, *, profile: str = ""
) -> tuple[SuiteOptions, bool]:
    """What was chosen of the suite, and whether it had to be guessed. profile: the one that is asked for, empty: any.

    It is guessed where nothing is recorded, or another profile: of the profiles, with short schedules or whole, the
    options whose plan has most of the runs that are there, then the one whose data sets most runs are of. A collection
    of an older version has no settings, but its runs name data sets, methods and seeds.
    Raises UserError for settings that are none.
    """
    settings = collection.settings if collection else {}
    if settings and profile in ("", settings.get("profile")):
        return SuiteOptions.of_plain(settings, data), False
    recorded = _split(collection.runs if collection else ())
    there = _split(folder.path.relative_to(results).as_posix() for folder in find_runs(results))
    named = {} if settings else _named(recorded)
    profiles = [find_profile(profile)] if profile else PROFILES.values()
    ways = [suite.options(one, quick=quick, data=data, **named) for one in profiles for quick in (False, True)]

    def fit(way: SuiteOptions) -> tuple[int, int]:
        planned = _split(entry.path for entry in suite.plan(way))
        return len({*planned} & {*there, *recorded}), sum(run[1] in way.profile.datasets for run in there)

    return max(ways, key=fit), True


def _split(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """The parts of the paths that are those of runs."""
    return [parts for path in paths if len(parts := tuple(path.split("/"))) == PARTS]


def _named(runs: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Data sets, methods and seeds of runs, as fields of a Choice; nothing where there are none."""
    if not runs:
        return {}
    datasets, methods = (tuple(dict.fromkeys(run[place] for run in runs)) for place in (1, 2))
    seeds = tuple(dict.fromkeys(int(run[-1].removeprefix("seed").partition("-")[0]) for run in runs))
    return {"datasets": datasets, "methods": methods, "seeds": seeds}
