"""Make tables of all runs in a folder, without a suite: both halves of every data set, and other targets.

Runs that differ in more than data set and seed have separate rows. Speeds are means over data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from benchmarks.experiment.published import AVERAGE
from benchmarks.results.frame import (
    check_contents,
    dataset_order,
    is_half,
    is_of_other_code,
    leave_out_other_weights,
    metric_over_seeds,
    title_variants,
    variant_order,
)
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.statistics import format_seeds
from benchmarks.tables.calibration import calibration_tables
from benchmarks.tables.notes import Notes, frame_notes
from benchmarks.tables.rows import HALVES, NOTE_ON_SPEED, SPEEDS, measure_speeds
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

OTHER_CODE = ", other code"
"""Ends the titles of rows of a plug-in whose code is not what is installed."""
METHOD_NAME = Column("Method name", "", detail=True)
MODEL_FPS, MEAN_OF_HMS = Column("FPS of the model", "", digits=0, detail=True), Column("mean of HMs", detail=True)


def run_tables(frame: pd.DataFrame) -> list[Table]:
    """Make one table of base and novel classes and one of the other targets, each if it has rows."""
    frame, left_out = title_runs(frame)
    half = is_half(frame)
    tables = []
    if half.any():
        tables.append(_halves_table(frame[half], left_out))
    if not half.all():
        tables.append(_targets_table(frame[~half], left_out))
    return tables


def calibration_of_runs(frame: pd.DataFrame) -> list[Table]:
    """Make the table of calibration of all runs; see `calibration_tables`."""
    frame, left_out = title_runs(frame)
    frame = frame.sort_values("order", kind="stable")
    variants = {str(title): rows for title, rows in frame.groupby("title", sort=False)}
    return calibration_tables(variants, _note_runs(frame, left_out))


def title_runs(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return one result per row, seed and target with a column `title`, and the runs that are left out.

    Results of untrained methods get the seeds of the other rows. Raises UserError if contents of a data set differ.
    """
    import pandas as pd

    check_contents(frame)
    frame, left_out = leave_out_other_weights(frame)
    keys = [variant_order(method, settings) for method, settings in zip(frame.method, frame.settings, strict=True)]
    ranks = {repr(key): number for number, key in enumerate(sorted(keys))}
    frame = frame.assign(
        title=title_variants(frame),
        order=[ranks[repr(key)] for key in keys],
        dataset_rank=[dataset_order(name) for name in frame.dataset],
    )
    for title, rows in frame[frame.source != ""].groupby("title"):
        if is_of_other_code(str(rows.method.iloc[0]), rows.source):
            frame.loc[frame.title == title, "title"] = f"{title}{OTHER_CODE}"
    first = frame.groupby(["dataset", "classes", "seed", "title", "target"], sort=False).path.transform("first")
    for path, kept, epochs in zip(frame.path, first, frame.epochs, strict=True):
        # Runs without training are the same for all shots.
        if path != kept and epochs:
            left_out[path] = f"its row has the result of {kept} for this seed"
    frame = frame[frame.path == first]
    trained = frame[frame.epochs > 0]
    seeds = trained.groupby(["dataset", "classes", "target"]).seed.unique()
    parts = [trained]
    for key, rows in frame[frame.epochs == 0].groupby(["dataset", "classes", "target", "title"]):
        wanted = set(seeds.get(key[:3], trained.seed.unique())) or set(rows.seed)
        parts.append(rows[rows.seed.isin(wanted)])
        parts += [rows.head(1).assign(seed=seed) for seed in sorted(wanted - set(rows.seed))]
    return pd.concat(parts).sort_values(["dataset_rank", "order"], kind="stable"), left_out


