"""Read the results that the paper's claims need, and make the table of claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report.started_suites import StartedSuite
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import suite_named
from benchmarks.suites.planning import recorded_options
from benchmarks.tables.claims import claims_table, load_claims
from benchmarks.tables.table import Table

SHARED = ("recipe", "backbone", "pretrained", "precision", "overrides", "options")
"""Settings of one suite with which the others are read."""


def read_claims(
    results: Path, started: Sequence[StartedSuite], *, shown: str, data: Path | None = None, only_started: bool = False
) -> Table:
    """Make the table of claims. shown: the results as commands name them. only_started: no claims of other suites.

    A suite that was not started is read with its defaults and the settings of the first one that was: its runs may
    exist as those of other suites.
    """
    existing = {one.name: one.results for one in started}
    suites, commands = {}, {}
    for name in dict.fromkeys(claim.suite for claim in load_claims()):
        suite = suite_named(name)
        if name in existing:
            suites[name] = existing[name]
        elif not only_started:
            first = started[0].options if started else recorded_options(suite, None, results, data)
            settings = {field: getattr(first, field) for field in SHARED}
            options = suite.options(first.profile, quick=first.quick, data=data, **settings)
            suites[name] = SuiteResults.read(suite, options, results)
        if name in suites:
            own = suites[name].options
            # Some claims need methods or shots that the recorded command left out.
            methods = tuple(dict.fromkeys([*own.methods, *suite.methods]))
            commands[name] = suite.command(replace(own, methods=methods, shots=(), data=data), shown)
    return claims_table(suites, commands)
