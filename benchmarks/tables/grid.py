"""Make the tables of suites whose variants form a grid: shots by method, weights of the loss, temperatures."""

from __future__ import annotations

from benchmarks.console.output import plural
from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.experiment.suite import Variant
from benchmarks.results.metrics import Metric, average
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.table import Column, Row, Table
from runner.config import Target

Weights = tuple[float, float]
"""Weights of InfoNCE (lambda) and of KL (beta)."""


def few_shot_tables(suite: SuiteResults) -> list[Table]:
    """Make a row per data set and method, a column per number of shots; the comparison uses the largest number."""
    shots = sorted({variant.key["shots"] for variant in suite.variants})
    grouped = suite.group_by_title("shots")
    rows = []
    for dataset in suite.datasets_and_average:
        name = display_name(dataset)
        for title, variants in grouped.items():
            by_shots = {variant.key["shots"]: accuracy_on(suite, variant, dataset) for variant in variants}
            rows.append(Row((name, title), tuple(map(by_shots.get, shots)), group=name, average=dataset == AVERAGE))
    notes = suite_notes(suite, "Tested on all classes; 0 shots: nothing is trained.")
    columns = [Column(plural(count, "shot")) for count in shots]
    labels, title = ("Data set", "Method"), "Few-shot learning on all classes"
    most = {
        f"{method}, {plural(variant.key['shots'], 'shot')}": variant
        for method, variants in grouped.items()
        for variant in variants
        if variant.key["shots"] in (0, shots[-1])
    }
    main = Table(suite.name, title, labels, columns, rows, notes.lines, notes.details, wide=True)
    return [main, *comparison_tables(suite, variants=most)]


def accuracy_on(suite: SuiteResults, variant: Variant, dataset: str) -> Metric | None:
    """Return the accuracy on all classes of the data set trained on, or the mean over data sets for AVERAGE."""
    if dataset == AVERAGE:
        return average([suite.metric(variant, name, Target(name)) for name in suite.options.datasets])
    return suite.metric(variant, dataset, Target(dataset))


def paper_weights() -> tuple[Weights, float]:
    """Return the paper's weights of InfoNCE and KL, and its initial temperature, which are ProCAP's defaults."""
    return (0.01, 1e-5), 0.07


def sensitivity_variants(suite: SuiteResults) -> tuple[dict[Weights, Variant], dict[float, Variant]]:
    """Return the variants at the paper's temperature by weights, and those at the paper's weights by temperature."""
    paper, temperature = paper_weights()
    by_weights: dict[Weights, Variant] = {}
    by_temperature: dict[float, Variant] = {}
    for variant in suite.variants:
        if variant.key:
            weights = (variant.key["nce_weight"], variant.key["kl_weight"])
            if variant.key["nce_temperature"] == temperature:
                by_weights[weights] = variant
            if weights == paper:
                by_temperature[variant.key["nce_temperature"]] = variant
    return by_weights, dict(sorted(by_temperature.items()))


def sensitivity_tables(suite: SuiteResults) -> list[Table]:
    """Make HM over both weights on average, over the temperature, and over both weights for each data set."""
    (weight, beta), temperature = paper_weights()
    grid, _ = sensitivity_variants(suite)
    lambdas, betas = (sorted({weights[axis] for weights in grid}) for axis in (0, 1))
    columns = [Column(f"β = {_format(value)}", "") for value in betas]
    rule = (
        f"Cells are HM. λ: weight of InfoNCE; β: weight of KL; initial τ = {temperature}; in the paper λ = {weight}, "
        f"β = {_format(beta)}."
    )
    sets = plural(len(suite.options.datasets), "data set")
    title, name = "Sensitivity to the weights of the loss", suite.name

    def rows(dataset: str, *labels: str) -> list[Row]:
        hms = {
            weights: suite.mean_of_hms(variant) if dataset == AVERAGE else suite.halves(variant, dataset)[2]
            for weights, variant in grid.items()
        }
        group = "".join(labels)
        return [
            Row((*labels, _format(first)), tuple(hms.get((first, second)) for second in betas), group=group)
            for first in lambdas
        ]

    tables = []
    if grid:
        notes = suite_notes(suite, rule, "Means of the data sets' HMs.")
        means = f"{title}: HM over {sets}"
        tables.append(Table(name, means, ("λ",), columns, rows(AVERAGE), notes.lines, notes.details))
    tables.append(_temperatures(suite, f"λ = {weight}, β = {_format(beta)}; initial τ in the paper: {temperature}."))
    if grid and len(suite.options.datasets) > 1:
        by_dataset = [row for dataset in suite.options.datasets for row in rows(dataset, display_name(dataset))]
        notes = suite_notes(suite, rule)
        labels = ("Data set", "λ")
        title = f"{title}, by data set"
        tables.append(Table(f"{name}-datasets", title, labels, columns, by_dataset, notes.lines, notes.details))
    return tables


def _temperatures(suite: SuiteResults, rule: str) -> Table:
    """Make a row per initial temperature at the paper's weights, and for methods without a temperature."""
    variants = [*sensitivity_variants(suite)[1].values(), *(variant for variant in suite.variants if not variant.key)]
    rows = []
    for variant in variants:
        cells = [suite.halves(variant, dataset)[2] for dataset in suite.options.datasets]
        cells += [suite.mean_of_hms(variant)] if len(cells) > 1 else []
        label = _format(variant.key["nce_temperature"]) if variant.key else "-"
        rows.append(Row((variant.name, label), tuple(cells)))
    columns = [Column(display_name(name)) for name in suite.datasets_and_average]
    notes = suite_notes(suite, f"Cells are HM, at {rule} {AVERAGE}: mean of HMs.")
    name, title = f"{suite.name}-temperature", "Sensitivity to the initial temperature of InfoNCE"
    labels = ("Method", "initial τ")
    return Table(name, title, labels, columns, rows, notes.lines, notes.details, wide=len(columns) > 4)


def _format(number: float) -> str:
    """Format a number: 0.01, and 1e-05 as 1e-5."""
    return f"{number:g}".replace("e-0", "e-")
