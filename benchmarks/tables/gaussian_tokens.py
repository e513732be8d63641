"""Make the table of the standard deviations that Gaussian prompt tokens have learned."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.results.metrics import Metric
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.table import Column, Row, Table
from runner.run_folders import RunFolder

COLUMNS = (
    *(Column(title, "", digits=4) for title in ("median", "smallest", "largest")),
    *(Column(f"moved %, {title}", "") for title in ("median", "largest")),
)
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "median": median,
    "min": min,
    "max": max,
    "moved_median": median,
    "moved_max": max,
}
"""Names in `train.json`, in the order of the columns, and how the numbers of several seeds become one."""
PREFIX = "sigma of "


def gaussian_token_tables(suite: SuiteResults) -> list[Table]:
    """Make a row for each data set, unchanged method and set of tokens; no table without runs that record sigma."""
    rows = []
    for dataset in suite.options.datasets:
        for title, variant in suite.by_title.items():
            runs = [run for run in suite.runs if (run.variant, run.dataset) == (variant, dataset)]
            trained = [RunFolder(suite.results / run.path).train() for run in runs if not variant.changed]
            found: dict[str, list[dict[str, float]]] = {}
            for name, numbers in (item for one in trained if one for item in one.statistics.items()):
                if name.startswith(PREFIX):
                    found.setdefault(name.removeprefix(PREFIX), []).append(numbers)
            for tokens, seeds in found.items():
                values = [merge([one[name] for one in seeds]) for name, merge in STATISTICS.items()]
                cells = (*map(Metric, values[:3]), *(Metric(100 * value) for value in values[3:]))
                rows.append(Row((display_name(dataset), title, tokens), cells, group=dataset))
    if not rows:
        return []
    notes = (
        "Sigma of all learned numbers of the tokens at the end of training, over all seeds, and its change from the "
        "initial value as a share of that. Where it moved by less than 5 %, the variances are those that logvar_init "
        "gives; logvar_lr_scale trains them faster.",
    )
    labels = "Data set", "Method", "Tokens"
    title = f"{suite.suite.heading}: standard deviation of Gaussian tokens"
    return [Table(f"{suite.name}-sigma", title, labels, COLUMNS, rows, notes, wide=True)]
