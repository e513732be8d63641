"""Plot few-shot curves: accuracy over the number of shots, a panel for the average and one for each data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import (
    FAINT,
    INK,
    Look,
    Plots,
    assign_looks,
    dagger,
    describe_seeds,
    grid,
    heading,
    legend,
    panels,
    styled,
)
from benchmarks.results.metrics import Metric
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.grid import accuracy_on
from benchmarks.tables.rows import group_by_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def shots_plots(suite: SuiteResults) -> Plots:
    """Return the curves of the suite few-shot."""
    return {"few-shot": partial(few_shot_curves, suite)}


@styled
def few_shot_curves(suite: SuiteResults) -> Figure | None:
    """Plot a line per method with a band of one standard deviation; untrained methods are horizontal lines.

    A missing point leaves a gap. An average is drawn only if every data set has a result for that number of shots.
    """
    from matplotlib.lines import Line2D

    lines = {
        title: {int(variant.key.get("shots", 0)): variant for variant in variants}
        for title, variants in group_by_title(suite, "shots").items()
    }
    ticks = sorted({shots for variants in lines.values() for shots in variants if shots})
    names = [*([AVERAGE] if len(suite.datasets) > 1 else []), *suite.datasets]
    cells = {
        (name, title, shots): accuracy_on(suite, variant, name)
        for name in names
        for title, variants in lines.items()
        for shots, variant in variants.items()
    }
    if not ticks or not any(cell for (_, _, shots), cell in cells.items() if shots):
        return None
    looks = assign_looks({title: variant.method for title, variants in lines.items() for variant in variants.values()})
    figure, axes = panels(len(names), 1.6 if len(names) > 1 else 2.1, "shots per class", "accuracy, %")
    for panel, name in zip(axes, names, strict=True):
        for title, variants in lines.items():
            _line(panel, [(shots, cells[name, title, shots]) for shots in sorted(variants)], looks[title])
        _frame(panel, name, ticks, [cell for (where, _, _), cell in cells.items() if where == name])
    heading(figure, f"Accuracy on all classes by number of shots ({describe_seeds(cells.values())})", cells.values())
    legend(
        figure,
        [Line2D([], [], **_drawn(looks[title], variants).line(label=title)) for title, variants in lines.items()],
    )
    return figure


def _line(axes: Axes, points: Sequence[tuple[int, Metric | None]], look: Look) -> None:
    level = dict(points).get(0)
    if level is not None:
        axes.axhline(level.mean, color=look.colour, linestyle=look.dashes, linewidth=1.2, zorder=1.5)
    curve = [(shots, cell) for shots, cell in points if shots]
    if not curve:
        return
    mean = [cell.mean if cell else math.nan for _, cell in curve]
    spread = [cell.std or 0.0 if cell else math.nan for _, cell in curve]
    shots = [shots for shots, _ in curve]
    axes.plot(shots, mean, zorder=3, **look.line(markersize=4))
    if any(spread):
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(shots, low, high, color=look.colour, alpha=0.2, linewidth=0, zorder=2)


def _frame(axes: Axes, name: str, ticks: Sequence[int], cells: Sequence[Metric | None]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    room = 2**0.25
    axes.set_xlim(ticks[0] / room, ticks[-1] * room)
    axes.yaxis.get_major_locator().set_params(nbins=5)  # type: ignore[call-arg]
    axes.set_title(display_name(name) + dagger(cells), loc="left", fontweight="bold" if name == AVERAGE else "normal")
    grid(axes, "y")
    if name == AVERAGE:
        axes.set_facecolor("#f6f7f9")
        for spine in axes.spines.values():
            spine.set(visible=True, color=INK, linewidth=1.1)
    if not any(cells):
        axes.text(
            0.5, 0.5, "not all there", transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=7
        )
        axes.set_yticks([])


def _drawn(look: Look, variants: Any) -> Look:
    """Remove the markers of a horizontal line."""
    return look if any(variants) else Look(look.colour, "", look.dashes)
