"""Describe a suite in words: what it is, how it was run, how far it is, and what limits its results."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.console.output import plural
from benchmarks.report.started_suites import STATES, StartedSuite
from benchmarks.results.frame import title_method
from benchmarks.results.profiles import PAPER
from benchmarks.suites import SUITES

KEYS: Mapping[str, str] = {
    "n_ctx": "Prompt tokens",
    "reading": "Reading",
    "nce_weight": "Weight of InfoNCE",
    "kl_weight": "Weight of KL",
    "nce_temperature": "Temperature",
}
"""Titles for keys of variants."""


def describe_suite(started: StartedSuite) -> tuple[str, str]:
    """Return what the suite compares, and what the paper publishes of it, from the docstring of a built-in suite."""
    if not started.is_suite:
        return "", ""
    module = sys.modules.get(SUITES.get(started.name, "").partition(":")[0])
    paragraphs = (inspect.getdoc(module) or "").split("\n\n") if module else []
    prose = [" ".join(text.split()) for text in paragraphs if not text.startswith((" ", "Cost"))]
    paper = " ".join(text for text in prose if text.startswith("Published"))
    return " ".join(text for text in prose if not text.startswith("Published")) or started.suite.title, paper


def describe_state(started: StartedSuite) -> str:
    """Describe how far it is: "33 of 35 runs finished: 1 failed, 1 missing"."""
    if not started.results.paths:
        return "measured without runs of its own"
    finished = len(started.results.paths) - len(started.unfinished)
    counts = Counter(run.state for run in started.unfinished)
    listed = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return f"{finished} of {plural(len(started.results.paths), 'run')} finished{f': {listed}' if listed else ''}"


def list_facts(started: StartedSuite) -> list[tuple[str, str]]:
    """List how it was run, as terms and values."""
    options, runs = started.options, started.results.runs
    facts = [
        ("Profile", f"{options.profile.name}{', quick' * options.quick}"),
        ("Data sets", ", ".join(options.datasets)),
        ("Methods", ", ".join(title_method(name) for name in options.methods)),
        ("Seeds", ", ".join(map(str, options.seeds))),
    ]
    # Shots are listed with the classes trained on.
    for name in sorted({name for run in runs for name in run.variant.key} - {"shots"}):
        values = dict.fromkeys(str(run.variant.key[name]) for run in runs if name in run.variant.key)
        facts.append((KEYS.get(name, name.capitalize()), ", ".join(values)))
    if runs:
        configs = [run.spec.config for run in runs]
        weights = {one.pretrained: f" ({one.pretrained})" if one.pretrained else "" for one in configs}
        backbones = dict.fromkeys(f"{one.backbone}{weights[one.pretrained]}, {one.precision}" for one in configs)
        shots = ", ".join(str(number or "all") for number in sorted({one.shots for one in configs}))
        classes = " or ".join(dict.fromkeys(one.classes for one in configs))
        facts.append(("Backbone", "; ".join(backbones)))
        facts.append(("Trained on", f"{classes} classes, {shots} image{'s' * (shots != '1')} per class"))
        facts.append(("Recipe", "; ".join(describe_recipes(started))))
    facts.append(("Runs", describe_state(started)))
    return [(name, value) for name, value in facts if value]


def describe_recipes(started: StartedSuite) -> list[str]:
    """Describe the recipe of each trained method, with up to three where they differ."""
    texts: dict[str, dict[str, None]] = {}
    for run in started.results.runs:
        config, recipe = run.spec.config, run.spec.config.recipe
        if recipe.epochs:
            text = f"{recipe.optimizer} {recipe.lr:g}, {plural(recipe.epochs, 'epoch')}, batch {recipe.batch_size}"
            texts.setdefault(title_method(config.method), {})[text] = None
    return [f"{title}: {' / '.join(own) if len(own) <= 3 else f'{len(own)} recipes'}" for title, own in texts.items()]


def list_caveats(suites: Sequence[StartedSuite]) -> list[tuple[str, str]]:
    """List what a reader has to know before any number, each once for all suites, with a short form if it has one."""
    # This imports torch.
    from procap.weights.architectures import canonical_name

    def names(chosen: Sequence[StartedSuite]) -> str:
        return "all suites" if len(chosen) == len(suites) > 1 else ", ".join(one.name for one in chosen)

    found = []
    if generated := [one for one in suites if "generated" in one.results.kinds]:
        text = (
            f"Generated data ({names(generated)}): small made-up image sets and the embedded backbone. The numbers "
            "show how methods compare here; none of them can be compared with published ones."
        )
        found.append((text, "generated data"))
    if own := [one for one in suites if "own" in one.results.kinds]:
        found.append((f"Own data ({names(own)}), for which there are no published numbers.", "own data"))
    if quick := [one for one in suites if one.options.quick]:
        text = (
            f"Quick schedules ({names(quick)}): few epochs, to check that everything runs. Methods are not trained to "
            "the end, and their order may differ with whole schedules."
        )
        found.append((text, "quick schedules"))
    paper = canonical_name(PAPER.backbone, PAPER.pretrained)
    if other := [
        one
        for one in suites
        if one.results.kinds != {"generated"}
        and any((run.spec.config.backbone, run.spec.config.pretrained) != paper for run in one.results.runs)
    ]:
        found.append((f"Another backbone than the paper's ViT-B/16 of OpenAI ({names(other)}).", "another backbone"))
    frames = [one.results.frame for one in suites]
    limited = {
        evaluation for own in frames for evaluation in own[["path", "target"]][own.limited].itertuples(index=False)
    }
    if limited:
        text = f"Limited: {plural(len(limited), 'evaluation')} used the first images of a test set only, marked †."
        found.append((text, "limited evaluations (†)"))
    changed = {name: text for one in suites for name, text in one.results.changed_sets.items()}
    found += [(f"{name} is not the published data set: {text}.", f"changed {name}") for name, text in changed.items()]
    for one in suites:
        if one.other_runs:
            further = plural(len(one.other_runs), "further run")
            found.append((f"{one.name} has {further} made with other flags, which no table here shows.", ""))
    return found
