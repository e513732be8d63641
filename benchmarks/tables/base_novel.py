"""Make the tables of suites that test on base and novel classes: from the main table to the ablation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.results.frame import images_per_second
from benchmarks.results.metrics import Halves, Metric, mean_if_complete
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, PublishedHalves, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import note_average, suite_notes
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

Triple = tuple[float | None, float | None, float | None]
"""What the paper prints for base, novel and HM."""
NOTHING: Triple = (None, None, None)
PAPER_TOKENS = 4
SPEEDS = (Column("FPS", "", digits=0), Column("training s", "", digits=1))
"""No end is marked better: runs were timed at different times, on any machine, and beside other work."""


def base_to_novel_tables(suite: SuiteResults) -> list[Table]:
    """Make the averages if there are several data sets, each data set as in the paper, speeds, and the comparison."""
    title, tables = suite.heading, []
    if len(suite.datasets) > 1:
        tables.append(_averages(suite, title))
    rows = _blocks(suite, _main_table, _published_of)
    notes = suite_notes(suite, note_average(suite), halves=True)
    main = Table(suite.name, title, ("Data set", "Method"), HALVES, rows, notes, in_paper(suite))
    tables.append(add_delta_column(suite, main, "HM"))
    return [*tables, *_speeds(suite, title), *comparison_tables(suite)]


def stability_tables(suite: SuiteResults) -> list[Table]:
    """Make mean and standard deviation of every data set; the average's HM is the mean of HMs, as in the paper."""
    spreads = {line.dataset: line for line in published.stability()} if in_paper(suite) else {}
    rows = []
    for dataset in _with_average(suite):
        name, is_average = display_name(dataset), dataset == AVERAGE
        spread = spreads.get(dataset)
        if spread and (not is_average or covers_paper(suite.datasets)):
            pairs = ((spread.base, spread.base_std), (spread.novel, spread.novel_std), (spread.hm, spread.hm_std))
            cells = tuple(Metric(mean, std) for mean, std in pairs)
            labels = (name, published_title("ProCAP"))
            rows.append(Row(labels, cells, "published", published_group(suite, name), is_average))
        for variant in suite.variants:
            known = spread and variant.method == "procap" and not variant.changed
            printed = (spread.base, spread.novel, spread.hm) if spread and known else NOTHING
            halves = _halves(suite, variant, dataset)
            if is_average:
                halves = (*halves[:2], suite.mean_of_hms(variant))
            own = _cells(suite, variant, dataset, halves, printed)
            labels = (name, mark_reproduced(unique_title(suite, variant), own))
            rows.append(Row(labels, own, group=name, average=is_average))
    readings = {title: suite.average_halves(variant)[2] for title, variant in variants_by_title(suite).items()}
    listed = _list_means(readings)
    rule = f"{AVERAGE}: its HM is the mean of the data sets' HMs. HM of average base and average novel: {listed}."
    notes = suite_notes(suite, rule if listed and len(suite.datasets) > 1 else "", halves=True)
    labels = ("Data set", "Method")
    main = Table(suite.name, "Stability over seeds", labels, HALVES, tuple(rows), notes, in_paper(suite))
    return [main, *comparison_tables(suite)]


def ablation_tables(suite: SuiteResults) -> list[Table]:
    """Make harmonic means of every variant by data set, then base and novel accuracies."""
    sets = suite.datasets
    several = len(sets) > 1
    columns = [Column(display_name(dataset)) for dataset in sets] + [Column(AVERAGE)] * several
    paper = {line.variant: line for line in published.ablation()} if in_paper(suite) else {}
    same_sets = bool(paper) and set(sets) == set(next(iter(paper.values())).hm)
    rows = []
    for name, line in paper.items():
        numbers = [line.hm.get(dataset) for dataset in sets] + [line.average if same_sets else None] * several
        # The paper has no numbers for other data sets.
        if any(number is not None for number in numbers):
            rows.append(published_row([published_title(name)], numbers, group=published_group(suite)))
    for variant in suite.variants:
        known = paper.get(variant.key["variant"])
        cells: list[Cell] = []
        for dataset in sets:
            hm = suite.halves(variant, dataset)[2]
            cells.append(with_published(suite, variant, [dataset], hm, known.hm.get(dataset) if known else None))
        if several:
            average = known.average if known and same_sets else None
            cells.append(with_published(suite, variant, sets, suite.mean_of_hms(variant), average))
        rows.append(Row((mark_reproduced(title_of(suite, variant), cells),), tuple(cells)))
    means = {variant.name: suite.average_halves(variant)[2] for variant in suite.variants if several}
    listed = _list_means(means)
    rule = f"Figures are HM; {AVERAGE} is their mean. HM of average base and average novel: {listed}." if listed else ""
    notes = suite_notes(suite, rule or "Figures are HM.", halves=True)
    main = Table(suite.name, suite.heading, ("Variant",), tuple(columns), tuple(rows), notes, wide=True)
    blocks = _blocks(suite, lambda variant, dataset: NOTHING, lambda dataset: ())
    title, labels = f"{suite.heading}: both halves", ("Data set", "Variant")
    notes = suite_notes(suite, note_average(suite), halves=True)
    halves = Table(f"{suite.name}-halves", title, labels, HALVES, blocks, notes)
    return [main, halves, *comparison_tables(suite, reference="Full ProCAP")]


