"""What a report says of one suite in words: what it is, how it was run, what goes on with it, its caveats."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.console.output import plural
from benchmarks.report.read import STATES, Found
from benchmarks.results.frame import TITLES
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.variant import SuiteRun
from benchmarks.suites import SUITES
from procap.weights.loading import canonical_name
from runner.config import RunConfig, plan_run

Changes = dict[str, tuple[str, str]]
"""Fields of a recipe, with their values here and as published."""
SHOWN_FIELDS = 6
"""Fields of a changed recipe that are named; the rest are counted."""
VARIED: Mapping[str, str] = {
    "n_ctx": "Prompt tokens",
    "nce_weight": "Weight of InfoNCE",
    "kl_weight": "Weight of KL",
    "nce_temperature": "Temperature",
}
"""What keys of variants are called where their name is none for people."""


def description(found: Found) -> tuple[str, str]:
    """What the suite is, and what the paper has of it; from the suite's own file where that is ours."""
    module = sys.modules.get(SUITES.get(found.suite.name, "").partition(":")[0])
    paragraphs = (inspect.getdoc(module) or "").split("\n\n") if module else []
    prose = [" ".join(one.split()) for one in paragraphs if not one.startswith((" ", "Cost"))]
    paper = " ".join(one for one in prose if one.startswith("Published"))
    return " ".join(one for one in prose if not one.startswith("Published")) or found.suite.title, paper


def command(found: Found, results: str, data: Path | None = None) -> str:
    """What goes on with the suite as it was chosen: everything finished is kept."""
    return found.suite.command(replace(found.options, data=data), results)


def facts(found: Found) -> list[tuple[str, str]]:
    """How it was run, as terms and what they are here."""
    options, entries = found.options, found.done.runs
    rows = [
        ("Profile", f"{options.profile.name}{', quick' if options.quick else ''}"),
        ("Data sets", ", ".join(options.datasets)),
        ("Methods", ", ".join(TITLES.get(name, name) for name in options.methods)),
        ("Seeds", ", ".join(map(str, options.seeds))),
    ]
    # Shots stand beside what was trained on.
    varied = {name for entry in entries for name in entry.variant.key} - {"shots"}
    for name in sorted(varied):
        values = dict.fromkeys(str(entry.variant.key[name]) for entry in entries if name in entry.variant.key)
        rows.append((VARIED.get(name, name[:1].upper() + name[1:]), ", ".join(values)))
    if entries:
        config = entries[0].spec.config
        weights = f" ({config.pretrained})" if config.pretrained else ""
        rows.append(("Backbone", f"{config.backbone}{weights}, {config.precision}"))
        rows.append(("Trained on", f"{config.classes} classes, {_shots(entries)}"))
        rows.append(("Recipe", "; ".join(recipes(found))))
    return [(name, value) for name, value in rows if value]


def _shots(entries: Sequence[SuiteRun]) -> str:
    shots = sorted({entry.spec.config.shots for entry in entries})
    return f"{', '.join(str(number) if number else 'all' for number in shots)} images per class"


def recipes(found: Found) -> list[str]:
    """The methods' recipes and what was changed of them against the published ones; what all share is said once."""
    groups: dict[str, dict[str, Changes]] = {}
    for entry in _whole(found.done.runs):
        kind = entry.variant.recipe or found.options.recipe or found.options.profile.recipe
        title = TITLES.get(entry.variant.method, entry.variant.method)
        groups.setdefault(kind, {})[title] = _changes(entry.spec.config, kind, found)
    said = []
    for kind, changes in groups.items():
        what = {"published": "each method's own, as published", "procap": "ProCAP's for all"}.get(kind, kind)
        words = "; ".join(_changed(changes))
        said.append(f"{what}, but {words}" if words else what)
    return said


