"""Tables of suites whose variants lie on a grid: shots by method, weights of the loss by weights, temperatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.scores import Cell, average
from benchmarks.tables.comparison import comparison_sheets
from benchmarks.tables.helpers import name_of, notes, rows_of
from benchmarks.tables.table import Column, Item, Line, Sheet, Value
from runner.config import Target

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults
    from benchmarks.results.variant import Variant

LAMBDA, BETA, TEMPERATURE = 0.01, 1e-5, 0.07
"""The paper's weights of InfoNCE and KL, and its initial temperature."""

Read = Callable[["Variant", str], "Cell | None"]


def few_shot_sheets(done: SuiteResults) -> list[Sheet]:
    """A line per data set and method, a column per number of shots; the average below; the most shots compared."""
    shots = sorted({variant.key["shots"] for variant in done.variants})
    rows = rows_of(done, "shots").items()
    methods = {title: {variant.key["shots"]: variant for variant in variants} for title, variants in rows}

    def line(
        name: str, title: str, variants: dict[int, Variant], read: Callable[[Variant], Cell | None], *, summed: bool
    ) -> Line:
        items = tuple(Value.of(read(variants[count])) if count in variants else None for count in shots)
        return Line((name, title), items, group=name, average=summed)

    def accuracy(variant: Variant, dataset: str) -> Cell | None:
        return done.cell(variant, dataset, Target(dataset))

    lines = [
        line(name_of(dataset), title, variants, lambda variant, at=dataset: accuracy(variant, at), summed=False)  # type: ignore[misc]
        for dataset in done.datasets
        for title, variants in methods.items()
    ]
    if len(done.datasets) > 1:
        lines += [
            line(
                AVERAGE,
                title,
                variants,
                lambda variant: average([accuracy(variant, name) for name in done.datasets]),
                summed=True,
            )
            for title, variants in methods.items()
        ]
    columns = tuple(Column(plural(count, "shot")) for count in shots)
    remarks = notes(
        done,
        "Trained with so many images of every class, tested on all classes; 0 shots: nothing is trained. No figures of "
        "these curves are published.",
    )
    labels = ("Data set", "Method")
    most = {
        f"{title}, {plural(variant.key['shots'], 'shot')}": variant
        for title, variants in rows
        for variant in variants
        if variant.key["shots"] in (0, shots[-1])
    }
    return [
        Sheet(done.suite.name, "Few-shot learning on all classes", labels, columns, tuple(lines), remarks, wide=True),
        *comparison_sheets(done, variants=most),
    ]


def sensitivity_sheets(done: SuiteResults) -> list[Sheet]:
    """HM over both weights on average, over the temperature, and over both weights for each data set."""
    swept = [variant for variant in done.variants if variant.key]
    grid = {
        (variant.key["nce_weight"], variant.key["kl_weight"]): variant
        for variant in swept
        if variant.key["nce_temperature"] == TEMPERATURE
    }
    own = grid.get((LAMBDA, BETA))

    def hm(variant: Variant, dataset: str) -> Cell | None:
        return done.halves(variant, dataset)[2]

    weights, betas = (sorted({place[axis] for place in grid}) for axis in (0, 1))

    def rows(read: Callable[[Variant], Cell | None], *before: str, group: str = "") -> list[Line]:
        return [
            Line(
                (*before, _number(weight)),
                tuple(Value.of(read(grid[weight, beta])) if (weight, beta) in grid else None for beta in betas),
                group=group,
            )
            for weight in weights
        ]

    columns = tuple(Column(f"β = {_number(beta)}", "") for beta in betas)
    rule = "Figures are HM. λ: weight of InfoNCE; β: weight of KL"
    paper = f"the paper's values are λ = {LAMBDA}, β = {_number(BETA)}, τ = {TEMPERATURE}"
    also = f"{rule}; initial τ = {TEMPERATURE}; {paper}."
    sets = plural(len(done.datasets), "data set")
    over = f"{AVERAGE}: the mean of HMs over {sets}."
    best = _best(
        {f"λ = {_number(w)}, β = {_number(b)}": done.mean_of_hms(variant) for (w, b), variant in grid.items()},
        done.mean_of_hms(own) if own else None,
    )
    title = "Sensitivity to the weights of the loss"
    sheets = []
    if grid:
        remarks = notes(done, also, over, best, halves=True)
        main = f"{title}: HM over {sets}"
        sheets.append(Sheet(done.suite.name, main, ("λ",), columns, tuple(rows(done.mean_of_hms)), remarks))
    sheets.append(_temperatures(done, swept, hm, f"λ = {LAMBDA}, β = {_number(BETA)}; {paper}."))
    if grid and len(done.datasets) > 1:
        lines: list[Line] = []
        for dataset in done.datasets:
            name = name_of(dataset)
            lines += rows(lambda variant, at=dataset: hm(variant, at), name, group=name)  # type: ignore[misc]
        remarks = notes(done, also, halves=True)
        each = f"{title}, by data set"
        sheets.append(Sheet(f"{done.suite.name}-datasets", each, ("Data set", "λ"), columns, tuple(lines), remarks))
    return sheets


def _temperatures(done: SuiteResults, swept: Sequence[Variant], hm: Read, rule: str) -> Sheet:
    """A line per initial temperature at the paper's weights, and for methods that have none."""
    points = [variant for variant in swept if (variant.key["nce_weight"], variant.key["kl_weight"]) == (LAMBDA, BETA)]
    points.sort(key=lambda variant: variant.key["nce_temperature"])
    others = [variant for variant in done.variants if not variant.key]
    lines = []
    for variant in [*points, *others]:
        items: list[Item] = [Value.of(hm(variant, dataset)) for dataset in done.datasets]
        if len(done.datasets) > 1:
            items.append(Value.of(done.mean_of_hms(variant)))
        label = _number(variant.key["nce_temperature"]) if variant.key else "-"
        lines.append(Line((variant.name, label), tuple(items)))
    columns = [Column(name_of(dataset)) for dataset in done.datasets]
    columns += [Column(AVERAGE)] if len(done.datasets) > 1 else []
    remarks = notes(done, f"Figures are HM, at {rule} {AVERAGE}: the mean of HMs.", halves=True)
    name, title = f"{done.suite.name}-temperature", "Sensitivity to the initial temperature of InfoNCE"
    return Sheet(name, title, ("Method", "initial τ"), tuple(columns), tuple(lines), remarks, wide=len(columns) > 4)


def _best(cells: dict[str, Cell | None], own: Cell | None) -> str:
    """Where the highest figure lies, and how far the paper's own values are from it; nothing where one is missing."""
    there = {name: cell for name, cell in cells.items() if cell is not None and not cell.limited}
    if not there or len(there) < len(cells):
        return ""
    highest = max(round(cell.mean, 2) for cell in there.values())
    names = [name for name, cell in there.items() if round(cell.mean, 2) == highest]
    beside = f" The paper's values give {own.mean:.2f}." if own else ""
    return f"Highest: {highest:.2f} at {'; '.join(names)}.{beside}"


def _number(number: Any) -> str:
    """0.01, 1e-05 as 1e-5."""
    return f"{number:g}".replace("e-0", "e-")
