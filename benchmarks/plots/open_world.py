"""Plot what the names of all classes cost: base and novel accuracy among the names of each half, and among all."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.plots import style
from benchmarks.plots.style import Plots
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.open_world import open_world_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def open_world_plots(suite: SuiteResults) -> Plots:
    """Return the plot of the suite open-world."""
    return {"open-world": partial(draw_shifts, suite)}


def draw_shifts(suite: SuiteResults) -> Figure | None:
    """Draw a line per method from its accuracies in each half to those among all names, a panel per data set."""
    names = [name for name in (AVERAGE, *suite.options.datasets) if name in suite.datasets_and_average]
    cells = {
        (name, title): open_world_cells(suite, variant, name)[:6]
        for name in names
        for title, variant in suite.by_title.items()
    }
    shown = {key: row for key, row in cells.items() if all(row)}
    if not shown:
        return None
    heights = {title: row[5].mean if row[5] else math.nan for (name, title), row in cells.items() if name == names[0]}
    looks = style.assign_looks({title: variant.method for title, variant in suite.by_title.items()})
    looks = style.highlight(looks, heights, suite.reference())
    figure, axes = style.panels(len(names), 1.9, "base accuracy, %", "novel accuracy, %", across=3)
    for panel, name in zip(axes, names, strict=True):
        for title, look in looks.items():
            if row := shown.get((name, title)):
                base, novel, _, base_of_all, novel_of_all, _ = (metric.mean for metric in row if metric)
                panel.plot([base, base_of_all], [novel, novel_of_all], **look.line(marker="", linewidth=1.2))
                panel.plot(base, novel, **look.line(linestyle="", markersize=4, markerfacecolor="white"))
                panel.plot(base_of_all, novel_of_all, **look.line(linestyle="", markersize=5, label=title))
        panel.set_title(display_name(name), fontweight="bold" if name == AVERAGE else "normal")
        style.grid(panel, "both")
    metrics = [metric for row in shown.values() for metric in row]
    seeds = style.describe_seeds(metrics, std=False)
    style.heading(figure, f"Hollow: among the names of each half; filled: among all names ({seeds})", metrics)
    style.legend(figure)
    return figure
