"""Describe a suite in words: what it is, how it was run, how far it is, and what limits its results."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.console.output import plural
from benchmarks.report.started_suites import StartedSuite, count_states
from benchmarks.results.frame import describe_settings, title_method
from benchmarks.tables.notes import note_code, note_other_content, note_settings


def describe_state(started: StartedSuite) -> str:
    """Describe how far it is: "33 of 35 runs finished: 1 failed, 1 not started"."""
    planned = started.results.paths
    if not planned:
        return "measured without runs of its own"
    states = count_states(started.unfinished)
    return (
        f"{len(planned) - len(started.unfinished)} of {plural(len(planned), 'run')} finished{states and f': {states}'}"
    )


def list_facts(started: StartedSuite) -> list[tuple[str, str]]:
    """List how it was run, as terms and values."""
    options = started.options
    configs = [run.spec.config for run in started.results.runs]
    settings = note_settings((config.method, describe_settings(config)) for config in configs)
    moments = filter(None, (started.collection.started, started.collection.ended))
    days = [datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%d") for moment in moments]
    facts = [
        ("Profile", f"{options.profile.name}{', quick' * options.quick}"),
        ("Data sets", ", ".join(options.datasets)),
        ("Methods", ", ".join(title_method(name) for name in options.methods)),
        ("Variants", ", ".join(started.results.by_title) if started.is_suite else ""),
        ("Seeds", ", ".join(map(str, options.seeds))),
        ("Setting", " ".join(settings).removeprefix("Setting: ")),
        ("Dates", " to ".join(dict.fromkeys(days))),
        ("Runs", describe_state(started)),
    ]
    return [(name, value) for name, value in facts if value]


def list_caveats(suites: Sequence[StartedSuite], data: Path | None) -> list[str]:
    """List what a reader has to know before any number, each once with the suites that it concerns."""
    import pandas as pd

    found: dict[str, list[str]] = {}
    # Groups share runs, which count once.
    every = pd.concat([one.results.frame[["path", "contents"]] for one in suites]) if suites else pd.DataFrame()
    lines = note_other_content(every, data) if suites else []
    for one in suites:
        results, limited = one.results, one.results.frame[one.results.frame.limited]
        caveats = [text.rstrip(".") for text in note_code(results.frame)]
        caveats += [f"{name} is not the published data set: {text}" for name, text in results.changed_sets.items()]
        if why := results.why_incomparable:
            caveats.append(f"these results do not compare with published ones: {why}")
        if one.options.quick:
            caveats.append("quick schedules: the order of methods may differ where they are trained to the end")
        if count := len(limited.drop_duplicates(["path", "target"])):
            caveats.append(f"{plural(count, 'evaluation')} used the first images of a test set only, marked †")
        if one.other_runs:
            further = plural(len(one.other_runs), "further run")
            caveats.append(f"{further} with other seeds or settings, which no table here shows")
        for caveat in caveats:
            found.setdefault(caveat, []).append(one.name)
    for caveat, names in found.items():
        of = "" if len(names) == len(suites) else f" ({', '.join(names)})"
        lines.append(f"{caveat[0].upper()}{caveat[1:]}{of}.")
    return lines
