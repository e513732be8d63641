"""Make tables of the paper's numbers alone, for results on other data, which do not share a table with them."""

from __future__ import annotations

from benchmarks.results.metrics import Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.tables.rows import HALVES
from benchmarks.tables.table import Column, Row, Table

SOURCE = "As printed in the paper: CLIP ViT-B/16 with OpenAI's weights, 16 shots."
MARKS = {True: "yes", False: "-"}


def published_tables() -> list[Table]:
    """Make the tables in the order of the suites; each is called published-<suite>."""
    return [
        _base_to_novel(),
        _stability(),
        _transfer("cross-dataset", "Cross-dataset transfer", published.cross_dataset()),
        _transfer("domain-generalization", "Domain generalization", published.domain_generalization()),
        _ablation(),
        _duration(),
        _runtime(),
    ]


def _base_to_novel() -> Table:
    """Make the main table data set by data set, with the average last."""
    table = published.base_to_novel()
    order = [*(name for name in published.DATASETS if any(line.dataset == name for line in table)), AVERAGE]
    rows = [
        Row(
            (display_name(dataset), f"{line.method} ({line.venue})"),
            tuple(map(Metric, (line.base, line.novel, line.hm))),
            "published",
            dataset,
            dataset == AVERAGE,
        )
        for dataset in order
        for line in table
        if line.dataset == dataset
    ]
    title = "Published: base-to-novel generalisation of eighteen methods"
    average = f"{AVERAGE}: its HM is that of average base and average novel accuracy, of which the audit says more."
    notes = (SOURCE, average, "ProCAP: means over seeds 1, 2, 3.")
    return Table("published-base-to-novel", title, ("Data set", "Method"), HALVES, tuple(rows), notes)


def _stability() -> Table:
    rows = [
        Row(
            (display_name(line.dataset),),
            (Metric(line.base, line.base_std), Metric(line.novel, line.novel_std), Metric(line.hm, line.hm_std)),
            "published",
            average=line.dataset == AVERAGE,
        )
        for line in sorted(published.stability(), key=lambda line: line.dataset == AVERAGE)
    ]
    columns = tuple(Column(column.title, "") for column in HALVES)
    notes = (
        SOURCE,
        "Mean ± standard deviation over seeds 1, 2, 3; the paper does not say of which kind.",
        f"{AVERAGE}: its HM is the mean of the data sets' HMs.",
    )
    title = "Published: stability of ProCAP over seeds"
    return Table("published-stability", title, ("Data set",), columns, tuple(rows), notes)


def _transfer(name: str, title: str, table: tuple[published.PublishedTransfer, ...]) -> Table:
    targets = list(table[0].targets)
    columns = ("ImageNet (source)", *map(display_name, targets), "Target mean")
    rows = tuple(
        Row(
            (f"{line.method} ({line.venue})",),
            tuple(map(Metric, (line.source, *(line.targets[target] for target in targets), line.target_mean))),
            "published",
        )
        for line in table
    )
    notes = (SOURCE, "Trained on all classes of ImageNet; the mean is without it.")
    return Table(
        f"published-{name}", f"Published: {title.lower()}", ("Method",), tuple(map(Column, columns)), rows, notes, True
    )


def _ablation() -> Table:
    table = published.ablation()
    sets = list(table[0].hm)
    parts = tuple(Column(name, "") for name in ("Cross-Attn", "Gaussian", "KL", "L2", "InfoNCE"))
    rows = tuple(
        Row(
            (line.variant,),
            (
                *(MARKS[line.components[part]] for part in published.COMPONENTS),
                *(Metric(line.hm[name]) for name in sets),
                Metric(line.average),
            ),
            "published",
        )
        for line in table
    )
    columns = (*parts, *(Column(display_name(name)) for name in sets), Column(AVERAGE))
    notes = (SOURCE, f"Figures are HM of seed 1; {AVERAGE} is their mean.")
    title = "Published: ablation of ProCAP's parts"
    return Table("published-ablation", title, ("Variant",), columns, rows, notes, wide=True)


def _duration() -> Table:
    rows = tuple(
        Row((line.method, str(line.epochs)), tuple(map(Metric, (line.base, line.novel, line.hm))), "published")
        for line in published.duration()
    )
    notes = (SOURCE, "On average over the eleven data sets.")
    return Table("published-duration", "Published: training duration", ("Method", "Epochs"), HALVES, rows, notes)


def _runtime() -> Table:
    rows = tuple(
        Row(
            (display_name(line.dataset), line.method),
            tuple(map(Metric, (line.train_seconds, line.images_per_second, line.accuracy))),
            "published",
            line.dataset,
        )
        for line in published.runtime()
    )
    columns = (Column("training s", "low", digits=1), Column("FPS", digits=1), Column("Accuracy"))
    notes = (
        SOURCE,
        "Ten epochs on all classes, seed 1, on one A100 with mixed precision, with the authors' code; the paper does "
        "not say whether FPS includes decoding.",
    )
    title = "Published: training time and speed of inference"
    return Table("published-runtime", title, ("Data set", "Method"), columns, rows, notes)