def _changed(changes: Mapping[str, Changes]) -> list[str]:
    """What was changed of every method's recipe, and then what of each alone."""
    first, *others = changes.values()
    shared = {name: change for name, change in first.items() if all(own.get(name) == change for own in others)}
    words = _instead(shared)
    for title, own in changes.items():
        rest = _instead({name: change for name, change in own.items() if name not in shared})
        more = " and more" if len(rest) > SHOWN_FIELDS else ""
        words += [f"{title}: {', '.join(rest[:SHOWN_FIELDS])}{more}"] if rest else []
    return words


def _instead(changes: Changes) -> list[str]:
    return [f"{name} {ours} instead of {theirs}" for name, (ours, theirs) in changes.items()]


def _whole(entries: Sequence[SuiteRun]) -> list[SuiteRun]:
    """One run of every method that is trained: of an variant that shortens nothing, where there is one."""
    first: dict[str, SuiteRun] = {}
    for entry in sorted(entries, key=lambda entry: bool(entry.variant.overrides) or entry.variant.part < 1):
        if entry.spec.config.recipe.epochs:
            first.setdefault(entry.variant.method, entry)
    return list(first.values())


def _changes(config: RunConfig, kind: str, found: Found) -> Changes:
    published = plan_run(
        method=config.method,
        dataset=config.dataset,
        classes=config.classes,
        shots=config.shots,
        recipe=kind,
        task=found.suite.task,
        data=found.options.data,
    ).recipe
    ours, theirs = config.recipe.model_dump(), published.model_dump()
    return {name: (_plain(ours[name]), _plain(theirs[name])) for name in ours if ours[name] != theirs[name]}


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def state(found: Found) -> str:
    """How far it is: "33 of 35 runs: 1 failed, 1 missing"."""
    counts = {name: sum(run.state == name for run in found.unfinished) for name in STATES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if not found.runs:
        return "measured by itself, without runs of its own"
    finished = len(found.runs) - len(found.unfinished)
    return f"{finished} of {plural(len(found.runs), 'run')} finished{f': {said}' if said else ''}"


def caveats(every: Sequence[Found]) -> list[str]:
    """What a reader has to know before any figure, each once for all suites."""
    said = []

    def named(chosen: Sequence[Found]) -> str:
        return "all suites" if len(chosen) == len(every) > 1 else ", ".join(one.suite.name for one in chosen)

    if generated := [one for one in every if one.options.profile.name == MINI.name]:
        said.append(
            f"Generated data ({named(generated)}): small made-up image sets and the embedded backbone. The figures say "
            "how methods compare here; none of them can be compared with published ones."
        )
    if quick := [one for one in every if one.options.quick]:
        said.append(
            f"Quick schedules ({named(quick)}): few epochs, to see that everything runs. Methods are not trained to "
            "the end, and their order may be another one with whole schedules."
        )
    if other := [one for one in every if _other_backbone(one)]:
        said.append(f"Another backbone than the paper's ViT-B/16 of OpenAI ({named(other)}).")
    limited = {
        place
        for one in every
        for place in one.done.frame[one.done.frame.limited][["path", "target"]].itertuples(index=False)
    }
    if limited:
        targets = len(limited)
        said.append(
            f"Limited: {plural(targets, 'evaluation')} looked at the first images of a test set only, marked †."
        )
    changed = {name: words for one in every for name, words in one.done.changed_sets.items()}
    for name, words in changed.items():
        said.append(f"{name} is not the published data set: {words}.")
    for one in every:
        if one.guessed:
            said.append(
                f"{one.suite.name} does not record what was chosen of it: data sets, methods and seeds are those of "
                "its runs."
            )
        if one.further:
            said.append(
                f"{one.suite.name} has {plural(len(one.further), 'further run')} made with other flags: no table here "
                "shows them."
            )
    return said


def _other_backbone(found: Found) -> bool:
    configs = [entry.spec.config for entry in found.done.runs]
    own = canonical_name(PAPER.backbone, PAPER.pretrained)
    return found.options.profile.name != MINI.name and any((one.backbone, one.pretrained) != own for one in configs)
