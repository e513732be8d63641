"""Write the notes below tables: what all rows share, what is missing, what misleads, and what other code made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.console.output import plural
from benchmarks.experiment.titles import describe_settings, find_differences, title_method
from benchmarks.results.suite_results import SuiteResults
from procap.methods import METHODS, data_use, loading_error, method_source
from procap.recipe import format_value
from runner.config import RunConfig
from shards.names import join_first
from shards.uneven_samples import BALANCED

if TYPE_CHECKING:
    import pandas as pd

SETTINGS: Mapping[str, Callable[[str], str]] = {
    "backbone": str,
    "pretrained": lambda weights: f"weights {weights}" * (weights != "default"),
    "shots": lambda shots: "all images" if shots == "full" else plural(int(shots), "shot"),
    "sampling": lambda sampling: f"sampling {sampling}" * (sampling != BALANCED),
    "precision": str,
    "recipe": lambda recipe: "published recipes" * (recipe == "published"),
}
"""How a setting that all runs share is written; empty if it goes without saying."""


class Notes(NamedTuple):
    """The notes of a table. lines: at most four, below it. details: recipe and options of each row, for JSON."""

    lines: Sequence[str]
    details: Sequence[str]


def suite_notes(results: SuiteResults, *rules: str) -> Notes:
    """Write the notes of a suite. rules: what the cells of one table are."""
    runs = {run.path: (run.variant.name, run.spec.config) for run in results.runs}
    options, missing, caveats = results.options, [], []
    if options.eval_settings.name:
        rules = (*rules, f"Evaluation: {options.eval_settings.name}.")
    if results.missing:
        names = join_first([f"{path} on {target}" for path, target in results.missing])
        missing.append(f"MISSING: {len(results.missing)} of {plural(len(results.planned), 'evaluation')} ({names}).")
    missing += [f"LEFT OUT: {path}: {reason}." for path, reason in results.unreadable.items()]
    if own := _list_own_recipes(results):
        caveats.append(f"OWN RECIPE, others in ProCAP's: {join_first(own)}.")
    if results.why_incomparable:
        caveats.append(f"Not comparable with published numbers: {results.why_incomparable}.")
    return run_notes(results.frame, runs.values(), options.seeds, rules, missing, caveats)


def _list_own_recipes(results: SuiteResults) -> list[str]:
    """List the variants in their own recipes if built-in ones train in ProCAP's; plug-ins, with their recipe, first."""
    own, is_mixed, options = dict[str, None](), False, results.options
    for run in sorted(results.runs, key=lambda run: run.variant.method in METHODS):
        variant, config = run.variant, run.spec.config
        if not config.recipe.epochs:
            continue
        if options.choose_recipe_name(variant) == "procap":
            is_mixed = True
        elif variant.method != "procap":
            words = "" if variant.method in METHODS else f" ({_describe_recipe(config)})"
            own[f"{variant.name}{words}"] = None
    return list(own) if is_mixed else []


def run_notes(
    frame: pd.DataFrame,
    runs: Iterable[tuple[str, RunConfig]],
    seeds: Sequence[int],
    rules: Iterable[str] = (),
    missing: Iterable[str] = (),
    caveats: Iterable[str] = (),
) -> Notes:
    """Write the notes of results: one line each for the setting, what is missing, `caveats`, and other code.

    runs: the title of a row, and a run in it. seeds: if they are the same everywhere.
    """
    runs = list(runs)
    names = f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}." * bool(seeds)
    setting = [*rules, names, describe_shared(runs), describe_data_use(frame)]
    lines = [" ".join(filter(None, part)) for part in (setting, missing, caveats, note_code(frame))]
    return Notes([line for line in lines if line], describe_recipes(runs))


def describe_shared(runs: Iterable[tuple[str, RunConfig]]) -> str:
    """Describe the settings that runs share."""
    settings = [describe_settings(config) for _, config in runs]
    # Settings of untrained runs have no shots and no recipe, so that they do not hide what the trained ones share.
    values, varied = {name: value for each in settings for name, value in each.items()}, find_differences(settings)
    parts = [write(values[name]) for name, write in SETTINGS.items() if name in values.keys() - varied]
    listed = ", ".join(filter(None, parts))
    return f"Setting: {listed}." if listed else ""


def describe_data_use(frame: pd.DataFrame) -> str:
    """Name the methods that look at data besides labelled few-shot images and names of the classes trained on."""
    titles: dict[str, dict[str, None]] = {}
    for name, options in zip(map(str, frame.method), frame.options, strict=True):
        if further := ", ".join(data_use(name, options).further):
            titles.setdefault(further, {})[title_method(name)] = None
    listed = "; ".join(f"{', '.join(names)} ({further})" for further, names in titles.items())
    return f"Data other than labelled few-shot images and base names: {listed}." if listed else ""


def describe_recipes(runs: Iterable[tuple[str, RunConfig]]) -> list[str]:
    """Describe recipe and options of each row."""
    titles: dict[str, dict[str, None]] = {}
    for title, config in runs:
        options = (f"{name} {format_value(value)}" for name, value in config.options.items())
        if words := ", ".join(filter(None, (_describe_recipe(config), *options))):
            titles.setdefault(words, {})[title] = None
    return [f"{'; '.join(names)}: {words}." for words, names in titles.items()]


def _describe_recipe(config: RunConfig) -> str:
    names = ("optimizer", "lr", "iterations" if config.recipe.iterations else "epochs", "batch_size")
    fields = (f"{name} {format_value(getattr(config.recipe, name))}" for name in names)
    return ", ".join(fields) if config.recipe.epochs else ""


def note_code(frame: pd.DataFrame) -> list[str]:
    """Name imported checkpoints, and runs of plug-ins whose code differs between runs or from what is installed."""
    sentences = []
    for method, runs in frame[frame.imported].groupby("method", sort=False):
        count, files = runs.path.nunique(), runs.imported_file.nunique()
        source = f" from {plural(files, 'checkpoint')}" if files < count else ""
        sentences.append(f"IMPORTED: {plural(count, 'run')} of {title_method(str(method))}{source}.")
    for method, runs in frame[frame.source != ""].groupby("method", sort=False):
        installed = str(method_source(str(method)) or "")
        counts = runs.groupby("source").path.nunique()
        # A single kind of code whose method is not installed here is no mixture, and needs no note.
        if len(counts) > 1 or (installed and installed != counts.index[0]):
            parts = [f"{plural(count, 'run')} by {source}" for source, count in counts.items() if source != installed]
            state = loading_error(str(method)) or f"installed: {installed}" if installed else "not installed"
            sentences.append(f"OTHER CODE of {title_method(str(method))}: {'; '.join(parts)}; {state}.")
    return sentences
