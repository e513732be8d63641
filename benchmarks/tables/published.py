"""Make tables of the paper's numbers alone, for results on other data, which do not share a table with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import PAPER
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.tables.rows import HALVES, published_row
from benchmarks.tables.table import Column, Row, Table

SOURCE = "As printed in the paper: CLIP ViT-B/16; 16 shots unless a note says otherwise."


def published_tables() -> list[Table]:
    """Make the tables in the order of the suites; each is called published-<suite>."""
    main = published.base_to_novel()
    rows = [
        published_row((display_name(name), f"{row.method} ({row.venue})"), (row.base, row.novel, row.hm), group=name)
        for name in (*PAPER.datasets, AVERAGE)
        for row in main
        if row.dataset == name
    ]
    notes = (
        f"{AVERAGE}: its HM is that of average base and average novel accuracy, of which the audit says more.",
        "ProCAP: means over three random seeds, which the paper does not name. Others: as their publications report "
        "them; DCPL on average only.",
    )
    title, labels = "base-to-novel generalisation of eighteen methods", ("Data set", "Method")
    tables = [_table("base-to-novel", title, labels, HALVES, rows, *notes)]

    rows = []
    for row in sorted(published.stability(), key=lambda row: row.dataset == AVERAGE):
        means, deviations = (row.base, row.novel, row.hm), (row.base_std, row.novel_std, row.hm_std)
        rows.append(published_row((display_name(row.dataset),), map(Metric, means, deviations)))
    columns = [Column(column.title, "") for column in HALVES]
    notes = (
        "Mean ± standard deviation over three random seeds; the paper names neither these nor the kind of deviation.",
        f"{AVERAGE}: its HM is the mean of the data sets' HMs.",
    )
    tables.append(_table("stability", "stability of ProCAP over seeds", ("Data set",), columns, rows, *notes))

    note = "Trained on ImageNet with 16 shots; the mean is without it."
    tables.append(_transfer("cross-dataset", "cross-dataset transfer", published.cross_dataset(), note))
    note = (
        "Trained on ImageNet. The paper does not print with how many shots, but accuracies on ImageNet are those of "
        "cross-dataset transfer, with 16 shots, for all methods in both tables but DCPL. The mean is without ImageNet."
    )
    tables.append(_transfer("domain-generalization", "domain generalization", published.domain_generalization(), note))

    ablation = published.ablation()
    rows = []
    for row in ablation:
        parts = ["yes" if getattr(row, part) else "-" for part in published.COMPONENTS]
        rows.append(published_row((row.variant,), [*parts, *row.hm.values(), row.average]))
    columns = [Column(part, "") for part in ("Cross-Attn", "Gaussian", "KL", "L2", "InfoNCE")]
    columns += [Column(display_name(name)) for name in (*ablation[0].hm, AVERAGE)]
    note = (
        f"Cells are HM, though the caption has Top-1 accuracy: full ProCAP has those of Table 1; {AVERAGE} is "
        "their mean. According to the text, ablations use seed 1, but numbers of Table 1 are means over three seeds."
    )
    tables.append(_table("ablation", "ablation of ProCAP's parts", ("Variant",), columns, rows, note, wide=True))

    rows = [published_row((row.method, str(row.epochs)), (row.base, row.novel, row.hm)) for row in published.duration()]
    note = "On average over the eleven data sets."
    tables.append(_table("duration", "training duration", ("Method", "Epochs"), HALVES, rows, note))

    rows = []
    for row in published.runtime():
        numbers = (row.train_seconds, row.images_per_second, row.accuracy)
        rows.append(published_row((display_name(row.dataset), row.method), numbers, group=row.dataset))
    columns = [Column("training s", "low", digits=1), Column("FPS", digits=1), Column("Accuracy")]
    note = (
        "Ten epochs in the 16-shot setting, on one A100 with mixed precision, by the text with seed 1; the paper names "
        "neither the classes nor whether FPS includes decoding."
    )
    title = "training time and speed of inference"
    return [*tables, _table("runtime", title, labels, columns, rows, note)]


def _transfer(name: str, title: str, paper: Sequence[Any], note: str) -> Table:
    columns = [Column(column) for column in ("ImageNet (source)", *map(display_name, paper[0].targets), "Target mean")]
    rows = [
        published_row((f"{row.method} ({row.venue})",), (row.source, *row.targets.values(), row.target_mean))
        for row in paper
    ]
    return _table(name, title, ("Method",), columns, rows, note, wide=True)


def _table(
    name: str,
    title: str,
    labels: tuple[str, ...],
    columns: Sequence[Column],
    rows: Iterable[Row],
    *notes: str,
    wide: bool = False,
) -> Table:
    title = f"Published: {title}"
    rows = [replace(row, average=row.labels[0] == AVERAGE) for row in rows]
    return Table(f"published-{name}", title, labels, columns, rows, (SOURCE, *notes), wide)
