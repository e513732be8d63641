"""Make the tables of the qualitative suite: words nearest to learned prompts, and accuracies of the pictured runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.experiment.published import PROMPT_PICTURE
from benchmarks.experiment.suite import Variant
from benchmarks.experiment.titles import title_method
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.suite_table import Heading, PrintedRow, suite_table
from benchmarks.tables.table import Column, Row, Table


def qualitative_tables(results: SuiteResults) -> list[Table]:
    """Make the tables from the data saved with the pictures; without them if none were made of these runs."""
    record = results.pictures
    tables = _word_table(record, results.name) if record else []
    return tables if results.frame.empty else [*tables, _accuracy_table(results)]


def _accuracy_table(results: SuiteResults) -> Table:
    def printed(dataset: str) -> Iterator[PrintedRow]:
        for method, number in PROMPT_PICTURE.get(dataset, {}).items():
            # The figure does not name its baseline, see `PROMPT_PICTURE`.
            title = {"maple": "trained baseline"}.get(method, title_method(method))
            yield PrintedRow([f"{title} (published)"], [number], method)

    def cells(variant: Variant, dataset: str) -> list[Metric | None]:
        [target] = results.suite.targets(results.options, dataset)
        return [results.metric(variant, dataset, target)]

    labels, columns = ["Data set", "Method"], [Column("Base classes")]
    return suite_table(
        results,
        Heading(f"{results.name}-accuracy", "Accuracy of the pictured runs on base classes", labels, columns),
        cells,
        datasets=results.options.datasets,
        printed=printed,
        twin_of=lambda variant: variant.method,
    )


def _word_table(record: dict[str, Any], name: str) -> list[Table]:
    prompts, rows = record["prompts"], []
    for method in prompts["methods"]:
        for stage in method["stages"]:
            for number, token in enumerate(stage["tokens"], 1):
                first, nearest = (
                    ", ".join(f"{entry['word']} ({entry['value']:.2f})" for entry in entries)
                    for entries in ([token["started"]], token["cosine"])
                )
                cells = (first, Metric(100 * token["moved"]), nearest)
                rows.append(Row((method["title"], stage["name"], str(number)), cells))
    columns = [Column("Nearest at the start", ""), Column("Moved, %", "", 1), Column("Nearest", "")]
    runs = "; ".join(f"{method['title']}: {method['run']}" for method in prompts["methods"])
    notes = [
        f"Words: {prompts['word_rule']}.",
        "In brackets the cosine. Moved is the length of what training added to a token, over its length at the start.",
        f"Runs: {runs}.",
    ]
    title = "Words of the vocabulary nearest to learned text prompts of the first layer"
    return [Table(name, title, ("Method", "Tokens", "No."), columns, rows, notes)] if rows else []
