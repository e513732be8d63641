"""Tables of suites that train on base classes and test on base and novel ones: from the main table to the ablation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, PublishedHalves
from benchmarks.results.scores import Cell, images_per_second, timed
from benchmarks.tables.comparison import comparison_sheets, scores_of
from benchmarks.tables.helpers import (
    HALVES,
    against_procap,
    average_note,
    group_of,
    in_paper,
    name_of,
    notes,
    ours,
    ours_alone,
    printed,
    reproduced,
    theirs,
    titled,
    value,
    whole_paper,
)
from benchmarks.tables.runs import SPEEDS
from benchmarks.tables.table import Column, Item, Line, Sheet, Value

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults
    from benchmarks.results.variant import Variant

Figures = tuple[float | None, float | None, float | None]
Lookup = Callable[["Variant", str], Figures]
PAPER_TOKENS = 4
NOTHING: Figures = (None, None, None)


def base_to_novel_sheets(done: SuiteResults) -> list[Sheet]:
    """The averages first where there are several, then every data set as in the paper, then the comparison."""
    title, sheets = done.suite.heading, []
    if len(done.datasets) > 1:
        sheets.append(_averages(done, title))
    lines = _blocks(done, _main_table, _published_of)
    remarks = notes(done, average_note(done), halves=True)
    main = Sheet(done.suite.name, title, ("Data set", "Method"), HALVES, tuple(lines), remarks, in_paper(done))
    sheets.append(against_procap(done, main, "HM"))
    return [*sheets, *_speeds(done, title), *comparison_sheets(done)]


def stability_sheets(done: SuiteResults) -> list[Sheet]:
    """Mean and standard deviation of every data set; the average's HM is the mean of HMs, as in the paper's table."""
    spreads = {line.dataset: line for line in published.stability()} if in_paper(done) else {}
    figures = {name: (line.base, line.novel, line.hm) for name, line in spreads.items()}
    lines = []
    for dataset in _with_average(done):
        name = name_of(dataset)
        summed = dataset == AVERAGE
        if (spread := spreads.get(dataset)) and (not summed or whole_paper(done.datasets)):
            pairs = ((spread.base, spread.base_std), (spread.novel, spread.novel_std), (spread.hm, spread.hm_std))
            known = tuple(Value(mean, std) for mean, std in pairs)
            group = group_of(done, name, "published")
            lines.append(Line((name, theirs("ProCAP")), known, "published", group, summed))
        for variant in done.variants:
            own = figures.get(dataset, NOTHING) if variant.method == "procap" and not variant.changed else NOTHING
            cells = _cells(done, variant, dataset)
            if summed:
                cells = (*cells[:2], done.mean_of_hms(variant))
            items = _items(done, variant, dataset, cells, own)
            lines.append(Line((name, reproduced(ours_alone(done, variant), items)), items, group=name, average=summed))
    readings = [(name, cell) for name, variant in titled(done).items() if (cell := done.average_halves(variant)[2])]
    listed = "; ".join(f"{name} {cell.mean:.2f}" for name, cell in readings)
    rule = f"{AVERAGE}: its HM is the mean of the data sets' HMs. HM of average base and average novel: {listed}."
    remark = rule if listed and len(done.datasets) > 1 else ""
    remarks = notes(done, remark, halves=True)
    return [
        Sheet(
            done.suite.name,
            "Stability over seeds",
            ("Data set", "Method"),
            HALVES,
            tuple(lines),
            remarks,
            in_paper(done),
        ),
        *comparison_sheets(done),
    ]


def ablation_sheets(done: SuiteResults) -> list[Sheet]:
    """Harmonic means of every variant by data set, then what they are made of."""
    sets = done.datasets
    columns = tuple(Column(name_of(dataset)) for dataset in sets)
    several = len(sets) > 1
    columns += (Column(AVERAGE),) if several else ()
    table = {line.variant: line for line in published.ablation()} if in_paper(done) else {}
    alike = bool(table) and set(sets) == set(next(iter(table.values())).hm)
    lines = []
    for name, row in table.items():
        figures = [row.hm.get(dataset) for dataset in sets] + ([row.average if alike else None] if several else [])
        # Other data sets have no published figures.
        if any(figure is not None for figure in figures):
            lines.append(printed([theirs(name)], figures, group=group_of(done, "", "published")))
    for variant in done.variants:
        known = table.get(variant.key["variant"])
        items: list[Item] = [
            value(done, variant, [dataset], done.halves(variant, dataset)[2], known.hm.get(dataset) if known else None)
            for dataset in sets
        ]
        if several:
            items.append(
                value(done, variant, sets, done.mean_of_hms(variant), known.average if known and alike else None)
            )
        lines.append(Line((reproduced(ours(done, variant), items),), tuple(items)))
    means = [(variant.name, cell) for variant in done.variants if several and (cell := done.average_halves(variant)[2])]
    listed = "; ".join(f"{name} {cell.mean:.2f}" for name, cell in means)
    rule = f"Figures are HM; {AVERAGE} is their mean. HM of average base and average novel: {listed}." if listed else ""
    title = done.suite.heading
    remarks = notes(done, rule or "Figures are HM.", halves=True)
    blocks = _blocks(done, lambda variant, dataset: NOTHING, lambda dataset: iter(()))
    detail = notes(done, average_note(done), halves=True)
    halves = Sheet(
        f"{done.suite.name}-halves", f"{title}: both halves", ("Data set", "Variant"), HALVES, blocks, detail
    )
    main = Sheet(done.suite.name, title, ("Variant",), columns, tuple(lines), remarks, wide=True)
    return [main, halves, *comparison_sheets(done, reference="Full ProCAP")]


def prompt_length_sheets(done: SuiteResults) -> list[Sheet]:
    """Base, novel and HM by the number of tokens, for every data set and on average."""
    sheet = _varied(done, "n_ctx", "Tokens", "Number of prompt tokens", done.suite.name)
    return [sheet, *comparison_sheets(done, _title_of(done, {"n_ctx": PAPER_TOKENS}))]


def duration_sheets(done: SuiteResults) -> list[Sheet]:
    """By the number of epochs: on average, as in the paper, and for every data set."""
    title, sheets = done.suite.heading, []
    table = {line.epochs: line for line in published.duration()} if in_paper(done) else {}
    if len(done.datasets) > 1:
        lines = []
        if whole_paper(done.datasets):
            for line in table.values():
                labels = (theirs(line.method), str(line.epochs))
                group = group_of(done, "", "published")
                lines.append(printed(labels, (line.base, line.novel, line.hm), group=group))
        for variant in done.variants:
            known = (
                table.get(variant.key["epochs"]) if variant.method == "procap" and whole_paper(done.datasets) else None
            )
            own = (known.base, known.novel, known.hm) if known else NOTHING
            items = _items(done, variant, AVERAGE, done.average_halves(variant), own)
            lines.append(Line((reproduced(ours(done, variant), items), _key(variant, "epochs")), items))
        remarks = notes(done, average_note(done), halves=True)
        main = f"{title}, on average over {len(done.datasets)} data sets"
        columns = ("Method", "Epochs")
        sheets.append(Sheet(done.suite.name, main, columns, HALVES, tuple(lines), remarks, in_paper(done)))
    name = f"{done.suite.name}-datasets" if sheets else done.suite.name
    epochs = [variant.key["epochs"] for variant in done.variants if variant.method == "procap"]
    longest = _title_of(done, {"epochs": max(epochs)}) if epochs else None
    return [*sheets, _varied(done, "epochs", "Epochs", title, name), *comparison_sheets(done, longest)]


def _averages(done: SuiteResults, title: str) -> Sheet:
    """Both readings of the average."""
    lines = []
    beside_printed = in_paper(done) and whole_paper(done.datasets)
    if beside_printed:
        by_method: dict[str, list[float]] = {}
        for line in published.base_to_novel():
            if line.dataset != AVERAGE:
                by_method.setdefault(line.method, []).append(line.hm)
        for line in _published_of(AVERAGE):
            hms = by_method.get(line.method, [])
            # Recomputed from the printed cells; of a method without any there is no such mean.
            mean = sum(hms) / len(hms) if len(hms) == len(done.datasets) else None
            figures = (line.base, line.novel, line.hm, mean)
            lines.append(printed([theirs(line.method, line.venue)], figures, group=group_of(done, "", "published")))
    for variant in done.variants:
        items = _items(done, variant, AVERAGE, done.average_halves(variant), _main_table(variant, AVERAGE))
        name = reproduced(ours_alone(done, variant), items)
        lines.append(Line((name,), (*items, Value.of(done.mean_of_hms(variant)))))
    rule = (
        f"{AVERAGE} over {len(done.datasets)} data sets; HM is that of average base and average novel accuracy, beside "
        "it the mean of the data sets' HMs"
    )
    rule += ", which is recomputed from the printed ones for published lines." if beside_printed else "."
    name, title = f"{done.suite.name}-average", f"{title}, on average over {len(done.datasets)} data sets"
    columns = (*HALVES, Column("mean of HMs"))
    sheet = Sheet(name, title, ("Method",), columns, tuple(lines), notes(done, rule, halves=True), wide=True)
    return against_procap(done, sheet, "HM")


def _speeds(done: SuiteResults, title: str) -> list[Sheet]:
    """How fast training and the evaluation of both halves were; nothing where no method has all of them."""
    lines = tuple(Line((name,), _speed(done, variant)) for name, variant in titled(done).items())
    if not any(item for line in lines for item in line.items):
        return []
    columns = (SPEEDS[0], Column("FPS of the model", "", digits=0), SPEEDS[1])
    remarks = [
        "FPS: images per second in the evaluation of both halves, decoding included; of the model: without waiting for "
        "images. Training s: training alone. All are means over data sets, of the machines that ran it; `procap bench "
        "runtime` measures methods in turns on one machine."
    ]
    if untimed := [name for name, variant in titled(done).items() if not timed(scores_of(done, variant))]:
        remarks.append(
            f"No FPS where an evaluation had image features from the cache ({', '.join(untimed)}): procap eval --force "
            "times it."
        )
    return [Sheet(f"{done.suite.name}-speed", f"{title}: speed", ("Method",), columns, lines, tuple(remarks))]


def _speed(done: SuiteResults, variant: Variant) -> tuple[Item, Item, Item]:
    """Means over the data sets; None where one was not measured, or on the first images alone."""
    rates: tuple[list[float | None], ...] = ([], [], [])
    for dataset in done.datasets:
        entries = [entry for entry in done.runs if (entry.variant, entry.dataset) == (variant, dataset)]
        places = [(entry.path, target) for entry in entries for target in entry.spec.targets]
        scores = [done.scores[place] for place in places if place in done.scores]
        whole = len(scores) == len(places) and not any(score.result.limited for score in scores)
        rated = whole and timed(scores)
        trained = [score.training.seconds for score in scores if score.config.recipe.epochs]
        rates[0].append(images_per_second(scores) if rated else None)
        rates[1].append(images_per_second(scores, model_only=True) if rated else None)
        rates[2].append(sum(trained) / len(trained) if whole and trained else None)
    return _mean(rates[0]), _mean(rates[1]), _mean(rates[2])


def _mean(numbers: list[float | None]) -> Item:
    there = [number for number in numbers if number is not None]
    return Value(sum(there) / len(there)) if there and len(there) == len(numbers) else None


def _varied(done: SuiteResults, key: str, header: str, title: str, name: str) -> Sheet:
    """Every data set and the average, by what one key of the variants says."""
    lines = [
        Line(
            (name_of(dataset), ours(done, variant), _key(variant, key)),
            _items(done, variant, dataset, _cells(done, variant, dataset)),
            group=name_of(dataset),
            average=dataset == AVERAGE,
        )
        for dataset in _with_average(done)
        for variant in done.variants
    ]
    remarks = notes(done, average_note(done), halves=True)
    return Sheet(name, title, ("Data set", "Method", header), HALVES, tuple(lines), remarks, wide=True)


def _blocks(
    done: SuiteResults, lookup: Lookup, lines_of: Callable[[str], Iterator[PublishedHalves]]
) -> tuple[Line, ...]:
    """A block for every data set and for the average: published lines, then ours."""
    lines = []
    for dataset in _with_average(done):
        name, summed = name_of(dataset), dataset == AVERAGE
        shown = in_paper(done) and (not summed or whole_paper(done.datasets))
        for line in lines_of(dataset) if shown else ():
            labels = (name, theirs(line.method, line.venue))
            group = group_of(done, name, "published")
            lines.append(printed(labels, (line.base, line.novel, line.hm), group=group, average=summed))
        for variant in done.variants:
            items = _items(done, variant, dataset, _cells(done, variant, dataset), lookup(variant, dataset))
            lines.append(Line((name, reproduced(ours_alone(done, variant), items)), items, group=name, average=summed))
    return tuple(lines)


def _items(
    done: SuiteResults,
    variant: Variant,
    dataset: str,
    cells: tuple[Cell | None, Cell | None, Cell | None],
    known: Figures = NOTHING,
) -> tuple[Item, ...]:
    """Base, novel and HM of one line, beside the published figures where they are of the same data sets."""
    summed = dataset == AVERAGE
    if summed and not whole_paper(done.datasets):
        known = NOTHING
    sets = done.datasets if summed else (dataset,)
    return tuple(value(done, variant, sets, cell, figure) for cell, figure in zip(cells, known, strict=True))


def _cells(done: SuiteResults, variant: Variant, dataset: str) -> tuple[Cell | None, Cell | None, Cell | None]:
    return done.average_halves(variant) if dataset == AVERAGE else done.halves(variant, dataset)


def _with_average(done: SuiteResults) -> list[str]:
    return [*done.datasets, *([AVERAGE] if len(done.datasets) > 1 else [])]


def _main_table(variant: Variant, dataset: str) -> Figures:
    """What the paper's main table prints of a method as it is."""
    line = None if variant.changed else published.halves(variant.method, dataset)
    return (line.base, line.novel, line.hm) if line else NOTHING


def _published_of(dataset: str) -> Iterator[PublishedHalves]:
    return (line for line in published.base_to_novel() if line.dataset == dataset)


def _title_of(done: SuiteResults, key: dict[str, Any]) -> str | None:
    """The title of ProCAP's variant with this key, as comparisons name it."""
    fitting = (
        title for title, variant in titled(done).items() if (variant.method, dict(variant.key)) == ("procap", key)
    )
    return next(fitting, None)


def _key(variant: Variant, key: str) -> str:
    said: Any = variant.key.get(key)
    return "-" if said in (None, 0) else str(said)
