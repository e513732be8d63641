"""Make the tables of the qualitative suite: agreement of methods on images, and words nearest to learned prompts."""

from __future__ import annotations

from typing import Any

from benchmarks.experiment.published import PROMPT_PICTURE, display_name
from benchmarks.experiment.titles import title_method
from benchmarks.results.metrics import Metric
from benchmarks.results.runtime import explain_broken_report
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.rows import mark_reproduced, published_group, published_row
from benchmarks.tables.table import Cell, Column, Row, Table


@explain_broken_report()
def qualitative_tables(suite: SuiteResults) -> list[Table]:
    """Make the tables from the data saved with the pictures; without them if none were made of these runs."""
    record = suite.pictures
    tables = [*_words(record, suite.name), *_agreement(record, suite.name)] if "prompts" in record else []
    return [*tables, *_accuracies(suite)]


def _accuracies(suite: SuiteResults) -> list[Table]:
    """Make the accuracies of the pictured runs, with those in the caption of the figure of prompts."""
    if suite.frame.empty:
        return []
    rows: list[Row] = []
    for dataset in suite.options.datasets:
        name = display_name(dataset)
        for method, number in (PROMPT_PICTURE.get(dataset, {}) if suite.in_paper else {}).items():
            title = {"maple": "trained baseline"}.get(method, title_method(method))
            rows.append(published_row((name, f"{title} (published)"), [number], group=published_group(suite, name)))
        for variant in suite.variants:
            [target] = suite.suite.targets(suite.options, dataset)
            metric, printed = suite.metric(variant, dataset, target), PROMPT_PICTURE.get(dataset, {})
            cells = (suite.with_published(variant, [dataset], metric, printed.get(variant.method)),)
            rows.append(Row((name, mark_reproduced(variant.name, cells)), cells, group=name))
    classes = suite.suite.trained_classes(suite.options)
    title = f"Accuracy of the pictured runs on {classes} classes"
    columns = (Column(f"{classes.capitalize()} classes"),)
    notes = suite_notes(suite)
    labels = ("Data set", "Method")
    return [Table(f"{suite.name}-accuracy", title, labels, columns, rows, notes.lines, notes.details)]


def _words(record: dict[str, Any], name: str) -> list[Table]:
    """Make a row for every learned token of every method."""
    prompts = record["prompts"]
    rows = []
    for method in prompts["methods"]:
        for stage in method["stages"]:
            for number, token in enumerate(stage["tokens"], 1):
                words = ([token["started"]], token["cosine"])
                first, *nearest = (
                    ", ".join(f"{entry['word']} ({entry['value']:.2f})" for entry in entries) for entries in words
                )
                cells: tuple[Cell, ...] = (first, Metric(100 * token["moved"]), *nearest)
                group = f"{method['title']} {stage['name']}"
                rows.append(Row((method["title"], stage["name"], str(number)), cells, group=group))
    titles = ("Nearest at the start", "Moved, %", "Nearest")
    columns = [Column(title, "", digits) for title, digits in zip(titles, (2, 1, 2), strict=True)]
    runs = "; ".join(f"{method['title']}: {method['run']}" for method in prompts["methods"])
    notes = (
        f"Words: {prompts['word_rule']}.",
        "In brackets the cosine. Moved is the length of what training added to a token, over its length at the start.",
        f"Runs: {runs}.",
    )
    title = "Words of the vocabulary nearest to learned text prompts of the first layer"
    labels = ("Method", "Tokens", "No.")
    return [Table(name, title, labels, columns, rows, notes, wide=True)] if rows else []


def _agreement(record: dict[str, Any], name: str) -> list[Table]:
    """Count the images of the test split by which methods were right; no table for a single method."""
    if "agreement" not in record:
        return []
    seen, of = record["images"]["seen"], record["images"]["of"]
    rows = tuple(
        Row((group,), (Metric(count), Metric(100 * count / seen, limited=seen < of)))
        for group, count in record["agreement"].items()
    )
    columns = (Column("Images", "", digits=0), Column("Share, %", "", digits=1))
    # Same rule as for the pictures: prefer images on which methods disagree.
    some = any(count for group, count in record["agreement"].items() if group.startswith("only"))
    shown = "some where the methods disagree" if some else "the first, as no method is right where another is wrong"
    note = f"{seen:,} of {of:,} images of {record['target']}; the pictures show {shown}."
    title = "Where the methods are right"
    return [Table(f"{name}-agreement", title, ("Right",), columns, rows, (note,))] if seen else []
