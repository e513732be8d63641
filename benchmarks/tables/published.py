"""Make tables of the paper's numbers alone, for results on other data, which do not share a table with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, DATASETS, display_name
from benchmarks.tables.rows import HALVES
from benchmarks.tables.table import Column, Row, Table

SOURCE = "As printed in the paper: CLIP ViT-B/16 with OpenAI's weights, 16 shots."


def published_tables() -> list[Table]:
    """Make the tables in the order of the suites; each is called published-<suite>."""
    main = published.base_to_novel()
    stability = sorted(published.stability(), key=lambda row: row.dataset == AVERAGE)
    average = f"{AVERAGE}: its HM is that of average base and average novel accuracy, of which the audit says more."
    return [
        _table(
            "base-to-novel",
            "base-to-novel generalisation of eighteen methods",
            ("Data set", "Method"),
            HALVES,
            [
                _row((display_name(name), f"{row.method} ({row.venue})"), _halves(row), name, name == AVERAGE)
                for name in (*list(DATASETS)[:11], AVERAGE)
                for row in main
                if row.dataset == name
            ],
            average,
            "ProCAP: means over seeds 1, 2, 3.",
        ),
        _table(
            "stability",
            "stability of ProCAP over seeds",
            ("Data set",),
            [Column(column.title, "") for column in HALVES],
            [
                _row(
                    (display_name(row.dataset),),
                    [Metric(getattr(row, name), getattr(row, f"{name}_std")) for name in ("base", "novel", "hm")],
                    average=row.dataset == AVERAGE,
                )
                for row in stability
            ],
            "Mean ± standard deviation over seeds 1, 2, 3; the paper does not say of which kind.",
            f"{AVERAGE}: its HM is the mean of the data sets' HMs.",
        ),
        _transfer("cross-dataset", "cross-dataset transfer", published.cross_dataset()),
        _transfer("domain-generalization", "domain generalization", published.domain_generalization()),
        _ablation(),
        _table(
            "duration",
            "training duration",
            ("Method", "Epochs"),
            HALVES,
            [_row((row.method, str(row.epochs)), _halves(row)) for row in published.duration()],
            "On average over the eleven data sets.",
        ),
        _table(
            "runtime",
            "training time and speed of inference",
            ("Data set", "Method"),
            (Column("training s", "low", digits=1), Column("FPS", digits=1), Column("Accuracy")),
            [
                _row(
                    (display_name(row.dataset), row.method),
                    [Metric(row.train_seconds), Metric(row.images_per_second), Metric(row.accuracy)],
                    row.dataset,
                )
                for row in published.runtime()
            ],
            "Ten epochs on all classes, seed 1, on one A100 with mixed precision, with the authors' code; the paper "
            "does not say whether FPS includes decoding.",
        ),
    ]


def _transfer(name: str, title: str, rows: Sequence[Any]) -> Table:
    columns = ("ImageNet (source)", *map(display_name, rows[0].targets), "Target mean")
    return _table(
        name,
        title,
        ("Method",),
        [Column(column) for column in columns],
        [
            _row((f"{row.method} ({row.venue})",), map(Metric, (row.source, *row.targets.values(), row.target_mean)))
            for row in rows
        ],
        "Trained on all classes of ImageNet; the mean is without it.",
        wide=True,
    )


def _ablation() -> Table:
    rows = published.ablation()
    parts = ("Cross-Attn", "Gaussian", "KL", "L2", "InfoNCE")
    means = (*map(display_name, rows[0].hm), AVERAGE)
    return _table(
        "ablation",
        "ablation of ProCAP's parts",
        ("Variant",),
        [*(Column(part, "") for part in parts), *map(Column, means)],
        [
            _row(
                (row.variant,),
                [
                    *("yes" if getattr(row, part) else "-" for part in published.COMPONENTS),
                    *map(Metric, (*row.hm.values(), row.average)),
                ],
            )
            for row in rows
        ],
        f"Cells are HM of seed 1; {AVERAGE} is their mean.",
        wide=True,
    )


def _table(
    name: str,
    title: str,
    labels: tuple[str, ...],
    columns: Iterable[Column],
    rows: Iterable[Row],
    *notes: str,
    wide: bool = False,
) -> Table:
    title = f"Published: {title}"
    return Table(f"published-{name}", title, labels, tuple(columns), tuple(rows), (SOURCE, *notes), wide)


def _row(labels: tuple[str, ...], cells: Iterable[Any], group: str = "", average: bool = False) -> Row:
    return Row(labels, tuple(cells), "published", group, average)


def _halves(row: Any) -> list[Metric]:
    return [Metric(row.base), Metric(row.novel), Metric(row.hm)]
