"""Make the tables of suites that test on base and novel classes: from the main table to the ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.results.frame import images_per_second
from benchmarks.results.metrics import Halves, Metric, mean_if_complete
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import list_means, note_average, suite_notes
from benchmarks.tables.rows import (
    HALVES,
    add_delta_column,
    covers_paper,
    in_paper,
    mark_reproduced,
    published_group,
    published_row,
    published_title,
    title_of,
    unique_title,
    variants_by_title,
    with_published,
)
from benchmarks.tables.table import Cell, Column, Row, Table

PRINTED = {"base_to_novel": published.base_to_novel, "seed_stability": published.stability}
"""The paper's tables that have rows by data set."""
PAPER_TOKENS = 4
LABELS = ("Data set", "Method")
SPEEDS = (Column("FPS", "", digits=0), Column("training s", "", digits=1))
"""No end is marked better: runs were timed at different times, on any machine, and beside other work."""


def base_to_novel_tables(suite: SuiteResults) -> list[Table]:
    """Make the averages if there are several data sets, each data set as in the paper, speeds, and the comparison."""
    title = suite.suite.heading
    main = _halves_table(suite, suite.name, title, printed="base_to_novel")
    tables = [_averages(suite, title)] if len(suite.options.datasets) > 1 else []
    return [*tables, add_delta_column(suite, main, "HM"), *_speeds(suite, title), *comparison_tables(suite)]


def stability_tables(suite: SuiteResults) -> list[Table]:
    """Make mean and standard deviation of every data set; the average's HM is the mean of HMs, as in the paper."""
    hms = list_means({title: suite.halves(one, AVERAGE)[2] for title, one in variants_by_title(suite).items()})
    rule = f"{AVERAGE}: its HM is the mean of the data sets' HMs. HM of average base and average novel: {hms}."
    note = rule if hms and len(suite.options.datasets) > 1 else ""
    main = _halves_table(suite, suite.name, "Stability over seeds", note, printed="seed_stability")
    return [main, *comparison_tables(suite)]


def ablation_tables(suite: SuiteResults) -> list[Table]:
    """Make harmonic means of every variant by data set, then base and novel accuracies."""
    sets = [*suite.options.datasets, *([AVERAGE] if len(suite.options.datasets) > 1 else [])]
    rows = []
    for row in published.ablation() if in_paper(suite) else ():
        average = row.average if set(suite.options.datasets) == set(row.hm) else None
        numbers = [average if name == AVERAGE else row.hm.get(name) for name in sets]
        # The paper has no numbers for other data sets.
        if any(number is not None for number in numbers):
            rows.append(published_row([published_title(row.variant)], numbers, group=published_group(suite)))
    for variant in suite.variants:
        cells = tuple(_cells(suite, variant, name, "ablation")[2] for name in sets)
        rows.append(Row((mark_reproduced(title_of(suite, variant), cells),), cells))
    note = "Cells are HM."
    if len(sets) > 1:
        hms = list_means({variant.name: suite.halves(variant, AVERAGE)[2] for variant in suite.variants})
        if hms:
            note = f"Cells are HM; {AVERAGE} is their mean. HM of average base and average novel: {hms}."
    notes = suite_notes(suite, note, halves=True)
    columns = tuple(Column(display_name(name)) for name in sets)
    main = Table(suite.name, suite.suite.heading, ("Variant",), columns, tuple(rows), notes, wide=True)
    title, labels = f"{suite.suite.heading}: both halves", ("Data set", "Variant")
    halves = _halves_table(suite, f"{suite.name}-halves", title, labels=labels)
    return [main, halves, *comparison_tables(suite, reference="Full ProCAP")]


def prompt_length_tables(suite: SuiteResults) -> list[Table]:
    """Make base, novel and HM by the number of tokens, for every data set and on average."""
    main = _halves_table(suite, suite.name, "Number of prompt tokens", key="n_ctx", labels=(*LABELS, "Tokens"))
    return [main, *comparison_tables(suite, _procap_title(suite, {"n_ctx": PAPER_TOKENS}))]


