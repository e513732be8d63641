"""Write the notes below tables: shared settings, missing results, and results that are not comparable."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.results.frame import FEW_STEPS, dataset_order, describe_settings, sort_methods, title_method
from benchmarks.results.metrics import Metric
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.suite import SuiteResults
from procap.errors import UserError
from procap.methods import METHODS, loading_error, method_source
from procap.recipe import format_value
from runner.config import RunConfig, changed_settings, nearest_recipe, recipe_settings
from runner.run_folders import packed_digest
from shards.mirror import is_mirror
from shards.names import join_first

if TYPE_CHECKING:
    import pandas as pd


def suite_notes(suite: SuiteResults, *own: str, halves: bool = False) -> tuple[str, ...]:
    """Write the notes of a suite: `own` after those that all tables share."""
    seeds = suite.options.seeds
    found = ["Accuracy in %, computed from the integer counts of the result files."]
    if halves:
        found.append("HM is the harmonic mean of mean base and mean novel accuracy.")
    if len(seeds) == 1:
        found.append(f"One seed: {seeds[0]} (n = 1).")
    else:
        of_hm = "; that of HM is over the HMs of the single seeds" if halves else ""
        found.append(
            f"Means over n = {len(seeds)} seeds ({', '.join(map(str, seeds))}); ± is the sample standard deviation "
            f"(ddof = 1){of_hm}."
        )
    found += filter(None, own)
    if suite.paper_rounding:
        found.append(
            "Paper rounding: accuracies of single runs with one decimal, as older logs had them, their means with two, "
            "and HM of those."
        )
    runs = {run.path: run for run in suite.runs}
    found += note_settings(describe_settings(run.spec.config) for run in runs.values())
    varied = {path: {*run.variant.options, *run.variant.overrides} for path, run in runs.items()}
    found += note_recipes(((run.variant.name, run.spec.config) for run in runs.values()), suite.suite.task, varied)
    found += note_schedules(suite)
    if suite.options.quick:
        found.append("Quick schedules: methods are not trained to the end, and their order may differ.")
    if suite.missing:
        named = join_first([f"{path} on {target}" for path, target in suite.missing])
        # Finished runs of other methods need no repetition.
        methods = {run.variant.method for run in suite.runs if run.path in {path for path, _ in suite.missing}}
        options = replace(suite.options, methods=sort_methods(methods)) if suite.unreadable else suite.options
        command = f"{suite.suite.command(options, suite.results)}{' --force' * bool(suite.unreadable)}"
        found.append(
            f"MISSING: {len(suite.missing)} of {len(suite.planned)} evaluations ({named}). A dash is printed for every "
            f"metric that needs them; `{command}` runs them."
        )
    found += note_left_out(suite.unreadable)
    if label := suite.options.eval_settings.label:
        found.append(f"Evaluated otherwise than by default: {label}.")
    if suite.frame.limited.any():
        found.append("† limited: only the first images of a test set; never averaged with whole results nor marked.")
    found += [
        *note_few_steps(suite.frame),
        *note_one_class(suite.frame),
        *note_changed(suite.changed_sets),
        *note_sources(suite.frame),
    ]
    if why := suite.why_incomparable:
        instead = "are a group of their own" if suite.in_paper else "stand in tables of their own"
        found.append(f"These results do not compare with published ones, which {instead}: {why}.")
    elif suite.has_controls:
        found.append(
            "Rows of ProCAP's recipe instead of a method's own are not compared with published ones, which are a "
            "group of their own."
        )
    return tuple(found)


def note_schedules(suite: SuiteResults) -> list[str]:
    """Describe the schedule of each method and how its rate was chosen; empty if all methods are built in."""
    if all(variant.method in METHODS for variant in suite.variants):
        return []
    options, schedules = suite.options, dict[str, dict[str, None]]()
    for run in suite.runs:
        recipe, method = run.spec.config.recipe, run.variant.method
        if not recipe.epochs:
            continue
        own = options.recipe_of(run.variant)
        if own == options.profile.recipe and method in options.profile.rates:
            rate = "a rate chosen on base validation images of generated data"
        else:
            rate = "its own recipe" if own == "published" else "ProCAP's recipe, whose rate was not chosen for it"
        length = f"{recipe.iterations} steps" if recipe.iterations else f"{recipe.epochs} epochs"
        text = f"{recipe.optimizer} {recipe.lr:g}, {length}, batches of {recipe.batch_size} ({rate})"
        schedules.setdefault(title_method(method), {})[text] = None
    return [f"Schedules: {'; '.join(f'{title}: ' + ' / '.join(texts) for title, texts in schedules.items())}."]


def note_options(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe the options of methods that a user chose, by `--option` or by a recipe; empty if there are none."""
    if not any(options.values()):
        return []
    parts = [
        f"{title_method(method)} {', '.join(f'{name} {value}' for name, value in own.items())}"
        for method, own in options.items()
        if own
    ]
    return [f"Chosen options of methods: {'; '.join(parts)}. What a row itself changes takes precedence."]


