"""Plot base-to-novel results: harmonic means as bars and as a radar, reliability diagrams."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.experiment.published import display_name
from benchmarks.plots import style
from benchmarks.plots.style import Look, Plots
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.base_novel import open_world_cells
from benchmarks.tables.calibration_means import average_over_tests
from runner.calibration import BINS
from shards.names import join_first

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 17
"""Letters of a title that fit above a panel."""
THINNEST = 0.055
"""Inches of a bar and the space next to it."""


def halves_plots(suite: SuiteResults) -> Plots:
    """Return the plots of base-to-novel."""
    return {
        "hm-bars": partial(hm_bars, suite),
        "hm-radar": partial(hm_radar, suite),
        "reliability": partial(reliability, suite),
    }


def open_world_plots(suite: SuiteResults) -> Plots:
    """Return the plots of open-world: harmonic means among all names, and among those of each half."""
    return {"open-world": partial(hm_bars, suite, among_all=True), "hm-bars": partial(hm_bars, suite)}


def _assign_looks(suite: SuiteResults, hms: pd.DataFrame) -> dict[str, Look]:
    """Assign looks to the titles; of many, those of the highest mean have colours. hms: see `_list_hms`."""
    return style.look_at_suite(suite, hms.map(lambda cell: cell.mean if cell else math.nan).mean().to_dict())


def _list_hms(suite: SuiteResults, datasets: Sequence[str], *, among_all: bool = False) -> pd.DataFrame:
    """List HM of each title (columns) on each data set (rows): a Metric, or None if it is missing."""
    import pandas as pd

    titles, (cells, hm) = suite.by_title.items(), (open_world_cells, 5) if among_all else (SuiteResults.halves, 2)
    hms = {title: [cells(suite, variant, name)[hm] for name in datasets] for title, variant in titles}
    return pd.DataFrame(hms, list(map(display_name, datasets)), dtype=object)


def hm_bars(suite: SuiteResults, *, among_all: bool = False) -> Figure | None:
    """Draw bars of HM per data set, with the deviation over seeds. among_all: of accuracies among all names."""
    from matplotlib.container import BarContainer

    hms = _list_hms(suite, suite.datasets_and_average, among_all=among_all)
    gaps = join_first([title for title in hms if hms[title].isna().any()])
    # A title without any result has no place among the bars; the heading names it.
    hms = hms.dropna(axis="columns", how="all")
    if hms.empty:
        return None
    looks, count = _assign_looks(suite, hms), len(hms.columns)
    means, deviations = (hms.map(lambda cell, name=name: getattr(cell, name, None)) for name in ("mean", "std"))
    # Bars that would be thinner are drawn in several rows.
    across = min(len(hms), max(1, int(style.PAGE / (THINNEST * count))))
    rows = math.ceil(len(hms) / across)
    # The label of a row is shorter than the row is high.
    height, label = (2.1, "harmonic mean, %") if rows == 1 else (1.3, "HM, %")
    figure, panels = style.panels(rows, height, y=label, across=1)
    # Wide enough for the bars and for the names below them.
    width = max(0.34 * count, 0.062 * max(map(len, hms.index)))
    figure.set_figwidth(max(style.COLUMN, min(style.PAGE, 0.9 + width * len(hms))))
    error_bars = {"elinewidth": 0.8, "ecolor": style.INK, "zorder": 3} | ({"capsize": 0} if rows > 1 else {})
    for axes, start in zip(panels, range(0, len(hms), across), strict=True):
        part = slice(start, start + across)
        bars: dict[str, Any] = {"yerr": deviations.iloc[part].astype(float), "error_kw": error_bars, "zorder": 2}
        bars |= {"color": [looks[title].colour for title in hms], "rot": 0, "width": 0.84, "legend": False}
        # pandas draws a set of bars for each title, at 0, 1, ... for the data sets; `containers` has error bars too.
        means.iloc[part].astype(float).plot.bar(ax=axes, **bars)
        bar_sets = [bar_set for bar_set in axes.containers if isinstance(bar_set, BarContainer)]
        for number, bar_set in enumerate(bar_sets if count > style.COLOURED else ()):
            for bar in bar_set:
                bar.set(hatch=style.HATCHES[number % len(style.HATCHES)], edgecolor="white", linewidth=0)
        for title, bar_set in zip(hms, bar_sets, strict=True):
            for bar in bar_set if looks[title].is_reference else ():
                bar.set(edgecolor=style.INK, linewidth=1.2)
        axes.tick_params(axis="x", length=0)
        # In a last row with fewer data sets the bars keep their width.
        axes.set(xlim=(-0.5, across - 0.5), ylim=(0, 100))
        style.grid(axes, "y")
    cells = [cell for cell in hms.to_numpy().flat if cell]
    missing = gaps and f";\nresults of {gaps} are missing"
    title = f"Harmonic mean of base and novel accuracy{' among all names' * among_all}"
    style.heading(figure, f"{title} ({style.describe_cells(suite, cells)}){missing}", cells)
    style.legend(figure)
    return figure


def hm_radar(suite: SuiteResults) -> Figure | None:
    """Draw HM of every method on an axis per data set, with gaps where it is missing; None below three data sets."""
    hms = _list_hms(suite, suite.options.datasets).dropna(how="all")
    if len(hms) < 3:
        return None
    looks = _assign_looks(suite, hms)
    figure, (panel,) = style.panels(1, 3.8, subplot_kw={"projection": "polar"})
    figure.set_figwidth(4.9)
    axes: Any = panel
    angles = [2 * math.pi * i / len(hms) for i in range(len(hms))]
    for title in hms.dropna(axis="columns", how="all"):
        values = [cell.mean if cell else math.nan for cell in hms[title]]
        # Back to the first axis, which closes the polygon.
        axes.plot([*angles, 0], [*values, values[0]], **looks[title].line(label=title, markersize=4))
    cells = [cell for cell in hms.to_numpy().flat if cell]
    heights = [cell.mean for cell in cells]
    # Ten points or more below the lowest value: in the centre all axes meet and points would coincide.
    low = max(0, 10 * math.floor(min(heights) / 10 - 1))
    high = max(low + 10, 10 * math.ceil(max(heights) / 10))
    step = 10 if low >= 40 else 20
    axes.set_ylim(low, high)
    axes.set_yticks(range(low + step, high + 1, step))
    # Polar axes of matplotlib begin at the right and run counter-clockwise.
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, list(hms.index))
    axes.set_rlabel_position(180 / len(hms))
    axes.tick_params(axis="y", labelsize=6.5, labelcolor=style.FAINT)
    axes.tick_params(axis="x", pad=2, labelsize=8)
    # Centred labels would overlap the circle.
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    axes.grid(color="#d1d5db", linewidth=0.6)
    axes.spines["polar"].set_color("#d1d5db")
    seeds = style.describe_cells(suite, cells, std=False)
    style.heading(figure, f"Harmonic mean in % ({seeds}; the centre is {low})", cells)
    style.legend(figure)
    return figure


def reliability(suite: SuiteResults) -> Figure | None:
    """Draw base above novel classes for each method; None without evaluations that recorded calibration.

    The bars of a panel pool the images of all data sets and seeds; its ECE is the mean over them, as in the table.
    """
    frame = suite.frame[suite.frame.nll.notna() & suite.frame.target_classes.isin(["base", "novel"])]
    frames = {title: frame[frame.number == suite.variants.index(variant)] for title, variant in suite.by_title.items()}
    looks = _assign_looks(suite, _list_hms(suite, suite.options.datasets))
    titles = [title for title, rows in frames.items() if len(rows) and looks[title].colour != style.GREY]
    if not titles:
        return None
    halves, across = sorted(frame.target_classes.unique()), len(titles)
    figure, axes = style.panels(len(halves) * across, 1.35, "confidence", across=across, sharex=True, sharey=True)
    figure.set_figwidth(0.8 + 1.22 * across)
    cells = []
    for number, panel in enumerate(axes):
        half, title = halves[number // across], titles[number % across]
        rows = frames[title][frames[title].target_classes == half]
        # The ECE of pooled images can be lower, as errors of different sign in two data sets cancel in a bin.
        cells.append(ece := average_over_tests(rows, "ece", suite.options.seeds))
        words = f"ECE {ece.mean:.1f} %" if ece else "ECE -"
        panel.set_title(words if number >= across else f"{textwrap.fill(title, WIDTH)}\n{words}")
        if not number % across:
            panel.set_ylabel(f"{half} classes:\naccuracy")
        _draw_bins(panel, rows, looks[title])
    count = plural(len(suite.options.datasets), "data set")
    style.heading(
        figure, f"Confidence against accuracy, {count} ({style.describe_cells(suite, cells, std=False)})", cells
    )
    style.legend(figure)
    return figure


def _draw_bins(panel: Axes, rows: pd.DataFrame, look: Look) -> None:
    """Draw the accuracy of each bin of equal width, and the gap to the mean confidence of its images."""
    import numpy as np

    bins = [fit.equal_width for fit in rows.calibration]
    count, confidence, correct = (
        np.sum([np.zeros(BINS), *(getattr(widths, name) for widths in bins)], axis=0)
        for name in ("count", "confidence", "correct")
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