def duration_tables(suite: SuiteResults) -> list[Table]:
    """Make results by the number of epochs: on average, as in the paper, and for every data set."""
    title, tables = suite.suite.heading, []
    if len(suite.options.datasets) > 1:
        rows = []
        for row in published.duration() if in_paper(suite) and covers_paper(suite.options.datasets) else ():
            labels = (published_title(row.method), str(row.epochs))
            rows.append(published_row(labels, (row.base, row.novel, row.hm), group=published_group(suite)))
        for variant in suite.variants:
            cells = _cells(suite, variant, AVERAGE, "training_duration")
            rows.append(Row((mark_reproduced(title_of(suite, variant), cells), _format_key(variant, "epochs")), cells))
        notes = suite_notes(suite, note_average(suite), halves=True)
        main = f"{title}, on average over {len(suite.options.datasets)} data sets"
        tables = [Table(suite.name, main, ("Method", "Epochs"), HALVES, tuple(rows), notes, in_paper(suite))]
    name = f"{suite.name}-datasets" if tables else suite.name
    tables.append(_halves_table(suite, name, title, key="epochs", labels=(*LABELS, "Epochs")))
    epochs = [variant.key["epochs"] for variant in suite.variants if variant.method == "procap"]
    longest = _procap_title(suite, {"epochs": max(epochs)}) if epochs else None
    return [*tables, *comparison_tables(suite, longest)]


def read_halves(suite: SuiteResults, variant: Variant, dataset: str, printed: str = "") -> Halves:
    """Return base, novel and HM on a data set or on average, with the HM that the table `printed` has on average."""
    base, novel, hm = suite.halves(variant, dataset)
    if dataset == AVERAGE and printed in ("seed_stability", "ablation"):
        hm = suite.mean_of_hms(variant)
    return base, novel, hm


def printed_halves(suite: SuiteResults, variant: Variant, dataset: str, printed: str) -> Sequence[float | None]:
    """Return what the paper's table `printed` has for a variant on a data set, or on average over the same ones."""
    row: Any = None
    if printed == "base_to_novel" and not variant.changed:
        row = published.halves(variant.method, dataset)
    elif printed == "seed_stability" and not variant.changed and variant.method == "procap":
        row = next((row for row in published.stability() if row.dataset == dataset), None)
    elif printed == "training_duration" and dataset == AVERAGE:
        wanted = (variant.method, variant.key.get("epochs"))
        row = next((row for row in published.duration() if (row.key, row.epochs) == wanted), None)
    elif printed == "ablation":
        row = next((row for row in published.ablation() if row.variant == variant.key.get("variant")), None)
        if row and dataset == AVERAGE:
            return None, None, row.average if set(suite.options.datasets) == set(row.hm) else None
        return None, None, row.hm.get(dataset) if row else None
    if row is None or (dataset == AVERAGE and not covers_paper(suite.options.datasets)):
        return None, None, None
    return row.base, row.novel, row.hm


def _halves_table(
    suite: SuiteResults,
    name: str,
    heading: str,
    note: str | None = None,
    *,
    printed: str = "",
    key: str = "",
    labels: tuple[str, ...] = LABELS,
) -> Table:
    """Make base, novel and HM of every variant, for every data set and on average.

    note: None describes how the average is computed. printed: the paper's table whose rows are beside ours. key: of
    the variants, shown in a column.
    """
    rows: list[Row] = []
    for dataset in [*suite.options.datasets, *([AVERAGE] if len(suite.options.datasets) > 1 else [])]:
        group, is_average = display_name(dataset), dataset == AVERAGE
        # An average of the paper stands only beside one over the same data sets.
        paper = in_paper(suite) and (not is_average or covers_paper(suite.options.datasets))
        for row in PRINTED[printed]() if paper and printed in PRINTED else ():
            if row.dataset == dataset:
                title = published_title(row.method, row.venue) if printed == "base_to_novel" else "ProCAP (published)"
                deviations = (getattr(row, f"{half}_std", None) for half in ("base", "novel", "hm"))
                printed_cells = tuple(map(Metric, (row.base, row.novel, row.hm), deviations))
                of = published_group(suite, group)
                rows.append(Row((group, title), printed_cells, "published", of, is_average))
        for variant in suite.variants:
            cells = _cells(suite, variant, dataset, printed)
            own = [title_of(suite, variant), _format_key(variant, key)] if key else [unique_title(suite, variant)]
            own[0] = mark_reproduced(own[0], cells)
            rows.append(Row((group, *own), cells, group=group, average=is_average))
    notes = suite_notes(suite, note_average(suite) if note is None else note, halves=True)
    wide = bool(key) or (bool(printed) and in_paper(suite))
    return Table(name, heading, labels, HALVES, tuple(rows), notes, wide)


