"""Make the table of calibration, averaged over data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


def calibration_tables(
    variants: Mapping[str, pd.DataFrame], notes: Notes, suite: str = "", seeds: Sequence[int] = ()
) -> list[Table]:
    """Make a row for each title and group of test images; no table without calibration.

    variants: parts of the frame by title. Rows of the same data sets and targets are compared. notes: with MEANS_RULE.
    suite, seeds: its name, and the seeds that each mean needs, if any.
    """
    is_fitted = any((frame.temperature != 1).any() for frame in variants.values())
    measures = {name: column for name, column in MEASURES.items() if is_fitted or name != "temperature"}
    groups: dict[tuple[bool, int, str, tuple[str, ...]], list[tuple[str, Sequence[Metric | None]]]] = {}
    for title, frame in variants.items():
        if frame.nll.isna().all():
            continue
        images = (frame.target_classes + " classes").where(frame.target_dataset == frame.dataset, IMAGES[-1])
        for (classes, tested, split), results in frame.groupby([frame.classes, images, frame.split]):
            is_transfer, trained_on = tested == IMAGES[-1], classes
            tests = tuple(sorted({*(results.dataset + " to " + results.target if is_transfer else results.dataset)}))
            count = str(len(tests)) if is_transfer else plural(len(tests), "data set")
            if len(tests) == 1:
                count = results.target_dataset.iloc[0]
                trained_on += f" of {results.dataset.iloc[0]}" * is_transfer
            words = f"{tested}, {count} (trained on {trained_on}{', ' + split if split != 'test' else ''})"
            cells = tuple(average_over_tests(results, column, seeds) for column in measures)
            group = (classes != "base", order_in(tested, IMAGES)[0], words, tests)
            # Only rows whose means are over the same trainings and tests are ranked.
            groups.setdefault(group, []).append((title, cells))
    uses, rows = Counter(words for _, _, words, _ in groups), list[Row]()
    # Trained on base classes first, then in the order of IMAGES; within a group in the order of `variants`.
    for (_, _, words, tests), lines in sorted(groups.items()):
        # As many data sets, but different ones, are named.
        label = f"{words}: {', '.join(tests)}" if uses[words] > 1 else words
        rows += [Row((label, title), tuple(cells), group=label) for title, cells in lines]
    name, labels, columns = f"{suite}-calibration".strip("-"), ("Test images", "Method"), [*measures.values()]
    return [Table(name, "Calibration", labels, columns, rows, notes.lines, notes.details)] if rows else []


def average_over_tests(frame: pd.DataFrame, column: str, seeds: Sequence[int] = ()) -> Metric | None:
    """Average a column over seeds, then over data sets and targets; None if a value is missing or seeds differ.

    seeds: those that each mean needs, if any.
    """
    # Groups of a wide frame are slow to make.
    narrow = frame[["dataset", "target", "seed", "limited", "chosen_on_test", "unlabelled", column]]
    return average([metric_over_seeds(rows, column, seeds) for _, rows in narrow.groupby(["dataset", "target"])])
