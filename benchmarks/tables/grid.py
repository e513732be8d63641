"""Make the tables of suites whose variants form a grid: shots by method, weights of the loss, temperatures."""

from __future__ import annotations

from functools import partial

from benchmarks.console.output import plural
from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.experiment.suite import Variant
from benchmarks.results.suite_results import MACRO, SuiteResults
from benchmarks.tables.columns import HALVES
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.suite_table import Heading, suite_table
from benchmarks.tables.table import Column, Row, Table

Weights = tuple[float, float]
"""Weights of InfoNCE (lambda) and of KL (beta)."""


def few_shot_tables(results: SuiteResults) -> list[Table]:
    """Make a row per data set and method, a column per number of shots; the comparison uses the largest number."""
    shots = sorted({variant.key["shots"] for variant in results.variants})
    methods = results.group_by_title("shots")
    rows = []
    for dataset in results.datasets_and_average:
        name = display_name(dataset)
        for title, variants in methods.items():
            cells = {variant.key["shots"]: results.on_classes(variant, dataset) for variant in variants}
            rows.append(Row((name, title), tuple(map(cells.get, shots)), group=name, average=dataset == AVERAGE))
    notes = suite_notes(results, "Tested on all classes; 0 shots: nothing is trained.")
    columns = [Column(plural(count, "shot")) for count in shots]
    most = {
        f"{method}, {plural(variant.key['shots'], 'shot')}": variant
        for method, variants in methods.items()
        for variant in variants
        if variant.key["shots"] in (0, shots[-1])
    }
    title = "Few-shot learning on all classes"
    labels, reference = ("Data set", "Method"), results.reference("shots")
    main = Table(results.name, title, labels, columns, rows, notes.lines, notes.details, reference=reference)
    return [main, *comparison_tables(results, variants=most)]


def imbalance_tables(results: SuiteResults) -> list[Table]:
    """Make a row for each method and sampling on each data set and on average, by macro accuracy."""
    # Without marks: samplings do not compete.
    columns, labels = [Column(half.title, "") for half in HALVES], ["Data set", "Method", "Sampling"]
    rule = "Macro accuracies, in which every class counts alike, and their harmonic mean."
    heading = Heading(results.name, results.suite.heading, labels, columns, [rule], varied="sampling")
    cells = partial(results.halves, column=MACRO)
    return [suite_table(results, heading, cells, datasets=results.datasets_and_average)]


def paper_weights() -> tuple[Weights, float]:
    """Return the paper's weights of InfoNCE and KL, and its initial temperature, which are ProCAP's defaults."""
    from procap.methods.procap import ProCAPOptions

    names = ("nce_weight", "kl_weight", "nce_temperature")
    weight, beta, temperature = (ProCAPOptions.model_fields[name].default for name in names)
    return (weight, beta), temperature


def sensitivity_variants(results: SuiteResults) -> tuple[dict[Weights, Variant], dict[float, Variant]]:
    """Return the variants at the paper's temperature by weights, and those at the paper's weights by temperature."""
    paper, temperature = paper_weights()
    by_weights: dict[Weights, Variant] = {}
    by_temperature: dict[float, Variant] = {}
    for variant in results.variants:
        if variant.key:
            weights = (variant.key["nce_weight"], variant.key["kl_weight"])
            # The variant with all of the paper's values is in both.
            if variant.key["nce_temperature"] == temperature:
                by_weights[weights] = variant
            if weights == paper:
                by_temperature[variant.key["nce_temperature"]] = variant
    return by_weights, dict(sorted(by_temperature.items()))


def sensitivity_tables(results: SuiteResults) -> list[Table]:
    """Make HM over both weights, and over the initial temperature, on each data set and on average."""
    (weight, beta), temperature = paper_weights()
    grid, temperatures = sensitivity_variants(results)
    lambdas, betas = (sorted({weights[axis] for weights in grid}) for axis in (0, 1))
    rows = []
    for dataset in results.datasets_and_average:
        name, hms = display_name(dataset), {pair: results.hm(variant, dataset) for pair, variant in grid.items()}
        for first in lambdas:
            cells = tuple(hms.get((first, second)) for second in betas)
            rows.append(Row((name, _format(first)), cells, group=name, average=dataset == AVERAGE))
    rule = f"λ: weight of InfoNCE; β: weight of KL; in the paper λ = {weight}, β = {_format(beta)}, initial τ"
    notes = suite_notes(results, f"Cells are HM; {AVERAGE}: mean of HMs. {rule} = {temperature}.")
    columns = [Column(f"β = {_format(value)}", "") for value in betas]
    title = "Sensitivity to the weights of the loss"
    table = Table(results.name, title, ("Data set", "λ"), columns, rows, notes.lines, notes.details)
    # Methods without a temperature follow.
    shown = [(_format(number), variant) for number, variant in temperatures.items()]
    shown += [("-", variant) for variant in results.variants if not variant.key]
    rows = [
        Row((variant.name, number), tuple(results.hm(variant, name) for name in results.datasets_and_average))
        for number, variant in shown
    ]
    columns = [Column(display_name(name)) for name in results.datasets_and_average]
    title, labels = "Sensitivity to the initial temperature of InfoNCE", ("Method", "initial τ")
    by_temperature = Table(f"{results.name}-temperature", title, labels, columns, rows, notes.lines, notes.details)
    return [table, by_temperature] if grid else [by_temperature]


def _format(number: float) -> str:
    """Format a number: 0.01, and 1e-05 as 1e-5."""
    return f"{number:g}".replace("e-0", "e-")