def note_average(suite: SuiteResults) -> str:
    """Describe which reading of an average HM is printed, and list the numbers of the other one."""
    if len(suite.options.datasets) < 2:
        return ""
    hms = list_means({title: suite.mean_of_hms(variant) for title, variant in suite.by_title.items()})
    text = f"{AVERAGE}: over {len(suite.options.datasets)} data sets; its HM is that of average base and average novel "
    return f"{text}accuracy. The mean of the data sets' HMs is: {hms}." if hms else f"{text}accuracy."


def list_means(means: Mapping[str, Metric | None]) -> str:
    """List means by title, without those that are missing."""
    return "; ".join(f"{title} {mean.mean:.2f}" for title, mean in means.items() if mean)


def note_settings(settings: Iterable[Mapping[str, str]]) -> list[str]:
    """Describe the settings that runs share."""
    values: dict[str, set[str]] = {}
    for own in settings:
        for name, value in own.items():
            values.setdefault(name, set()).add(value)
    shared = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    parts = [f"backbone {shared['backbone']}"] if "backbone" in shared else []
    if shared.get("pretrained", "default") != "default":
        parts.append(f"weights {shared['pretrained']}")
    if "shots" in shared:
        parts.append(f"{shared['shots']} shot{'s' * (shared['shots'] != '1')}")
    if "precision" in shared:
        parts.append(shared["precision"])
    if shared.get("recipe") == "published":
        parts.append("each method's own published recipe")
    return [f"Setting: {'; '.join(parts)}."] if parts else []


