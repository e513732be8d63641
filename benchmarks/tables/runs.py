"""Make tables of all runs in a folder, without a suite: both halves of every data set, and other targets.

Runs that differ in more than data set and seed have separate rows. Speeds are means over data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.results.frame import (
    accuracy_over_seeds,
    changed_datasets,
    dataset_order,
    images_per_second,
    is_half,
    settings_key,
    title_variants,
)
from benchmarks.results.metrics import Halves, Metric, average, harmonic, mean_if_complete
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.statistics import format_seeds
from benchmarks.tables.base_novel import SPEEDS
from benchmarks.tables.notes import note_changed, note_settings, note_unequal
from benchmarks.tables.rows import HALVES
from benchmarks.tables.table import Cell, Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

DETAILS = (Column("Method name", "", detail=True), Column("Data set variant", "", detail=True))
HALVES_DETAILS = (Column("FPS of the model", "", digits=0, detail=True), Column("mean of HMs", detail=True), *DETAILS)


def run_tables(frame: pd.DataFrame) -> list[Table]:
    """Make one table of base and novel classes and one of the other targets, each if it has rows."""
    frame, left_out = _one_per_seed(frame)
    half = is_half(frame)
    tables = []
    if half.any():
        tables.append(_halves(_titled(frame[half]), left_out))
    if not half.all():
        tables.append(_targets(_titled(frame[~half]), left_out))
    return tables


@dataclass(frozen=True)
class _Line:
    """One method on one data set, or on average; speeds are FPS, training seconds, FPS of the model."""

    method: str
    halves: Halves
    speeds: tuple[float | None, float | None, float | None]
    mean_of_hms: Metric | None = None


def _halves(frame: pd.DataFrame, left_out: list[str]) -> Table:
    lines: dict[tuple[str, str], _Line] = {}
    for (dataset, title), own in frame.groupby(["dataset", "title"], sort=False):
        base, novel = (accuracy_over_seeds(own[own.target_classes == half]) for half in ("base", "novel"))
        seconds = own.groupby("seed").train_seconds.first().dropna()
        speeds = (
            images_per_second(own),
            float(seconds.mean()) if len(seconds) else None,
            images_per_second(own, "fps_model"),
        )
        lines[dataset, title] = _Line(own.method.iloc[0], (base, novel, harmonic(base, novel)), speeds)
    averages = _averages(lines)
    changed = changed_datasets(frame)
    rows = []
    for (dataset, title), line in {**lines, **averages}.items():
        numbers = (None if number is None else Metric(number) for number in line.speeds)
        cells = (*line.halves, *numbers, line.mean_of_hms, line.method, _describe_changes(changed, [dataset]))
        rows.append(Row((dataset, title), cells, group=dataset, average=dataset == AVERAGE))
    metrics = [metric for line in lines.values() for metric in line.halves if metric]
    notes = (
        "Accuracy in %, computed from integer counts; HM is the harmonic mean of base and novel accuracy.",
        *_note_average(averages),
        *_note_seeds(metrics),
        *(["There is no HM or average over different seeds."] if _seeds_differ(metrics) else []),
        "FPS: images per second in the evaluation of both halves, decoding included, warm-up left out (FPS of the "
        "model, in CSV and JSON alone: without waiting for images); training s: training alone. All are of the machine "
        "that ran it.",
        *_note_runs(frame, metrics, changed),
        *left_out,
        *_note_untimed(frame),
        *note_unequal(frame),
    )
    columns = (*HALVES, *SPEEDS, *HALVES_DETAILS)
    return Table("table", "Base and novel classes", ("Data set", "Method"), columns, tuple(rows), notes, wide=True)


def _averages(lines: Mapping[tuple[str, str], _Line]) -> dict[tuple[str, str], _Line]:
    """Average each method over every data set of the table; none if a data set is missing."""
    datasets = {dataset for dataset, _ in lines}
    found: dict[tuple[str, str], _Line] = {}
    for title in dict.fromkeys(title for _, title in lines) if len(datasets) > 1 else ():
        own = [line for (_, other), line in lines.items() if other == title]
        if len(own) < len(datasets):
            continue
        base, novel = (average([line.halves[half] for line in own]) for half in (0, 1))
        fps, seconds, model = (mean_if_complete([line.speeds[place] for line in own]) for place in range(3))
        hms = average([line.halves[2] for line in own])
        if any(number is not None for number in (base, novel, fps, seconds, model)):
            halves = (base, novel, harmonic(base, novel))
            found[AVERAGE, title] = _Line(own[0].method, halves, (fps, seconds, model), hms)
    return found


def _targets(frame: pd.DataFrame, left_out: list[str]) -> Table:
    changed = changed_datasets(frame)
    lines = []
    for (dataset, classes, target, title), own in frame.groupby(["dataset", "classes", "target", "title"], sort=False):
        metric = accuracy_over_seeds(own)
        assert metric is not None
        tested = own.target_dataset.iloc[0]
        cells: tuple[Cell, ...] = (metric, own.method.iloc[0], _describe_changes(changed, [dataset, tested]))
        # Only the method may vary within a group, so the training set is part of the group's name.
        trained_on = f"{dataset}:{classes}"
        row = Row((trained_on, target, title), cells, group=f"{trained_on} {target}")
        lines.append(((trained_on, dataset_order(tested), target), metric, row))
    lines.sort(key=lambda line: line[0])
    metrics = [metric for _, metric, _ in lines]
    notes = (
        "Accuracy in %, computed from integer counts. Rows of one training set and one target are a group.",
        *_note_seeds(metrics),
        *_note_runs(frame, metrics, changed),
        *left_out,
        *note_unequal(frame),
    )
    labels, columns = ("Trained on", "Tested on", "Method"), (Column("Accuracy"), *DETAILS)
    rows = tuple(row for _, _, row in lines)
    return Table("table-targets", "Other targets", labels, columns, rows, notes, wide=True)


def _titled(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column `title` and sort rows by data set, then by method and settings.

    A method without training has one result for all seeds, which is repeated for the seeds of other rows of its target.
    """
    keys = [settings_key(*row, classes=False) for row in zip(frame.method, frame.settings, strict=True)]
    order = {key: number for number, key in enumerate(sorted(set(keys)))}
    frame = frame.assign(
        title=title_variants(frame, classes=False),
        order=[order[key] for key in keys],
        place=[dataset_order(name) for name in frame.dataset],
    )
    return _for_all_seeds(frame).sort_values(["place", "order"], kind="stable")


