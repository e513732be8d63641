"""Make tables of all runs in a folder, without a suite: both halves of every data set, and other targets.

Runs that differ in more than data set and seed have separate rows. Speeds are means over data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from benchmarks.results.frame import (
    changed_datasets,
    dataset_order,
    is_half,
    is_of_other_code,
    leave_out_older_images,
    metric_over_seeds,
    settings_key,
    sort_variants,
    title_variants,
)
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.statistics import format_seeds
from benchmarks.tables.base_novel import NOTE_ON_SPEED, SPEEDS, measure_speeds, note_untimed
from benchmarks.tables.calibration import calibration_tables
from benchmarks.tables.notes import (
    list_means,
    note_changed,
    note_few_steps,
    note_left_out,
    note_one_class,
    note_recipes,
    note_settings,
    note_sources,
)
from benchmarks.tables.rows import HALVES
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

OTHER_CODE = " (other code)"
"""Ends the titles of rows of a plug-in whose code is not what is installed."""
DETAILS = (Column("Method name", "", detail=True), Column("Data set variant", "", detail=True))
HALVES_DETAILS = (Column("FPS of the model", "", digits=0, detail=True), Column("mean of HMs", detail=True), *DETAILS)


def run_tables(frame: pd.DataFrame) -> list[Table]:
    """Make one table of base and novel classes and one of the other targets, each if it has rows."""
    frame, left_out = _one_per_seed(frame)
    frame = _add_titles(frame)
    half = is_half(frame)
    tables = []
    if half.any():
        tables.append(_halves_table(frame[half], left_out))
    if not half.all():
        tables.append(_targets_table(frame[~half], left_out))
    return tables


def calibration_of_runs(frame: pd.DataFrame) -> list[Table]:
    """Make the tables of calibration of all runs; see `calibration_tables`."""
    titled = title_runs(frame).sort_values("order", kind="stable")
    variants = {str(title): own for title, own in titled.groupby("title", sort=False)}
    recipes = note_recipes(zip(titled.title, titled.config, strict=True))
    return calibration_tables(variants, notes=[*recipes, *_one_per_seed(frame)[1]])


def title_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one result per seed and setting with a column `title`, by data set and method."""
    return _add_titles(_one_per_seed(frame)[0])


def _halves_table(frame: pd.DataFrame, left_out: list[str]) -> Table:
    changed = changed_datasets(frame)
    methods = dict(zip(frame.title, frame.method, strict=True))
    datasets = list(dict.fromkeys(frame.dataset))
    # By data set and title: the cells of HALVES, SPEEDS and the first of HALVES_DETAILS.
    found: dict[tuple[str, str], list[Metric | None]] = {}
    for (dataset, title), own in frame.groupby(["dataset", "title"], sort=False):
        base, novel = (metric_over_seeds(own[own.target_classes == half]) for half in ("base", "novel"))
        found[dataset, title] = [base, novel, harmonic(base, novel), *measure_speeds(own)]
    metrics = [metric for cells in found.values() for metric in cells[:3] if metric]
    hms: dict[str, Metric | None] = {}
    complete = [title for title in methods if all((dataset, title) in found for dataset in datasets)]
    # Skip an average that only one of several methods has.
    averaged = complete if len(datasets) > 1 and (len(complete) > 1 or len(methods) == 1) else []
    for title in averaged:
        every = (found[dataset, title] for dataset in datasets)
        base, novel, mean_of_hms, *speeds = (average(column) for column in zip(*every, strict=True))
        if base or novel:
            found[AVERAGE, title] = [base, novel, harmonic(base, novel), *speeds]
            hms[title] = mean_of_hms
    rows = []
    for (dataset, title), numbers in found.items():
        mean_of_hms = hms[title] if dataset == AVERAGE else None
        cells = (*numbers, mean_of_hms, methods[title], _describe_changes(changed, [dataset]))
        compares = not title.endswith(OTHER_CODE)
        rows.append(Row((dataset, title), cells, group=dataset, average=dataset == AVERAGE, compares=compares))
    notes = ["Accuracy in %, computed from integer counts; HM is the harmonic mean of base and novel accuracy."]
    if hms:
        also = f" The mean of the data sets' HMs is: {listed}." if (listed := list_means(hms)) else ""
        notes.append(f"Average's HM is the harmonic mean of average base and average novel accuracy.{also}")
    notes += _note_runs(frame, metrics, changed)
    differ = any(base and novel and not hm and base.seeds != novel.seeds for base, novel, hm, *_ in found.values())
    if differ or any((AVERAGE, title) not in found for title in averaged):
        notes.append("There is no HM or average over different seeds.")
    untimed = dict.fromkeys(frame.title[frame.features != "computed"])
    notes += [NOTE_ON_SPEED, *left_out, *note_untimed(untimed), *note_sources(frame)]
    labels, columns = ("Data set", "Method"), (*HALVES, *SPEEDS, *HALVES_DETAILS)
    return Table("table", "Base and novel classes", labels, columns, rows, notes, wide=True)


