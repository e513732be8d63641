"""Plot the spread over seeds: how far each seed is from the mean, with one standard deviation to both sides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots import style
from benchmarks.plots.style import Plots, styled
from benchmarks.results.metrics import Halves
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("base", "novel", "harmonic mean")


def spread_plots(suite: SuiteResults) -> Plots:
    """Return a plot for each method."""
    several = len(suite.variants) > 1
    return {
        f"seed-spread-{number}-{variant.method}" if several else "seed-spread": partial(seed_spread, suite, variant)
        for number, variant in enumerate(suite.variants, 1)
    }


@styled
def seed_spread(suite: SuiteResults, variant: Variant) -> Figure | None:
    """Draw base, novel and HM of each data set around their means over seeds; None if no data set has several seeds."""
    rows: dict[str, Halves] = {name: suite.halves(variant, name) for name in suite.options.datasets}
    if len(suite.options.datasets) > 1:
        # For HM take the mean over data sets, as in the paper's table of stability.
        rows[AVERAGE] = (*suite.halves(variant, AVERAGE)[:2], suite.mean_of_hms(variant))
    every = [cell for halves in rows.values() for cell in halves if cell]
    if not any(cell.std is not None for cell in every):
        return None
    seeds = every[0].seeds
    colour = style.assign_looks({"": variant.method})[""].colour
    edge: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 0.5, "s": 16, "zorder": 3}
    figure, axes = style.panels(3, 0.25 * len(rows) + 0.55, sharey=True, sharex=True)
    for kind, panel in enumerate(axes):
        cells = {row: halves[kind] for row, halves in enumerate(rows.values())}
        whole = {row: cell for row, cell in cells.items() if cell}
        deviations = [cell.std or 0.0 for cell in whole.values()]
        panel.barh(list(whole), [2 * std for std in deviations], 0.4, [-std for std in deviations], color=colour,
                   alpha=0.35, label="± std")  # fmt: skip
        for number, seed in enumerate(seeds):
            distances = [cell.values[number] - cell.mean for cell in whole.values()]
            marker = style.MARKERS[number % len(style.MARKERS)]
            panel.scatter(distances, list(whole), marker=marker, color=colour, label=f"seed {seed}", **edge)
        for row, cell in cells.items():
            text = f"{cell.mean:.2f}" + (f" ± {cell.std:.2f}" if cell.std is not None else "") if cell else "–"
            panel.text(1.0, row, text, transform=panel.get_yaxis_transform(), va="center", fontsize=6.5)
        if AVERAGE in rows:
            panel.axhspan(len(rows) - 1.5, len(rows) - 0.5, color=style.GRID, alpha=0.55, zorder=0, linewidth=0)
        panel.axvline(0, color=style.FAINT, linewidth=0.8, zorder=1)
        panel.set_title(KINDS[kind])
        style.grid(panel, "x")
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
    reach = max(map(abs, axes[0].get_xlim()))
    axes[0].set_xlim(-reach, reach)
    axes[0].set_yticks(range(len(rows)), [display_name(name) + style.dagger(halves) for name, halves in rows.items()])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    axes[1].set_xlabel("distance from the mean over seeds, percentage points")
    title = f"{variant.name}: accuracy of {len(seeds)} seeds, mean ± sample standard deviation (n − 1) in %"
    style.heading(figure, title, every)
    style.legend(figure)
    return figure