def _for_all_seeds(frame: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    trained = frame[frame.epochs > 0].groupby(["dataset", "classes", "target"]).seed.unique()
    parts = [frame]
    for key, own in frame[frame.epochs == 0].groupby(["dataset", "classes", "target", "title"]):
        others = set(trained.get(key[:3], ())) - set(own.seed)
        parts += [own.head(1).assign(seed=seed) for seed in sorted(others)]
    return pd.concat(parts) if len(parts) > 1 else frame


def _one_per_seed(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Drop all but the first of results that would share a cell and a seed, and describe them."""
    first: dict[object, str] = {}
    keep, notes = [], []
    for row in frame.itertuples():
        key = (row.dataset, row.seed, settings_key(str(row.method), row.settings), row.target)
        other = first.setdefault(key, str(row.path))
        keep.append(other == row.path)
        if other != row.path:
            notes.append(f"{row.path} is left out: it differs from {other} in its recipe or few-shot samples alone.")
    return frame[keep], list(dict.fromkeys(notes))


def _describe_changes(changed: Mapping[str, str], datasets: Iterable[str]) -> str | None:
    """Describe how the data sets of a row differ from published ones; None if they do not."""
    return "; ".join(dict.fromkeys(f"{name}: {changed[name]}" for name in datasets if name in changed)) or None


def _note_average(averages: Mapping[tuple[str, str], _Line]) -> list[str]:
    if not averages:
        return []
    means = {title: line.mean_of_hms for (_, title), line in averages.items() if line.halves[2]}
    listed = "; ".join(f"{title} {mean.mean:.2f}" for title, mean in means.items() if mean)
    also = f" The mean of the data sets' HMs is: {listed}." if listed else ""
    return [f"Average's HM is the harmonic mean of average base and average novel accuracy.{also}"]


def _seeds_differ(metrics: list[Metric]) -> bool:
    return len({metric.seeds for metric in metrics}) > 1


def _note_seeds(metrics: list[Metric]) -> list[str]:
    """Describe what the deviations are, and the number of seeds if it is the same everywhere."""
    found = []
    if any(metric.std is not None for metric in metrics):
        found.append("± is the sample standard deviation over seeds (ddof = 1).")
    if not _seeds_differ(metrics):
        found.append(f"n = {len(metrics[0].seeds)}: {format_seeds(metrics[0].seeds)}.")
    return found


def _note_runs(frame: pd.DataFrame, metrics: list[Metric], changed: Mapping[str, str]) -> list[str]:
    runs = frame.drop_duplicates("path")
    found = note_settings(zip(runs.method, runs.settings, strict=True))
    if any(metric.limited for metric in metrics):
        found.append(
            "† limited: only the first images of a test set were evaluated; never averaged with whole results nor "
            "marked."
        )
    return found + note_changed(changed)


def _note_untimed(frame: pd.DataFrame) -> list[str]:
    """Describe methods without a speed because the image encoder did not run."""
    titles = dict.fromkeys(frame.title[frame.features != "computed"])
    if not titles:
        return []
    named = ", ".join(titles)
    return [f"FPS leaves out evaluations with image features from the cache ({named}): procap eval --force times them."]
