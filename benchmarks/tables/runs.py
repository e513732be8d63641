"""Make tables of all runs in a folder, without a suite: both halves of each data set, and other targets.

Runs that differ in more than data set and seed have separate rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.experiment.published import AVERAGE, title_target
from benchmarks.experiment.titles import choose_reference, sort_methods, title_variants, variant_order
from benchmarks.results.detection import score_rule
from benchmarks.results.frame import check_contents, dataset_order, drop_equal, is_half
from benchmarks.results.metrics import Metric, average, harmonic, metric_over_seeds
from benchmarks.tables.calibration_means import MEANS_RULE, calibration_tables
from benchmarks.tables.columns import HALVES, NOTE_ON_SPEED, PARAMETERS, SPEEDS, average_speeds, count_parameters
from benchmarks.tables.notes import Notes, run_notes
from benchmarks.tables.table import Column, Row, Table
from runner.results import MCM

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN_RULE = (
    "Maximum concept matching (MCM): the highest probability of a class at temperature 1 of the cosines. AUROC; FPR95: "
    "unknown images that are taken for known ones at the threshold that keeps 95 % of these."
)


def run_tables(frame: pd.DataFrame, reference: str = "") -> list[Table]:
    """Make one table of base and novel classes and one of the other targets, each if it has rows.

    reference: the method whose rows are last, see `choose_reference`.
    """
    frame = title_runs(frame, reference)
    half = is_half(frame)
    parts = ((_halves_table, frame[half]), (_targets_table, frame[~half]))
    return [make(part) for make, part in parts if len(part)]


def calibration_of_runs(frame: pd.DataFrame, reference: str = "") -> list[Table]:
    """Make the table of calibration of all runs; see `calibration_tables`."""
    frame = title_runs(frame, reference).sort_values("order", kind="stable")
    variants = {str(title): rows for title, rows in frame.groupby("title", sort=False)}
    return calibration_tables(variants, _note_runs(frame, MEANS_RULE))


def unknown_of_runs(frame: pd.DataFrame, reference: str = "") -> list[Table]:
    """Make a row per title and set of known images, two columns per set of unknown ones; no table without scores."""
    if not frame.unknown.any():
        return []
    frame = title_runs(frame, reference).sort_values("order", kind="stable")
    scored, rules, rows = frame[frame.unknown.astype(bool)], {UNKNOWN_RULE: None}, []
    targets = list(dict.fromkeys(name for unknown in scored.unknown for name in unknown))
    for (known, title), evaluations in scored.groupby(["target", "title"], sort=False):
        metrics = [_mean_of(evaluations, target, measure) for target in targets for measure in ("auroc", "fpr95")]
        means = [average(metrics[start::2]) for start in (0, 1)] if len(targets) > 1 else []
        rows.append(Row((known, title), (*metrics, *means), group=known))
        if (score := score_rule(evaluations)) != MCM:
            rules[f"{title} has its own score, {score}."] = None
    names = [*map(title_target, targets), *["mean"] * (len(targets) > 1)]
    columns = [column for name in names for column in (Column(f"{name} AUROC"), Column(f"{name} FPR95", "low"))]
    notes = _note_runs(frame, *rules, metrics=[cell for row in rows for cell in row.cells if isinstance(cell, Metric)])
    labels = ("Known images", "Method")
    return [Table("unknown", "Unknown images", labels, columns, rows, notes.lines, notes.details)]


def _mean_of(frame: pd.DataFrame, target: str, measure: str) -> Metric | None:
    """Average a measure of one set of unknown images over seeds; None unless each has it."""
    detections = [unknown.get(target) for unknown in frame.unknown]
    if None in detections:
        return None
    values = {name: [getattr(each, name) for each in detections] for name in (measure, "limited")}
    return metric_over_seeds(frame.assign(**values), measure)


def title_runs(frame: pd.DataFrame, reference: str = "") -> pd.DataFrame:
    """Return one result per row, seed and target, sorted, with columns `title`, `order` (of titles) and `dataset_rank`.

    Results of methods that draw nothing get the seeds of the other rows. Raises UserError if images of a data set or
    weights of a backbone differ.
    """
    import pandas as pd

    check_contents(frame)
    last = choose_reference(sort_methods(frame.method), reference)
    settings = zip(frame.method, frame.settings, strict=True)
    keys = [(method == last, *variant_order(method, values)) for method, values in settings]
    # The reference's rows come last. By `repr`, as keys contain lists, which cannot be hashed.
    ranks = {repr(key): number for number, key in enumerate(sorted(keys))}
    frame = frame.assign(
        title=title_variants(frame),
        order=[ranks[repr(key)] for key in keys],
        dataset_rank=[dataset_order(name) for name in frame.dataset],
    )
    frame = drop_equal(frame)
    drawn = frame[frame.depends_on_seed]
    seeds = drawn.groupby(["dataset", "classes", "target"]).seed.unique()
    parts = [drawn]
    for key, rows in frame[~frame.depends_on_seed].groupby(["dataset", "classes", "target", "title"]):
        # Seeds of drawn results on the same target, else of all drawn results, else its own.
        used_seeds = set(seeds.get(key[:3], drawn.seed.unique())) or set(rows.seed)
        parts += [rows.head(1).assign(seed=seed) for seed in sorted(used_seeds)]
    return pd.concat(parts).sort_values(["dataset_rank", "order"], kind="stable")


def _halves_table(frame: pd.DataFrame) -> Table:
    datasets = list(dict.fromkeys(frame.dataset))
    # By data set and title, the labels of a row: its cells of HALVES, PARAMETERS and SPEEDS.
    cells_by_row: dict[tuple[str, str], Sequence[Metric | None]] = {}
    for (dataset, title), evaluations in frame.groupby(["dataset", "title"], sort=False):
        base, novel = (metric_over_seeds(evaluations[evaluations.target_classes == half]) for half in ("base", "novel"))
        costs = [count_parameters(evaluations), *average_speeds(evaluations)[:2]]
        cells_by_row[dataset, title] = [base, novel, harmonic(base, novel), *costs]
    for title in dict.fromkeys(frame.title) if len(datasets) > 1 else ():
        if all((dataset, title) in cells_by_row for dataset in datasets):
            by_dataset = zip(*(cells_by_row[dataset, title] for dataset in datasets), strict=True)
            base, novel, _, *costs = (average(column) for column in by_dataset)
            if base or novel:
                cells_by_row[AVERAGE, title] = [base, novel, harmonic(base, novel), *costs]
    rows = [Row(key, tuple(cells), group=key[0], average=key[0] == AVERAGE) for key, cells in cells_by_row.items()]
    averaged = any(row.average for row in rows)
    rule = f"HM: harmonic mean{' of mean base and mean novel accuracy (of the averages)' if averaged else ''}."
    notes = _note_runs(frame, rule, metrics=[each for cells in cells_by_row.values() for each in cells[:3]])
    details, labels = (NOTE_ON_SPEED, *notes.details), ("Data set", "Method")
    return Table("table", "Base and novel classes", labels, (*HALVES, PARAMETERS, *SPEEDS), rows, notes.lines, details)


def _targets_table(frame: pd.DataFrame) -> Table:
    ordered = frame.assign(
        trained_on=frame.dataset + ":" + frame.classes, tested=[dataset_order(name) for name in frame.target_dataset]
    ).sort_values(["trained_on", "tested", "target"], kind="stable")
    rows, metrics = [], []
    # Of runs on all classes, by title: the cells of each data set.
    cells_by_title: dict[str, list[Sequence[Metric | None]]] = {}
    is_own = (ordered.classes == "all") & (ordered.target == ordered.dataset + ":all:test")
    for (trained_on, target, title), evaluations in ordered.groupby(["trained_on", "target", "title"], sort=False):
        metrics.append(metric_over_seeds(evaluations))
        cells = (metrics[-1], count_parameters(evaluations), *average_speeds(evaluations)[:2])
        # Only the method may vary within a group, so the training set is part of the group's name.
        rows.append(Row((trained_on, target, title), cells, group=f"{trained_on} {target}"))
        if is_own[evaluations.index].all():
            cells_by_title.setdefault(title, []).append(cells)
    count = ordered.dataset[is_own].nunique()
    for title, by_dataset in cells_by_title.items():
        if len(by_dataset) == count > 1:
            means = tuple(map(average, zip(*by_dataset, strict=True)))
            rows.append(Row((AVERAGE, "all classes", title), means, group=AVERAGE, average=True))
    notes = _note_runs(frame, metrics=metrics)
    details, labels = (NOTE_ON_SPEED, *notes.details), ("Trained on", "Tested on", "Method")
    return Table(
        "table-targets", "Accuracy", labels, (Column("Accuracy"), PARAMETERS, *SPEEDS), rows, notes.lines, details
    )


def _note_runs(frame: pd.DataFrame, *rules: str, metrics: Iterable[Metric | None] = ()) -> Notes:
    """Write the notes of runs, with the seeds if they are the same in all metrics."""
    runs = frame.drop_duplicates("path")
    seeds = {metric.seeds for metric in metrics if metric}
    shared = seeds.pop() if len(seeds) == 1 else ()
    return run_notes(frame, zip(runs.title, runs.config, strict=True), shared, rules)