def note_recipes(
    runs: Iterable[tuple[str, RunConfig]], task: str | None = None, named: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Describe what differs from a recipe, options included, in rows whose titles do not name it.

    runs: the title of a row, and a run in it. task: whose published recipe is meant, see `plan_run`. named: settings
    that are not listed, by run.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for title, config in runs:
        parts = {part.strip() for part in re.split(r"[(),]", title)}
        try:
            whose, changes = _compare_with_recipe(config, task)
        except UserError:
            # The plug-in of the run cannot be used any more.
            used = config.recipe.model_dump(mode="json", include={"optimizer", "lr", "epochs", "batch_size"})
            changes = {name: (format_value(value), "") for name, value in (used | config.options).items()}
            whose = "Recipe"
        texts = [
            f"{name} {value}{own and f' instead of {own}'}"
            for name, (value, own) in changes.items()
            if f"{name} {value}" not in parts and name not in (named or {}).get(config.path, ())
        ]
        if texts or not whose.startswith("Not"):
            found.setdefault((whose, f": {', '.join(texts)}" if texts else ""), {})[title] = None
    return [f"{whose}: {'; '.join(titles)}{changes}." for (whose, changes), titles in found.items()]


def _compare_with_recipe(config: RunConfig, task: str | None) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the words for the recipe that a run is nearest to, and what differs: the run's value and the recipe's.

    Raises UserError for a plug-in that cannot be used.
    """
    nearest = nearest_recipe(config, task) if config.recipe.epochs else "published"
    whose = "Not the published recipe" if config.method in METHODS else "Not its own recipe"
    if nearest == "procap" and config.method != "procap":
        whose = "ProCAP's recipe (`--recipe procap`)"
    transfer = task is None and config.classes == "all" and not any(changed_settings(config, "cross-dataset"))
    if transfer and any(changed_settings(config)):
        whose, task = "Published cross-dataset recipe", "cross-dataset"
    bases, changes = recipe_settings(config, task, nearest), changed_settings(config, task, nearest)
    return whose, {
        name: (format_value(value), format_value(base[name]))
        for base, own in zip(bases[::-1], changes[::-1], strict=True)
        for name, value in own.items()
        if config.recipe.epochs or base is bases[0]
    }


def note_changed(changed: Mapping[str, str]) -> list[str]:
    """Describe how data sets differ from published ones, by name."""
    return [f"{name}: {words}; not comparable with published results." for name, words in changed.items()]


def note_sources(frame: pd.DataFrame) -> list[str]:
    """Describe runs that were imported, and code of plug-in methods."""
    imported = frame[frame.imported].drop_duplicates("path")
    names = [
        f"{title_method(method)} on {dataset} ({'seeds' if len(runs) > 1 else 'seed'} "
        f"{', '.join(map(str, sorted(runs.seed.unique())))})"
        for (method, dataset), runs in imported.groupby(["method", "dataset"], sort=False)
    ]
    return [f"IMPORTED checkpoints, trained elsewhere: {'; '.join(names)}."] * bool(names) + note_code(frame)


def note_few_steps(frame: pd.DataFrame) -> list[str]:
    """Count the runs with few optimizer steps, by method."""
    few = frame[(frame.steps > 0) & (frame.steps < FEW_STEPS)].drop_duplicates("path")
    counts = [
        f"{plural(len(runs), 'run')} of {title_method(str(name))}" for name, runs in few.groupby("method", sort=False)
    ]
    return [f"Fewer than {FEW_STEPS} steps, and so near the initial weights: {', '.join(counts)}."] if counts else []


def note_one_class(frame: pd.DataFrame) -> list[str]:
    """Name the targets with one class."""
    targets = frame.target[[len(counts.total) == 1 for counts in frame.per_class]].unique()
    return [f"One class: {', '.join(targets)}, of which every image counts as right."] if len(targets) else []


def note_other_content(frame: pd.DataFrame, data: Path | None) -> list[str]:
    """Count the runs that used other content of a data set than is packed in `data`, if it is there."""
    if data is None or is_mirror(data):
        return []
    runs = zip(frame.path, frame.contents, strict=True)
    used = {(name, digest, path) for path, contents in runs for name, digest in contents.items()}
    found = []
    for name in sorted({name for name, _, _ in used}, key=dataset_order):
        # `procap ls datasets` shows what is wrong with a data set.
        with suppress(UserError):
            packed = packed_digest(data, name)
            if others := {path for one, digest, path in used if packed and one == name and digest != packed}:
                found.append(f"{plural(len(others), 'run')} used other content of {name} than is packed now.")
    return found


def note_left_out(reasons: Mapping[str, str]) -> list[str]:
    """Name the runs that are left out by their reason. reasons: by run."""
    paths: dict[str, list[str]] = {}
    for path, why in reasons.items():
        paths.setdefault(why, []).append(path)
    return [f"LEFT OUT: {join_first(found)}: {why}." for why, found in paths.items()]


def note_code(frame: pd.DataFrame) -> list[str]:
    """Describe runs of plug-in methods whose code differs between runs, or from what is installed now."""
    found = []
    for method, runs in frame[frame.source != ""].groupby("method", sort=False):
        now = str(method_source(str(method)) or "")
        sources = runs.groupby("source").path.nunique()
        if len(sources) > 1 or (now and now != sources.index[0]):
            parts = [f"{plural(count, 'run')} by {source}" for source, count in sources.items() if source != now]
            current = f", which trained {plural(sources[now], 'run')}" if now in sources else ""
            here = loading_error(str(method)) or f"installed here: {now}{current}"
            installed = f"; {here if now else 'the package is not installed'}"
            title = title_method(str(method))
            found.append(f"OTHER CODE trained runs of {title}, which do not compare: {'; '.join(parts)}{installed}.")
    return found