def _targets_table(frame: pd.DataFrame, left_out: list[str]) -> Table:
    changed = changed_datasets(frame)
    results = frame.assign(
        trained_on=frame.dataset + ":" + frame.classes, tested=[dataset_order(name) for name in frame.target_dataset]
    ).sort_values(["trained_on", "tested", "target"], kind="stable")
    rows: list[Row] = []
    metrics: list[Metric] = []
    for (trained_on, target, title), own in results.groupby(["trained_on", "target", "title"], sort=False):
        metric = metric_over_seeds(own)
        metrics += [metric] if metric else []
        first = own.iloc[0]
        cells = (metric, first.method, _describe_changes(changed, [first.dataset, first.target_dataset]))
        # Only the method may vary within a group, so the training set is part of the group's name.
        compares = not title.endswith(OTHER_CODE)
        rows.append(Row((trained_on, target, title), cells, group=f"{trained_on} {target}", compares=compares))
    notes = (
        "Accuracy in %, computed from integer counts. Rows of one training set and one target are a group.",
        *_note_runs(frame, metrics, changed),
        *left_out,
        *note_sources(frame),
    )
    labels, columns = ("Trained on", "Tested on", "Method"), (Column("Accuracy"), *DETAILS)
    return Table("table-targets", "Accuracy", labels, columns, rows, notes, wide=True)


def _add_titles(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a column `title`, give results of untrained methods the seeds of the other rows, and sort."""
    import pandas as pd

    keys = [settings_key(*row, classes=False) for row in zip(frame.method, frame.settings, strict=True)]
    order = {key: number for number, key in enumerate(sort_variants(keys))}
    frame = frame.assign(
        title=title_variants(frame),
        order=[order[key] for key in keys],
        place=[dataset_order(name) for name in frame.dataset],
    )
    for title, own in frame[frame.source != ""].groupby("title"):
        mark = OTHER_CODE * is_of_other_code(str(own.method.iloc[0]), own.source)
        frame.loc[frame.title == title, "title"] = f"{title}{mark}"
    trained = frame[frame.epochs > 0]
    seeds = trained.groupby(["dataset", "classes", "target"]).seed.unique()
    parts = [trained]
    for key, own in frame[frame.epochs == 0].groupby(["dataset", "classes", "target", "title"]):
        wanted = set(seeds.get(key[:3], trained.seed.unique())) or set(own.seed)
        parts.append(own[own.seed.isin(wanted)])
        parts += [own.head(1).assign(seed=seed) for seed in sorted(wanted - set(own.seed))]
    return pd.concat(parts).sort_values(["place", "order"], kind="stable")


def _one_per_seed(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Drop results of older images, and all but the first that would share a cell and a seed; describe them."""
    frame, older = leave_out_older_images(frame)
    keys = [settings_key(*row) for row in zip(frame.method, frame.settings, strict=True)]
    cells = frame.assign(key=list(map(repr, keys))).groupby(["dataset", "seed", "key", "target"], sort=False)
    first = cells.path.transform("first")
    # Runs without training are the same for all shots.
    is_dropped = (frame.path != first) & (frame.epochs > 0)
    dropped = zip(frame.path[is_dropped], first[is_dropped], strict=True)
    notes = [
        *note_left_out(older),
        *(
            f"{path} is left out: it differs from {other} in its recipe or few-shot samples alone."
            for path, other in dict.fromkeys(dropped)
        ),
    ]
    return frame[frame.path == first], notes


def _describe_changes(changed: Mapping[str, str], datasets: Iterable[str]) -> str | None:
    """Describe how the data sets of a row differ from published ones; None if they do not."""
    return "; ".join(dict.fromkeys(f"{name}: {changed[name]}" for name in datasets if name in changed)) or None


def _note_runs(frame: pd.DataFrame, metrics: list[Metric], changed: Mapping[str, str]) -> list[str]:
    """Describe the deviations, the seeds if they are the same everywhere, the settings and the data sets."""
    found = []
    if any(metric.std is not None for metric in metrics):
        found.append("± is the sample standard deviation over seeds (ddof = 1).")
    if len({metric.seeds for metric in metrics}) == 1:
        found.append(f"n = {len(metrics[0].seeds)}: {format_seeds(metrics[0].seeds)}.")
    runs = frame.drop_duplicates("path")
    found += [*note_settings(runs.settings), *note_recipes(zip(runs.title, runs.config, strict=True))]
    if any(metric.limited for metric in metrics):
        found.append("† limited: only the first images of a test set; never averaged with whole results nor marked.")
    return [*found, *note_few_steps(frame), *note_one_class(frame), *note_changed(changed)]