def prompt_length_tables(suite: SuiteResults) -> list[Table]:
    """Make base, novel and HM by the number of tokens, for every data set and on average."""
    main = _by_key(suite, "n_ctx", "Tokens", "Number of prompt tokens", suite.name)
    return [main, *comparison_tables(suite, _procap_title(suite, {"n_ctx": PAPER_TOKENS}))]


def duration_tables(suite: SuiteResults) -> list[Table]:
    """Make results by the number of epochs: on average, as in the paper, and for every data set."""
    title, tables = suite.heading, []
    paper = {line.epochs: line for line in published.duration()} if covers_paper(suite.datasets) else {}
    paper = paper if in_paper(suite) else {}
    if len(suite.datasets) > 1:
        rows = []
        for line in paper.values():
            labels = (published_title(line.method), str(line.epochs))
            rows.append(published_row(labels, (line.base, line.novel, line.hm), group=published_group(suite)))
        for variant in suite.variants:
            known = paper.get(variant.key["epochs"]) if variant.method == "procap" else None
            printed = (known.base, known.novel, known.hm) if known else NOTHING
            cells = _cells(suite, variant, AVERAGE, suite.average_halves(variant), printed)
            rows.append(Row((mark_reproduced(title_of(suite, variant), cells), _format_key(variant, "epochs")), cells))
        notes = suite_notes(suite, note_average(suite), halves=True)
        main = f"{title}, on average over {len(suite.datasets)} data sets"
        labels = ("Method", "Epochs")
        tables.append(Table(suite.name, main, labels, HALVES, tuple(rows), notes, in_paper(suite)))
    name = f"{suite.name}-datasets" if tables else suite.name
    epochs = [variant.key["epochs"] for variant in suite.variants if variant.method == "procap"]
    longest = _procap_title(suite, {"epochs": max(epochs)}) if epochs else None
    return [*tables, _by_key(suite, "epochs", "Epochs", title, name), *comparison_tables(suite, longest)]


def _averages(suite: SuiteResults, title: str) -> Table:
    """Make the table of averages, with both readings of the average HM."""
    rows = []
    with_paper = in_paper(suite) and covers_paper(suite.datasets)
    if with_paper:
        hms: dict[str, list[float]] = {}
        for line in published.base_to_novel():
            if line.dataset != AVERAGE:
                hms.setdefault(line.method, []).append(line.hm)
        for line in _published_of(AVERAGE):
            own = hms.get(line.method, [])
            # Recompute the mean from the printed cells; None for a method whose cells are not all printed.
            mean = sum(own) / len(own) if len(own) == len(suite.datasets) else None
            numbers = (line.base, line.novel, line.hm, mean)
            labels = [published_title(line.method, line.venue)]
            rows.append(published_row(labels, numbers, group=published_group(suite)))
    for variant in suite.variants:
        cells = _cells(suite, variant, AVERAGE, suite.average_halves(variant), _main_table(variant, AVERAGE))
        name = mark_reproduced(unique_title(suite, variant), cells)
        rows.append(Row((name,), (*cells, suite.mean_of_hms(variant))))
    rule = (
        f"{AVERAGE} over {len(suite.datasets)} data sets; HM is that of average base and average novel accuracy, "
        "beside it the mean of the data sets' HMs"
    )
    rule += ", which is recomputed from the printed ones for published lines." if with_paper else "."
    name, title = f"{suite.name}-average", f"{title}, on average over {len(suite.datasets)} data sets"
    columns = (*HALVES, Column("mean of HMs"))
    table = Table(name, title, ("Method",), columns, tuple(rows), suite_notes(suite, rule, halves=True), wide=True)
    return add_delta_column(suite, table, "HM")


def _speeds(suite: SuiteResults, title: str) -> list[Table]:
    """Make the table of training and evaluation speeds; no table if no method has all of them."""
    variants = variants_by_title(suite)
    rows = tuple(Row((name,), _mean_speeds(suite, variant)) for name, variant in variants.items())
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


