"""Write the notes below tables: what all rows share, what is missing, what is limited, and what other code made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.experiment.titles import title_method
from benchmarks.results.frame import FEW_STEPS, dataset_order, describe_settings
from benchmarks.results.statistics import format_seeds
from benchmarks.results.suite import SuiteResults
from procap.errors import UserError
from procap.methods import loading_error, method_source
from procap.recipe import format_value
from runner.config import RunConfig
from runner.run_folders import packed_digest
from shards.mirror import is_mirror
from shards.names import join_first

if TYPE_CHECKING:
    import pandas as pd

LIMITED = "† --limit: evaluated on the first images only; never averaged with whole test sets, never bold."


@dataclass(frozen=True)
class Notes:
    """The notes of a table, as sentences: what all rows share, what is missing or left out, what limits the results,
    and which rows other code made. details: further ones, for CSV and JSON.
    """

    setting: Sequence[str] = ()
    missing: Sequence[str] = ()
    limited: Sequence[str] = ()
    code: Sequence[str] = ()
    details: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """At most four lines."""
        return [" ".join(part) for part in (self.setting, self.missing, self.limited, self.code) if part]


def suite_notes(suite: SuiteResults, *rules: str, details: Iterable[str] = ()) -> Notes:
    """Write the notes of a suite. rules: what the cells of one table are; details: further sentences about it."""
    runs = {run.path: run for run in suite.runs}
    notes = frame_notes(suite.frame, [(run.variant.name, run.spec.config) for run in runs.values()], details=details)
    seeds, options = suite.options.seeds, suite.options
    spread = "; ± is the sample standard deviation" if len(seeds) > 1 else ""
    setting = [*filter(None, rules), f"{format_seeds(seeds).capitalize()}{spread}.", *notes.setting]
    if options.eval_settings.label:
        setting.append(f"Evaluation: {options.eval_settings.label}.")
    missing = []
    if suite.missing:
        named = join_first([f"{path} on {target}" for path, target in suite.missing])
        missing.append(f"MISSING: {len(suite.missing)} of {plural(len(suite.planned), 'evaluation')} ({named}).")
    missing += note_left_out(suite.unreadable)
    limited = ["Quick schedules: methods are not trained to the end."] if options.quick else []
    limited += notes.limited
    if suite.why_incomparable:
        limited.append(f"Not comparable with published numbers: {suite.why_incomparable}.")
    elif suite.has_controls:
        limited.append("Rows of ProCAP's recipe are not comparable with published numbers.")
    sets = suite.unpublished_sets.items()
    limited += [f"{name}: {words}; not comparable with published results." for name, words in sets]
    return replace(notes, setting=setting, missing=missing, limited=limited)


def frame_notes(
    frame: pd.DataFrame,
    runs: Iterable[tuple[str, RunConfig]],
    *rules: str,
    left_out: Mapping[str, str] | None = None,
    details: Iterable[str] = (),
) -> Notes:
    """Write the notes of results. runs: the title of a row, and a run in it. left_out: reasons by run."""
    runs = list(runs)
    return Notes(
        setting=[*rules, *note_settings(describe_settings(config) for _, config in runs)],
        missing=note_left_out(left_out or {}),
        limited=[
            *([LIMITED] if frame.limited.any() else []),
            *note_few_steps(frame),
            *note_one_class(frame),
        ],
        code=[*note_imported(frame), *note_code(frame)],
        details=[*filter(None, details), *describe_recipes(runs)],
    )


def note_settings(settings: Iterable[Mapping[str, str]]) -> list[str]:
    """Describe the settings that runs share."""
    values: dict[str, set[str]] = {}
    for run_settings in settings:
        for name, value in run_settings.items():
            values.setdefault(name, set()).add(value)
    shared = {name: next(iter(distinct)) for name, distinct in values.items() if len(distinct) == 1}
    parts = [shared["backbone"]] if "backbone" in shared else []
    if shared.get("pretrained", "default") != "default":
        parts.append(f"weights {shared['pretrained']}")
    if "shots" in shared:
        parts.append("all images" if shared["shots"] == "full" else plural(int(shared["shots"]), "shot"))
    if "precision" in shared:
        parts.append(shared["precision"])
    if shared.get("recipe") == "published":
        parts.append("published recipes")
    return [f"Setting: {', '.join(parts)}."] if parts else []


def describe_recipes(runs: Iterable[tuple[str, RunConfig]]) -> list[str]:
    """Describe recipe and options of each row."""
    titles: dict[str, dict[str, None]] = {}
    for title, config in runs:
        fields: dict[str, Any] = dict(config.options)
        if recipe := config.recipe if config.recipe.epochs else None:
            length = {"iterations": recipe.iterations} if recipe.iterations else {"epochs": recipe.epochs}
            fields = {
                "optimizer": recipe.optimizer,
                "lr": recipe.lr,
                **length,
                "batch_size": recipe.batch_size,
            } | fields
        if fields:
            words = ", ".join(f"{name} {format_value(value)}" for name, value in fields.items())
            titles.setdefault(words, {})[title] = None
    return [f"{'; '.join(names)}: {words}." for words, names in titles.items()]


def note_few_steps(frame: pd.DataFrame) -> list[str]:
    """Count the runs with few optimizer steps, by method."""
    few = frame[(frame.steps > 0) & (frame.steps < FEW_STEPS)].drop_duplicates("path")
    counts = [
        f"{plural(len(runs), 'run')} of {title_method(str(name))}" for name, runs in few.groupby("method", sort=False)
    ]
    return [f"Fewer than {FEW_STEPS} steps, near the initial weights: {', '.join(counts)}."] if counts else []


def note_one_class(frame: pd.DataFrame) -> list[str]:
    """Name the targets with one class."""
    targets = frame.target[[len(counts.total) == 1 for counts in frame.per_class]].unique()
    return [f"One class, every answer is right: {', '.join(targets)}."] if len(targets) else []


def note_left_out(reasons: Mapping[str, str]) -> list[str]:
    """Name the runs that are left out by their reason. reasons: by run."""
    paths: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        paths.setdefault(reason, []).append(path)
    return [f"LEFT OUT: {join_first(runs)}: {reason}." for reason, runs in paths.items()]


def note_imported(frame: pd.DataFrame) -> list[str]:
    """Name the runs with weights from a checkpoint of public code."""
    imported = frame[frame.imported].drop_duplicates("path")
    names = [
        f"{title_method(method)} on {dataset} ({format_seeds(sorted(runs.seed.unique()))})"
        for (method, dataset), runs in imported.groupby(["method", "dataset"], sort=False)
    ]
    return [f"IMPORTED checkpoints: {'; '.join(names)}."] if names else []


def note_code(frame: pd.DataFrame) -> list[str]:
    """Describe runs of plug-in methods whose code differs between runs, or from what is installed now."""
    sentences = []
    for method, runs in frame[frame.source != ""].groupby("method", sort=False):
        installed = str(method_source(str(method)) or "")
        counts = runs.groupby("source").path.nunique()
        if len(counts) > 1 or (installed and installed != counts.index[0]):
            parts = [f"{plural(count, 'run')} by {source}" for source, count in counts.items() if source != installed]
            state = loading_error(str(method)) or f"installed: {installed}" if installed else "not installed"
            sentences.append(f"OTHER CODE of {title_method(str(method))}: {'; '.join(parts)}; {state}.")
    return sentences


def note_other_content(frame: pd.DataFrame, data: Path | None) -> list[str]:
    """Count the runs that used other content of a data set than is packed in `data`, if it is there."""
    if data is None or is_mirror(data):
        return []
    runs = zip(frame.path, frame.contents, strict=True)
    uses = {(name, digest, path) for path, contents in runs for name, digest in contents.items()}
    sentences = []
    for name in sorted({name for name, _, _ in uses}, key=dataset_order):
        # `procap ls datasets` shows what is wrong with a data set.
        with suppress(UserError):
            packed = packed_digest(data, name)
            paths = {path for used, digest, path in uses if packed and used == name and digest != packed}
            if paths:
                sentences.append(f"{plural(len(paths), 'run')} used other content of {name} than is packed now.")
    return sentences