def _averages(suite: SuiteResults, title: str) -> Table:
    """Make the table of averages, with both readings of the average HM."""
    rows = []
    with_paper = in_paper(suite) and covers_paper(suite.options.datasets)
    if with_paper:
        main = published.base_to_novel()
        for row in main:
            if row.dataset == AVERAGE:
                hms = [one.hm for one in main if one.method == row.method and one.dataset != AVERAGE]
                # Recompute the mean from the printed cells; None for a method whose cells are not all printed.
                mean = fmean(hms) if len(hms) == len(suite.options.datasets) else None
                labels = [published_title(row.method, row.venue)]
                rows.append(published_row(labels, (row.base, row.novel, row.hm, mean), group=published_group(suite)))
    for variant in suite.variants:
        cells = _cells(suite, variant, AVERAGE, "base_to_novel")
        name = mark_reproduced(unique_title(suite, variant), cells)
        rows.append(Row((name,), (*cells, suite.mean_of_hms(variant))))
    rule = (
        f"{AVERAGE} over {len(suite.options.datasets)} data sets; HM is that of average base and average novel "
        "accuracy, beside it the mean of the data sets' HMs"
    )
    rule += ", which is recomputed from the printed ones for published rows." if with_paper else "."
    name, title = f"{suite.name}-average", f"{title}, on average over {len(suite.options.datasets)} data sets"
    columns = (*HALVES, Column("mean of HMs"))
    table = Table(name, title, ("Method",), columns, tuple(rows), suite_notes(suite, rule, halves=True), wide=True)
    return add_delta_column(suite, table, "HM")


def _speeds(suite: SuiteResults, title: str) -> list[Table]:
    """Make the table of training and evaluation speeds; no table if no method has all of them."""
    variants = variants_by_title(suite)
    rows = tuple(Row((name,), mean_speeds(suite, variant)) for name, variant in variants.items())
    if not any(cell for row in rows for cell in row.cells):
        return []
    columns = (SPEEDS[0], Column("FPS of the model", "", digits=0), SPEEDS[1])
    notes = [
        "FPS: images per second in the evaluation of both halves, decoding included; of the model: without waiting for "
        "images. Training s: training alone. All are means over data sets, of the machines that ran it; `procap bench "
        "runtime` measures methods in turns on one machine."
    ]
    if untimed := [name for name, variant in variants.items() if suite.rows(variant).fps.isna().any()]:
        notes.append(
            f"No FPS where an evaluation had image features from the cache ({', '.join(untimed)}): procap eval --force "
            "times it."
        )
    return [Table(f"{suite.name}-speed", f"{title}: speed", ("Method",), columns, rows, tuple(notes))]


def mean_speeds(suite: SuiteResults, variant: Variant) -> tuple[Metric | None, ...]:
    """Average images per second, those of the model, and seconds of training over the data sets.

    None if one was not measured, or only on the first images.
    """
    speeds: list[tuple[float | None, ...]] = []
    for dataset in suite.options.datasets:
        rows = suite.rows(variant, dataset).drop_duplicates(["path", "target"])
        planned = sum(len(run.spec.targets) for run in suite.runs if (run.variant, run.dataset) == (variant, dataset))
        if len(rows) < planned or rows.limited.any():
            return None, None, None
        timed, trained = rows.fps.notna().all(), rows.train_seconds.dropna()
        rates = [images_per_second(rows, column) if timed else None for column in ("fps", "fps_model")]
        speeds.append((*rates, float(trained.mean()) if len(trained) else None))
    means = [mean_if_complete(column) for column in zip(*speeds, strict=True)]
    return tuple(None if mean is None else Metric(mean) for mean in means)


def _cells(suite: SuiteResults, variant: Variant, dataset: str, printed: str) -> tuple[Cell, ...]:
    """Make base, novel and HM of one row, beside published numbers for the same data sets."""
    sets = suite.options.datasets if dataset == AVERAGE else (dataset,)
    numbers = printed_halves(suite, variant, dataset, printed)
    pairs = zip(read_halves(suite, variant, dataset, printed), numbers, strict=True)
    return tuple(with_published(suite, variant, sets, metric, number) for metric, number in pairs)


def _procap_title(suite: SuiteResults, key: Mapping[str, Any]) -> str | None:
    """Return the title of ProCAP's variant with this key, as comparisons print it."""
    variants = variants_by_title(suite).items()
    return next((title for title, one in variants if (one.method, dict(one.key)) == ("procap", key)), None)


def _format_key(variant: Variant, key: str) -> str:
    value: Any = variant.key.get(key)
    return "-" if value in (None, 0) else str(value)