def _mean_speeds(suite: SuiteResults, variant: Variant) -> tuple[Cell, ...]:
    """Average speeds over the data sets; None if one was not measured, or only on the first images."""
    numbers: tuple[list[float | None], ...] = ([], [], [])
    for dataset in suite.datasets:
        rows = suite.rows(variant, dataset).drop_duplicates(["path", "target"])
        planned = sum(len(run.spec.targets) for run in suite.runs if (run.variant, run.dataset) == (variant, dataset))
        complete = len(rows) == planned and not rows.limited.any()
        timed = complete and rows.fps.notna().all()
        numbers[0].append(images_per_second(rows) if timed else None)
        numbers[1].append(images_per_second(rows, "fps_model") if timed else None)
        trained = rows.train_seconds.dropna()
        numbers[2].append(float(trained.mean()) if complete and len(trained) else None)
    means = map(mean_if_complete, numbers)
    return tuple(None if mean is None else Metric(mean) for mean in means)


def _by_key(suite: SuiteResults, key: str, header: str, title: str, name: str) -> Table:
    """Make a table of every data set and the average, by one key of the variants."""
    rows = []
    for dataset in _with_average(suite):
        for variant in suite.variants:
            labels = (display_name(dataset), title_of(suite, variant), _format_key(variant, key))
            cells = _cells(suite, variant, dataset, _halves(suite, variant, dataset))
            rows.append(Row(labels, cells, group=display_name(dataset), average=dataset == AVERAGE))
    notes = suite_notes(suite, note_average(suite), halves=True)
    return Table(name, title, ("Data set", "Method", header), HALVES, tuple(rows), notes, wide=True)


def _blocks(
    suite: SuiteResults,
    printed: Callable[[Variant, str], Triple],
    lines_of: Callable[[str], Iterable[PublishedHalves]],
) -> tuple[Row, ...]:
    """Make the rows of every data set and of the average: published rows, then ours."""
    rows = []
    for dataset in _with_average(suite):
        name, is_average = display_name(dataset), dataset == AVERAGE
        shown = in_paper(suite) and (not is_average or covers_paper(suite.datasets))
        for line in lines_of(dataset) if shown else ():
            labels = (name, published_title(line.method, line.venue))
            group = published_group(suite, name)
            rows.append(published_row(labels, (line.base, line.novel, line.hm), group=group, average=is_average))
        for variant in suite.variants:
            halves = _halves(suite, variant, dataset)
            cells = _cells(suite, variant, dataset, halves, printed(variant, dataset))
            labels = (name, mark_reproduced(unique_title(suite, variant), cells))
            rows.append(Row(labels, cells, group=name, average=is_average))
    return tuple(rows)


def _cells(
    suite: SuiteResults, variant: Variant, dataset: str, halves: Halves, printed: Triple = NOTHING
) -> tuple[Cell, ...]:
    """Make base, novel and HM of one row, beside published numbers for the same data sets."""
    is_average = dataset == AVERAGE
    if is_average and not covers_paper(suite.datasets):
        printed = NOTHING
    sets = suite.datasets if is_average else (dataset,)
    pairs = zip(halves, printed, strict=True)
    return tuple(with_published(suite, variant, sets, metric, number) for metric, number in pairs)


def _halves(suite: SuiteResults, variant: Variant, dataset: str) -> Halves:
    return suite.average_halves(variant) if dataset == AVERAGE else suite.halves(variant, dataset)


def _with_average(suite: SuiteResults) -> list[str]:
    return [*suite.datasets, *([AVERAGE] if len(suite.datasets) > 1 else [])]


def _main_table(variant: Variant, dataset: str) -> Triple:
    """Return the paper's numbers of an unchanged method."""
    line = None if variant.changed else published.halves(variant.method, dataset)
    return (line.base, line.novel, line.hm) if line else NOTHING


def _published_of(dataset: str) -> list[PublishedHalves]:
    return [line for line in published.base_to_novel() if line.dataset == dataset]


def _procap_title(suite: SuiteResults, key: dict[str, Any]) -> str | None:
    """Return the title of ProCAP's variant with this key, as comparisons print it."""
    variants = variants_by_title(suite).items()
    return next((title for title, one in variants if (one.method, dict(one.key)) == ("procap", key)), None)


def _list_means(means: dict[str, Metric | None]) -> str:
    return "; ".join(f"{title} {mean.mean:.2f}" for title, mean in means.items() if mean)


def _format_key(variant: Variant, key: str) -> str:
    value: Any = variant.key.get(key)
    return "-" if value in (None, 0) else str(value)
