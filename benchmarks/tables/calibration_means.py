"""Make the table of calibration, averaged over data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.experiment.titles import order_in
from benchmarks.results.metrics import Metric, average, metric_over_seeds
from benchmarks.tables.notes import Notes
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

MEASURES: Mapping[str, Column] = {
    "accuracy": Column("Accuracy"),
    "macro_accuracy": Column("Macro accuracy"),
    "nll": Column("NLL", "low", digits=3),
    "ece": Column("ECE", "low"),
    "brier": Column("Brier", "low", digits=3),
    "temperature": Column("T", "", digits=3),
}
"""The columns of the table, by the column of the frame that they average; the last where a temperature was fitted."""
IMAGES = ("base classes", "novel classes", "all classes", "other data sets")
"""What was tested, in the order of the table."""
MEANS_RULE = "Means over data sets. Macro accuracy: mean over classes. NLL in nats. ECE: 15 equal bins. Brier: 0 to 2."


def calibration_tables(variants: Mapping[str, pd.DataFrame], notes: Notes, suite: str = "") -> list[Table]:
    """Make a row for each title and group of test images; no table without calibration.

    variants: parts of the frame by title. Rows of the same data sets and targets are compared. notes: with MEANS_RULE.
    suite: its name, if any.
    """
    is_fitted = any((frame.temperature != 1).any() for frame in variants.values())
    measures = {name: column for name, column in MEASURES.items() if is_fitted or name != "temperature"}
    groups: dict[tuple[bool, int, str, tuple[str, ...]], list[Row]] = {}
    for title, frame in variants.items():
        if frame.nll.isna().all():
            continue
        images = (frame.target_classes + " classes").where(frame.target_dataset == frame.dataset, IMAGES[-1])
        for (classes, tested, split), results in frame.groupby([frame.classes, images, frame.split]):
            tests = tuple(sorted({*(results.dataset + " " + results.target)}))
            count = plural(len(tests), "data set") if tested != IMAGES[-1] else str(len(tests))
            words = f"{tested}, {count} (trained on {classes}{', ' + split if split != 'test' else ''})"
            cells = tuple(average_over_tests(results, column) for column in measures)
            group = (classes != "base", order_in(tested, IMAGES)[0], words, tests)
            # Only rows whose means are over the same tests are ranked.
            groups.setdefault(group, []).append(Row((words, title), cells, group=repr(tests)))
    # Trained on base classes first, then in the order of IMAGES; within a group in the order of `variants`.
    rows = [row for group in sorted(groups) for row in groups[group]]
    name, labels, columns = f"{suite}-calibration".strip("-"), ("Test images", "Method"), [*measures.values()]
    return [Table(name, "Calibration", labels, columns, rows, notes.lines, notes.details)] if rows else []


def average_over_tests(frame: pd.DataFrame, column: str) -> Metric | None:
    """Average a column over seeds, then over data sets and targets; None if a value is missing or seeds differ."""
    # Groups of a wide frame are slow to make.
    needed = frame[["dataset", "target", "seed", "limited", "chosen_on_test", "unlabelled", column]]
    return average([metric_over_seeds(rows, column) for _, rows in needed.groupby(["dataset", "target"])])
