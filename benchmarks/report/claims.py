"""Read the results that the paper's claims need, and make the table of claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report.started_suites import StartedSuite
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import load_suite
from benchmarks.suites.planning import recorded_options
from benchmarks.tables.claims import claims_table, load_claims
from benchmarks.tables.table import Table
from procap.errors import UserError


def why_untested(started: Sequence[StartedSuite]) -> str:
    """Explain why results test no claim; empty if they may."""
    own = bool(started) and all(one.results.kinds == {"own"} for one in started)
    why = "The paper's claims concern its data sets, or generated ones in their place: own data tests none of them."
    return why if own else ""


def read_claims(
    results: Path, started: Sequence[StartedSuite], *, shown: str, data: Path | None = None, only_started: bool = False
) -> Table:
    """Make the table of claims. shown: the results as commands name them. only_started: no claims of other suites.

    A suite that was not started is read with its defaults in the profile of the first one that was: its runs may exist
    as those of other suites. Raises UserError if all suites were on own data.
    """
    if why := why_untested(started):
        raise UserError(why)
    started = [one for one in started if one.results.kinds != {"own"}]
    existing = {one.name: one.results for one in started}
    suites, commands, wider = {}, {}, {}
    for name in dict.fromkeys(claim.suite for claim in load_claims()):
        suite = load_suite(name)
        if name in existing:
            suites[name] = existing[name]
        elif not only_started:
            first = started[0].options if started else recorded_options(suite, None, results, data)
            options = suite.options(first.profile, quick=first.quick, data=data)
            suites[name] = SuiteResults.read(suite, options, results)
        if name in suites:
            own = suites[name].options
            # Some claims need methods, seeds or numbers of shots that the recorded command left out.
            methods = tuple(dict.fromkeys([*own.methods, *suite.methods]))
            curve = all(variant.shots for method in own.methods for variant in suite.variants(own, method))
            usual = suite.options(own.profile, quick=own.quick)
            seeds = own.seeds if len(own.seeds) > 1 else usual.seeds
            more = replace(own, methods=methods, seeds=seeds, shots=() if curve else own.shots, data=data)
            commands[name] = suite.command(more, shown)
            datasets = tuple(dict.fromkeys([*usual.datasets, *own.datasets]))
            wider[name] = suite.command(replace(more, datasets=datasets), shown)
    return claims_table(suites, commands, wider)
