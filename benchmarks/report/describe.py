"""Describe a suite in words: what it is, how it was run, how far it is, and what limits its results."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.report.started_suites import StartedSuite, count_states
from benchmarks.results.frame import FEW_STEPS, describe_settings, title_method
from benchmarks.tables.notes import note_code, note_other_content, note_settings
from procap.recipe import warmup_warning
from shards.resolve import kind_of_name

if TYPE_CHECKING:
    import pandas as pd


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
    settings = note_settings(map(describe_settings, configs))
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


def list_caveats(suites: Sequence[StartedSuite], jobs: pd.DataFrame, data: Path | None) -> list[str]:
    """List what a reader has to know before any number, each once with the suites that it concerns."""
    lines = _list_caveats_of_runs(suites, jobs, data) if suites else []
    found: dict[str, list[str]] = {}
    for one in suites:
        results, limited = one.results, one.results.frame[one.results.frame.limited]
        caveats = []
        if one.options.quick:
            caveats.append("quick schedules: the order of methods may differ where they are trained to the end")
        caveats += [f"{name} is not the published data set: {text}" for name, text in results.changed_sets.items()]
        if why := results.why_incomparable:
            caveats.append(f"these results do not compare with published ones: {why}")
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


def _list_caveats_of_runs(suites: Sequence[StartedSuite], jobs: pd.DataFrame, data: Path | None) -> list[str]:
    """List what a reader has to know of runs, of which suites and sweeps may share some."""
    import pandas as pd

    columns = ["path", "method", "source", "backbone", "target_dataset", "contents", "per_class"]
    every = pd.concat([one.results.frame[columns] for one in suites])
    lines = [*note_code(every), *note_other_content(every, data)]
    if few := {*jobs.path[(jobs.kind == "train") & (jobs.steps < FEW_STEPS)]}:
        lines.append(f"{plural(len(few), 'run')} made fewer than {FEW_STEPS} steps, near the initial weights.")
    recipes = {run.path: run.spec.config.recipe for one in suites for run in one.results.runs}
    if warm := [path for path in {*every.path} - few if warmup_warning(recipes[path])]:
        lines.append(f"{plural(len(warm), 'run')} may hardly learn: more than half of the epochs are warm-up.")
    return [*lines, *_note_unknown_names(every[every.backbone == "mini"])]


def _note_unknown_names(frame: pd.DataFrame) -> list[str]:
    """Count the class names of own data sets that the backbone mini does not know."""
    names = {
        name: {one for counts in own.per_class for one in counts.names or ()}
        for name, own in frame.groupby("target_dataset")
        if kind_of_name(str(name)) == "own"
    }
    if not names:
        return []
    # This imports torch.
    from procap.weights.loading import load_clip

    clip = load_clip()
    unknown = {name: clip.unknown_names(sorted(own)) for name, own in names.items()}
    return [
        f"mini knows no word of {len(found)} of {len(names[name])} class names of {name}, and cannot tell these apart."
        for name, found in unknown.items()
        if len(found) > 1
    ]
