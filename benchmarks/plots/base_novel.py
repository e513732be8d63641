"""Plot base-to-novel results: harmonic means as bars and as a radar, and reliability diagrams."""

from __future__ import annotations

import math
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.plots import style
from benchmarks.plots.style import OTHER, Look, Plots, styled
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.calibration import average_over_tests
from runner.calibration import BINS
from shards.names import join_first

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 17
"""Letters of a title that fit above a panel."""


def halves_plots(suite: SuiteResults) -> Plots:
    """Return the plots of base-to-novel."""
    return {
        "hm-bars": partial(hm_bars, suite),
        "hm-radar": partial(hm_radar, suite),
        "reliability": partial(reliability, suite),
    }


def _assign_looks(suite: SuiteResults) -> dict[str, Look]:
    """Assign a look to each variant; of many methods those of the highest average HM are highlighted."""
    variants = suite.by_title
    hms = {title: suite.halves(variant, AVERAGE)[2] for title, variant in variants.items()}
    methods = {title: variant.method for title, variant in variants.items()}
    return style.assign_looks(methods, {title: hm.mean for title, hm in hms.items() if hm})


def stability_plots(suite: SuiteResults) -> Plots:
    """Return the bars of stability, whose errors are the deviations over seeds."""
    return {"hm-bars": partial(hm_bars, suite)}


@styled
def hm_bars(suite: SuiteResults) -> Figure | None:
    """Draw bars of HM per data set, with the deviation over seeds; other methods are dots."""
    names = suite.datasets_and_average
    rows = {title: [suite.halves(variant, name)[2] for name in names] for title, variant in suite.by_title.items()}
    hms = {title: cells for title, cells in rows.items() if any(cells)}
    if not hms:
        return None
    looks = _assign_looks(suite)
    bars = [title for title in hms if looks[title] is not OTHER]
    slots = len(bars) + (len(bars) < len(hms))
    figure, (axes,) = style.panels(1, 2.1, y="harmonic mean, %")
    # Wide enough for the bars and for the names below them.
    width = max(0.34 * slots, 0.062 * max(len(display_name(name)) for name in names))
    figure.set_figwidth(max(style.COLUMN, min(style.PAGE, 0.9 + width * len(names))))
    for title, cells in hms.items():
        slot = bars.index(title) if title in bars else len(bars)
        places = [index + (slot - (slots - 1) / 2) * 0.84 / slots for index in range(len(names))]
        if title in bars:
            mean = [cell.mean if cell else math.nan for cell in cells]
            std = [cell.std if cell and cell.std else math.nan for cell in cells]
            axes.bar(places, mean, 0.76 / slots, zorder=2, label=title, **looks[title].fill())
            axes.errorbar(places, mean, std, fmt="none", ecolor=style.INK, elinewidth=0.8, zorder=3)
        else:
            style.draw_curve(axes, dict(zip(places, cells, strict=True)), OTHER, "", linestyle="none", markersize=4)
    axes.set_xticks(range(len(names)), list(map(display_name, names)))
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(0, 100)
    style.grid(axes, "y")
    shown = [cell for cells in hms.values() for cell in cells]
    gaps = join_first([title for title, cells in rows.items() if not all(cells)])
    missing = gaps and f";\nresults of {gaps} are missing"
    title = f"Harmonic mean of base and novel accuracy ({style.describe_seeds(shown)})"
    style.heading(figure, f"{title}{missing}", shown)
    style.legend(figure)
    return figure


