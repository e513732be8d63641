"""Plot the spread over seeds: how far each seed is from the mean, with one standard deviation to both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import (
    FAINT,
    GRID,
    INK,
    MARKERS,
    PAGE,
    Plots,
    assign_looks,
    dagger,
    grid,
    heading,
    legend,
    styled,
)
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.rows import covers_paper, why_incomparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


KINDS = ("base", "novel", "harmonic mean")


def spread_plots(suite: SuiteResults) -> Plots:
    """Return a plot for each method; on the paper's data sets ProCAP's shows the published deviations too."""
    several = len(suite.variants) > 1
    return {
        f"seed-spread-{number}-{variant.method}" if several else "seed-spread": partial(seed_spread, suite, variant)
        for number, variant in enumerate(suite.variants, 1)
    }


@styled
def seed_spread(suite: SuiteResults, variant: Variant) -> Figure | None:
    """Draw a panel each for base, novel and HM, a row per data set; None if no data set has several seeds.

    Data sets differ much more than seeds, so each row is drawn around its own mean, whose value
    is printed beside it.
    """
    from matplotlib.figure import Figure

    rows: dict[str, Halves] = {name: suite.halves(variant, name) for name in suite.datasets}
    if len(suite.datasets) > 1:
        # For HM take the mean over data sets, as in the paper's table of stability.
        rows[AVERAGE] = (*suite.average_halves(variant)[:2], suite.mean_of_hms(variant))
    cells = [cell for halves in rows.values() for cell in halves if cell]
    if not any(cell.std is not None for cell in cells):
        return None
    printed = {} if why_incomparable(suite) else _printed(suite, variant)
    figure = Figure(figsize=(PAGE, 0.25 * len(rows) + 1.15), layout="constrained")
    axes: Any = figure.subplots(1, 3, sharey=True, sharex=True)
    colour = assign_looks({variant.name: variant.method})[variant.name].colour
    for kind, panel in enumerate(axes):
        for place, (name, halves) in enumerate(rows.items()):
            if name == AVERAGE:
                panel.axhspan(place - 0.5, place + 0.5, color=GRID, alpha=0.55, zorder=0, linewidth=0)
            _row(panel, place, halves[kind], colour, printed.get(name, (None,) * 3)[kind])
        panel.axvline(0, color=FAINT, linewidth=0.8, zorder=1)
        panel.set_title(KINDS[kind], loc="left")
        grid(panel, "x")
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
    # Identical seeds would give an axis of zero width.
    reach = 1.12 * max(abs(x) for panel in axes for line in panel.lines for x in line.get_xdata()) or 1.0
    axes[0].set_xlim(-reach, reach)
    names = [display_name(name) + dagger(halves) for name, halves in rows.items()]
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    axes[1].set_xlabel("distance from the mean over seeds, percentage points")
    seeds = cells[0].seeds
    heading(
        figure, f"{variant.name}: accuracy of {len(seeds)} seeds, mean ± sample standard deviation (n − 1) in %", cells
    )
    legend(figure, _handles(seeds, colour, bool(printed)))
    return figure


def _row(axes: Axes, place: int, cell: Metric | None, colour: str, printed: float | None) -> None:
    at = axes.get_yaxis_transform()
    if cell is None:
        axes.text(1.0, place, "–", transform=at, ha="left", va="center", fontsize=7, color=FAINT)
        return
    std = cell.std
    if std is not None:
        axes.plot([-std, std], [place, place], color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt", zorder=2)
    if printed is not None:
        axes.plot([-printed, printed], [place + 0.3] * 2, color=INK, linewidth=0.8, marker="|", markersize=4, zorder=2)
    for number, value in enumerate(cell.values):
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(
            value - cell.mean,
            place,
            marker=marker,
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.5,
            markersize=4,
            zorder=3,
        )
    text = f"{cell.mean:.2f}" + (f" ± {std:.2f}" if std is not None else "")
    axes.text(1.0, place, text, transform=at, ha="left", va="center", fontsize=6.5)


def _printed(suite: SuiteResults, variant: Variant) -> Mapping[str, tuple[float, float, float]]:
    """Return published deviations by data set, and of the average if it is over the same data sets."""
    if variant.method != "procap" or variant.changed:
        return {}
    alike = {*suite.datasets} - suite.changed_sets.keys()
    alike |= {AVERAGE} if covers_paper(list(alike)) else set()
    spreads = {line.dataset: (line.base_std, line.novel_std, line.hm_std) for line in published.stability()}
    return {name: spread for name, spread in spreads.items() if name in alike}


def _handles(seeds: Sequence[int], colour: str, printed: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    edge: dict[str, Any] = {"color": colour, "markeredgecolor": INK, "markeredgewidth": 0.5, "linestyle": "none"}
    found = [
        Line2D([], [], marker=MARKERS[number % len(MARKERS)], label=f"seed {seed}", **edge)
        for number, seed in enumerate(seeds)
    ]
    found.append(Line2D([], [], color=colour, linewidth=6, alpha=0.35, label="± std"))
    if printed:
        found.append(Line2D([], [], color=INK, linewidth=0.8, marker="|", markersize=4, label="± std, published"))
    return found
