"""Make the table of known against unknown images: a row per method, two columns per set of unknown images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.experiment.published import title_target
from benchmarks.results.frame import metric_over_seeds
from benchmarks.results.metrics import Metric, average
from benchmarks.results.unknown_images import score_rule
from benchmarks.tables.notes import Notes
from benchmarks.tables.table import Column, Row, Table
from runner.results import MCM

if TYPE_CHECKING:
    import pandas as pd

RULE = (
    "Maximum concept matching (MCM): the highest probability of a class at temperature 1 of the cosines. AUROC; FPR95: "
    "unknown images that are taken for known ones at the threshold that keeps 95 % of these."
)


def unknown_tables(variants: Mapping[str, pd.DataFrame], notes: Notes) -> list[Table]:
    """Make a row for each title and set of known images; no table without scores. variants: the frame by title."""
    by_row = {
        (str(target), title): rows
        for title, frame in variants.items()
        for target, rows in frame[frame.unknown.astype(bool)].groupby("target", sort=False)
    }
    targets = list(dict.fromkeys(name for rows in by_row.values() for unknown in rows.unknown for name in unknown))
    rows = []
    for (known, title), results in by_row.items():
        metrics = [_measure(results, target, measure) for target in targets for measure in ("auroc", "fpr95")]
        means = [average(metrics[start::2]) for start in (0, 1)] if len(targets) > 1 else []
        rows.append(Row((known, title), (*metrics, *means), group=known))
    names = [*map(title_target, targets), *["mean"] * (len(targets) > 1)]
    columns = [column for name in names for column in (Column(f"{name} AUROC"), Column(f"{name} FPR95", "low"))]
    scores = {title: score for (_, title), results in by_row.items() if (score := score_rule(results)) != MCM}
    rules = [f"{title} has its own score, {score}." for title, score in scores.items()]
    lines = [" ".join([RULE, *rules, *notes.lines[:1]]), *notes.lines[1:]]
    labels = ("Known images", "Method")
    return [Table("unknown", "Unknown images", labels, columns, rows, lines, notes.details)] if rows else []


def _measure(frame: pd.DataFrame, target: str, measure: str) -> Metric | None:
    """Average a measure of one set of unknown images over seeds; None unless each has it."""
    detections = [unknown.get(target) for unknown in frame.unknown]
    if None in detections:
        return None
    values = {name: [getattr(each, name) for each in detections] for name in (measure, "limited")}
    return metric_over_seeds(frame.assign(**values), measure)
