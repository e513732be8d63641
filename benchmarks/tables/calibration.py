"""Make the table of calibration, averaged over data sets, and the table of the classes with the lowest accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.console.output import plural
from benchmarks.results.frame import metric_over_seeds, order_in
from benchmarks.results.metrics import Metric, average
from benchmarks.results.published.tables import display_name
from benchmarks.tables.notes import note_one_class, note_settings, note_sources
from benchmarks.tables.table import Column, Row, Table

if TYPE_CHECKING:
    import pandas as pd

MEASURES: Mapping[str, Column] = {
    "accuracy": Column("Accuracy"),
    "macro_accuracy": Column("Macro accuracy"),
    "nll": Column("NLL", "low", digits=3),
    "ece": Column("ECE", "low"),
    "ece_mass": Column("ECE, equal mass", "low"),
    "brier": Column("Brier", "low", digits=3),
}
"""The columns of the table, by the column of the frame that they average."""
KINDS = ("base classes", "novel classes", "all classes", "other data sets")
"""Kinds of test images, in the order of the table."""
NOTES = (
    "Accuracy, macro accuracy (the mean of the classes' accuracies) and ECE in %. NLL: mean negative log-likelihood of "
    "the true class, in nats. Brier: squared error of the probabilities, summed over classes (0 to 2).",
    "ECE: expected calibration error, the mean over images of |mean confidence - accuracy| of their bin, in 15 bins of "
    "equal width in confidence or of equally many images (equal mass).",
    "Means over data sets; ± is the sample standard deviation of these means over seeds (ddof = 1). Rows of a group "
    "cover the same data sets.",
)
WORST = 20
"""Classes in the table of the worst ones."""


def calibration_tables(
    variants: Mapping[str, pd.DataFrame], suite: str = "", notes: Sequence[str] = (), reference: str | None = None
) -> list[Table]:
    """Make both tables of results by title, parts of the frame; none without evaluations that recorded calibration.

    suite: its name, with which the names of the tables begin. notes: further ones. reference: see `choose_compared`.
    """
    import pandas as pd

    recorded = {title: own for title, own in variants.items() if own.nll.notna().any()}
    if not recorded:
        return []
    every = pd.concat(recorded.values())
    runs = every.drop_duplicates("path")
    shared = (*note_settings(runs.settings), *notes, *note_one_class(every), *note_sources(every))
    prefix = f"{suite}-" if suite else ""
    labels, columns, rows = ("Test images", "Method"), tuple(MEASURES.values()), _calibration_rows(recorded)
    table = Table(f"{prefix}calibration", "Calibration", labels, columns, rows, (*NOTES, *shared), wide=True)
    return [table, *_worst_classes(recorded, f"{prefix}worst-classes", shared, reference)]


def _calibration_rows(variants: Mapping[str, pd.DataFrame]) -> list[Row]:
    """Make a row for each title and kind of test images; rows of the same data sets and targets are a group."""
    groups: dict[tuple[bool, int, str, tuple[str, ...]], list[Row]] = {}
    for title, frame in variants.items():
        kinds = (frame.target_classes + " classes").where(frame.target_dataset == frame.dataset, "other data sets")
        for (classes, kind, split), own in frame.groupby([frame.classes, kinds, frame.split]):
            tests = tuple(sorted({*(own.dataset + " " + own.target)}))
            sets = f", {plural(len(tests), 'data set')}" if kind != KINDS[-1] else f", {len(tests)}"
            words = f"{kind}{sets} (trained on {classes}{', ' + split if split != 'test' else ''})"
            row = Row((words, title), tuple(average_over_tests(own, column) for column in MEASURES), group=repr(tests))
            groups.setdefault((classes != "base", order_in(kind, KINDS)[0], words, tests), []).append(row)
    return [row for group in sorted(groups) for row in groups[group]]


def average_over_tests(frame: pd.DataFrame, column: str) -> Metric | None:
    """Average a column over seeds, then over data sets and targets; None if a value is missing or seeds differ."""
    return average([metric_over_seeds(own, column) for _, own in frame.groupby(["dataset", "target"])])


def _worst_classes(
    variants: Mapping[str, pd.DataFrame], name: str, notes: tuple[str, ...], wanted: str | None
) -> list[Table]:
    """Make the table of the classes on which `wanted`, else ProCAP or the last title, has the lowest accuracies."""
    counts = {title: counted for title, own in variants.items() if len(counted := count_by_class(own))}
    if not counts:
        return []
    means = {title: float(own.correct.sum() / own.total.sum()) for title, own in counts.items()}
    methods = {title: variants[title].method.iloc[0] for title in counts}
    reference, *compared = choose_compared(means, methods, wanted)
    worst = counts[reference].assign(accuracy=lambda own: own.correct / own.total)
    worst = worst.sort_values(["accuracy", "total"], ascending=[True, False], kind="stable").head(WORST)
    rows = []
    for key, row in worst.iterrows():
        dataset, classes, _, label = key
        cells: list[Metric | None] = [Metric(row.images), Metric(100 * row.accuracy)]
        for title in compared:
            other = counts[title].reindex([key]).iloc[0]
            cells.append(None if other.isna().any() else Metric(100 * other.correct / other.total))
        rows.append(Row((label.replace("_", " "), display_name(dataset), classes), tuple(cells)))
    columns = (Column("Test images", "", digits=0), *(Column(title, "") for title in (reference, *compared)))
    rule = f"The {len(rows)} classes with the lowest accuracy of {reference} in %, over all seeds together"
    beside = f", beside {' and '.join(compared)}" if compared else ""
    also = " (the best of the others on average)" if compared and methods[compared[-1]] != "zeroshot" else ""
    title, labels = f"Classes with the lowest accuracies of {reference}", ("Class", "Data set", "Tested on")
    return [Table(name, title, labels, columns, rows, (f"{rule}{beside}{also}.", *notes))]


def choose_reference(methods: Mapping[str, str]) -> str:
    """Choose the first title of ProCAP, or else the last title. methods: by title."""
    return next((title for title, method in methods.items() if method == "procap"), [*methods][-1])


def choose_compared(means: Mapping[str, float], methods: Mapping[str, str], wanted: str | None = None) -> list[str]:
    """Choose `wanted`, else ProCAP or the last title, then zero-shot CLIP and the best of the others on average."""
    reference = wanted if wanted and wanted in means else choose_reference({title: methods[title] for title in means})
    others = sorted((title for title in means if title != reference), key=lambda title: -means[title])
    return list(dict.fromkeys([reference, *(title for title in others if methods[title] == "zeroshot"), *others[:1]]))


def count_by_class(frame: pd.DataFrame) -> pd.DataFrame:
    """Sum counts over seeds by data set, target classes, and place and name of a class.

    Only whole test splits of the data sets that were trained on count, in evaluations that have the names of classes.
    Columns: correct and total over all seeds, and images: those of one evaluation.
    """
    import pandas as pd

    own = frame[(frame.target_dataset == frame.dataset) & (frame.split == "test") & ~frame.limited]
    parts = [
        pd.DataFrame({"class": counts.names, "correct": counts.correct, "total": counts.total})
        .rename_axis("place")
        .reset_index()
        .assign(dataset=dataset, classes=classes)
        for dataset, classes, counts in zip(own.dataset, own.target_classes, own.per_class, strict=True)
        if counts.names
    ]
    if not parts:
        return pd.DataFrame()
    every = pd.concat(parts).query("total > 0").assign(images=lambda one: one.total)
    by_class = every.groupby(["dataset", "classes", "place", "class"], sort=False)
    return by_class.agg({"correct": "sum", "total": "sum", "images": "max"})