@styled
def hm_radar(suite: SuiteResults) -> Figure | None:
    """Draw HM of every method on an axis per data set, with gaps where it is missing; None below three data sets."""
    hms = {
        title: {name: suite.halves(variant, name)[2] for name in suite.options.datasets}
        for title, variant in suite.by_title.items()
    }
    datasets = [name for name in suite.options.datasets if any(means[name] for means in hms.values())]
    if len(datasets) < 3:
        return None
    looks = _assign_looks(suite)
    figure, (panel,) = style.panels(1, 3.8, subplot_kw={"projection": "polar"})
    figure.set_figwidth(4.9)
    axes: Any = panel
    angles = [2 * math.pi * i / len(datasets) for i in range(len(datasets))]
    for title, means in hms.items():
        values = [cell.mean if (cell := means[name]) else math.nan for name in datasets]
        if not all(map(math.isnan, values)):
            axes.plot([*angles, 0], [*values, values[0]], **looks[title].line(label=title, markersize=4))
    cells = [cell for means in hms.values() for cell in means.values() if cell]
    heights = [cell.mean for cell in cells]
    low = max(0, 10 * math.floor(min(heights) / 10 - 1))
    high = max(low + 10, 10 * math.ceil(max(heights) / 10))
    step = 10 if low >= 40 else 20
    axes.set_ylim(low, high)
    axes.set_yticks(range(low + step, high + 1, step))
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, list(map(display_name, datasets)))
    axes.set_rlabel_position(180 / len(datasets))
    axes.tick_params(axis="y", labelsize=6.5, labelcolor=style.FAINT)
    axes.tick_params(axis="x", pad=2, labelsize=8)
    # Centred labels would overlap the circle.
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    axes.grid(color="#d1d5db", linewidth=0.6)
    axes.spines["polar"].set_color("#d1d5db")
    seeds = style.describe_seeds(cells, std=False)
    style.heading(figure, f"Harmonic mean in % ({seeds}; the centre is {low})", cells)
    style.legend(figure)
    return figure


@styled
def reliability(suite: SuiteResults) -> Figure | None:
    """Draw base above novel classes for each highlighted method; None without evaluations that recorded calibration.

    The bars of a panel pool the images of all data sets and seeds; its ECE is the mean over them, as in the table.
    """
    frame = suite.frame[suite.frame.nll.notna() & suite.frame.target_classes.isin(["base", "novel"])]
    frames = {title: frame[frame.number == suite.variants.index(variant)] for title, variant in suite.by_title.items()}
    looks = _assign_looks(suite)
    recorded = {title: rows for title, rows in frames.items() if len(rows) and looks[title] is not OTHER}
    titles = list(recorded)
    if not titles:
        return None
    halves, across = sorted(frame.target_classes.unique()), len(titles)
    figure, axes = style.panels(len(halves) * across, 1.35, "confidence", across=across, sharex=True, sharey=True)
    figure.set_figwidth(min(style.PAGE, 0.8 + 1.22 * across))
    cells = []
    for number, panel in enumerate(axes):
        half, title = halves[number // across], titles[number % across]
        rows = recorded[title][recorded[title].target_classes == half]
        cells.append(ece := average_over_tests(rows, "ece"))
        words = f"ECE {ece.mean:.1f} %" if ece else "ECE -"
        panel.set_title(words if number >= across else f"{textwrap.fill(title, WIDTH)}\n{words}")
        if not number % across:
            panel.set_ylabel(f"{half} classes:\naccuracy")
        _draw_bins(panel, rows, looks[title])
    over = plural(len(suite.options.datasets), "data set")
    style.heading(figure, f"Confidence against accuracy, {over} ({style.describe_seeds(cells, std=False)})", cells)
    style.legend(figure)
    return figure


def _draw_bins(panel: Axes, rows: pd.DataFrame, look: Look) -> None:
    """Draw the accuracy of each bin of equal width, and the gap to the mean confidence of its images."""
    import numpy as np

    bins = [fit.equal_width for fit in rows.calibration]
    count, confidence, correct = (
        np.sum([getattr(widths, name) for widths in bins], axis=0) for name in ("count", "confidence", "correct")
    )
    used = np.flatnonzero(count)
    accuracy, mean = correct[used] / count[used], confidence[used] / count[used]
    panel.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.8, linestyle=(0, (4, 2)), label="accuracy = confidence")
    position: dict[str, Any] = {"width": 1 / BINS, "align": "edge"}
    gap: dict[str, Any] = {"facecolor": "none", "edgecolor": style.INK, "linewidth": 0.4, "hatch": "//////"}
    panel.bar(used / BINS, accuracy, facecolor=look.colour, linewidth=0, label="accuracy", **position)
    panel.bar(used / BINS, mean - accuracy, bottom=accuracy, label="gap to the mean confidence", **gap, **position)
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
    style.grid(panel, "both")