def _halves_table(frame: pd.DataFrame, left_out: Mapping[str, str]) -> Table:
    methods = dict(zip(frame.title, frame.method, strict=True))
    datasets = list(dict.fromkeys(frame.dataset))
    # By data set and title: the cells of HALVES, SPEEDS and MODEL_FPS.
    cells: dict[tuple[str, str], list[Metric | None]] = {}
    for (dataset, title), rows in frame.groupby(["dataset", "title"], sort=False):
        base, novel = (metric_over_seeds(rows[rows.target_classes == half]) for half in ("base", "novel"))
        cells[dataset, title] = [base, novel, harmonic(base, novel), *measure_speeds(rows)]
    means: dict[str, Metric | None] = {}
    complete = [title for title in methods if all((dataset, title) in cells for dataset in datasets)]
    # Skip an average that only one of several methods has.
    averaged = complete if len(datasets) > 1 and (len(complete) > 1 or len(methods) == 1) else []
    for title in averaged:
        by_dataset = zip(*(cells[dataset, title] for dataset in datasets), strict=True)
        base, novel, mean_of_hms, *speeds = (average(column) for column in by_dataset)
        if base or novel:
            cells[AVERAGE, title] = [base, novel, harmonic(base, novel), *speeds]
            means[title] = mean_of_hms
    rows = []
    for (dataset, title), numbers in cells.items():
        mean_of_hms = means[title] if dataset == AVERAGE else None
        row = (*numbers, mean_of_hms, methods[title])
        compares = not title.endswith(OTHER_CODE)
        rows.append(Row((dataset, title), row, group=dataset, average=dataset == AVERAGE, compares=compares))
    rules = ["HM: harmonic mean of base and novel accuracy (of the averages)." if means else "HM: harmonic mean."]
    metrics = [metric for numbers in cells.values() for metric in numbers[:3] if metric]
    differ = any(base and novel and not hm and base.seeds != novel.seeds for base, novel, hm, *_ in cells.values())
    if differ or any((AVERAGE, title) not in cells for title in averaged):
        rules.append("There is no HM or average over different seeds.")
    notes = _note_runs(frame, left_out, *rules, metrics=metrics, details=(NOTE_ON_SPEED,))
    labels, columns = ("Data set", "Method"), (*HALVES, *SPEEDS, MODEL_FPS, MEAN_OF_HMS, METHOD_NAME)
    return Table("table", "Base and novel classes", labels, columns, rows, notes.lines, notes.details, wide=True)


def _targets_table(frame: pd.DataFrame, left_out: Mapping[str, str]) -> Table:
    results = frame.assign(
        trained_on=frame.dataset + ":" + frame.classes, tested=[dataset_order(name) for name in frame.target_dataset]
    ).sort_values(["trained_on", "tested", "target"], kind="stable")
    rows: list[Row] = []
    metrics: list[Metric] = []
    for (trained_on, target, title), group in results.groupby(["trained_on", "target", "title"], sort=False):
        metric = metric_over_seeds(group)
        metrics += [metric] if metric else []
        fps, seconds, _ = measure_speeds(group)
        compares = not title.endswith(OTHER_CODE)
        # Only the method may vary within a group, so the training set is part of the group's name.
        row = (metric, fps, seconds, group.method.iloc[0])
        rows.append(Row((trained_on, target, title), row, group=f"{trained_on} {target}", compares=compares))
    notes = _note_runs(frame, left_out, metrics=metrics, details=(NOTE_ON_SPEED,))
    labels, columns = ("Trained on", "Tested on", "Method"), (Column("Accuracy"), *SPEEDS, METHOD_NAME)
    return Table("table-targets", "Accuracy", labels, columns, rows, notes.lines, notes.details, wide=True)


def _note_runs(
    frame: pd.DataFrame,
    left_out: Mapping[str, str],
    *rules: str,
    metrics: Iterable[Metric] = (),
    details: Iterable[str] = (),
) -> Notes:
    """Write the notes of runs, with the seeds if they are the same everywhere."""
    seeds = {metric.seeds for metric in metrics}
    sentences = list(rules)
    if len(seeds) == 1:
        [shared] = seeds
        spread = "; ± is the sample standard deviation" if len(shared) > 1 else ""
        sentences.append(f"{format_seeds(shared).capitalize()}{spread}.")
    runs = frame.drop_duplicates("path")
    titled = zip(runs.title, runs.config, strict=True)
    return frame_notes(frame, titled, *sentences, left_out=left_out, details=details)
