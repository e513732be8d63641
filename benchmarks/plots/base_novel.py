"""Plot base-to-novel results: harmonic means as bars and as a radar, training curves, accuracy against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots import style
from benchmarks.plots.calibration import reliability
from benchmarks.plots.style import OTHER, Look, Plots, styled
from benchmarks.results.frame import dataset_order
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.base_novel import mean_speeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS_IN_ROW = 27
"""Largest number of bars that still have room for their numbers."""


def halves_plots(suite: SuiteResults) -> Plots:
    """Return the plots of base-to-novel."""
    return {
        "hm-bars": partial(hm_bars, suite),
        "hm-radar": partial(hm_radar, suite),
        "learning-curves": partial(learning_curves, suite),
        "accuracy-speed": partial(accuracy_speed, suite),
        "reliability": partial(reliability, suite),
    }


def _assign_looks(suite: SuiteResults) -> dict[str, Look]:
    """Assign a look to each variant; of many methods those of the highest average HM are highlighted."""
    variants = suite.by_title
    hms = {title: suite.halves(variant, AVERAGE)[2] for title, variant in variants.items()}
    methods = {title: variant.method for title, variant in variants.items()}
    return style.assign_looks(methods, {title: hm.mean for title, hm in hms.items() if hm})


@styled
def hm_bars(suite: SuiteResults) -> Figure | None:
    """Draw bars of HM per data set, triangles for base and novel; methods that are not highlighted are dots beside."""
    names = suite.datasets_and_average
    every = {title: {name: suite.halves(variant, name) for name in names} for title, variant in suite.by_title.items()}
    groups = [name for name in names if any(own[name][2] for own in every.values())]
    if not groups:
        return None
    looks = _assign_looks(suite)
    results = {title: own for title, own in every.items() if any(own[name][2] for name in groups)}
    bars = [title for title in results if looks[title] is not OTHER]
    others = [own for title, own in results.items() if looks[title] is OTHER]
    slots = len(bars) + bool(others)
    rows = math.ceil(len(groups) * slots / BARS_IN_ROW)
    across = math.ceil(len(groups) / rows)
    figure, axes = style.panels(math.ceil(len(groups) / across), 2.1, "", "accuracy, %", across=1)
    figure.set_figwidth(max(style.COLUMN, min(style.PAGE, 0.9 + 0.34 * across * slots)))
    for number, panel in enumerate(axes):
        names = groups[number * across : (number + 1) * across]
        shifts = [(place - (slots - 1) / 2) * 0.84 / slots for place in range(slots)]
        for title, shift in zip(bars, shifts, strict=False):
            halves = [results[title][name] for name in names]
            _bars(panel, title, halves, shift, 0.84 / slots, looks[title].fill())
        for own in others:
            points = {place + shifts[-1]: own[name][2] for place, name in enumerate(names)}
            style.draw_curve(panel, points, OTHER, "", linestyle="none", markersize=4)
        if AVERAGE in names:
            at = names.index(AVERAGE)
            panel.axvspan(at - 0.5, at + 0.5, color=style.GRID, alpha=0.55, zorder=0, linewidth=0)
        ticks = [display_name(name) + style.dagger(own[name][2] for own in results.values()) for name in names]
        panel.set_xticks(range(len(names)), ticks)
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(-0.5, across - 0.5)
        panel.set_ylim(0, 100)
        style.grid(panel, "y")
    cells = [own[name][2] for own in results.values() for name in groups]
    style.heading(figure, f"Harmonic mean of base and novel accuracy ({style.describe_seeds(cells)})", cells)
    style.legend(figure)
    return figure


def _bars(axes: Axes, title: str, rows: Sequence[Halves], shift: float, width: float, fill: Mapping[str, Any]) -> None:
    """Draw one method's bars, a bar per data set."""
    whole = [cells if all(cells) else (None, None, None) for cells in rows]
    base, novel, hm = ([cell.mean if cell else math.nan for cell in cells] for cells in zip(*whole, strict=True))
    std = [cell.std if cell and cell.std is not None else math.nan for _, _, cell in whole]
    places = [at + shift for at in range(len(rows))]
    axes.bar(places, hm, 0.9 * width, zorder=2, label=title, **fill)
    axes.vlines(places, base, novel, color=style.INK, linewidth=0.6, zorder=3)
    # Points at 0 and 100 would be cut off at the edge.
    points: dict[str, Any] = {"s": 13, "zorder": 4, "clip_on": False, "edgecolor": style.INK}
    axes.scatter(places, base, marker="^", facecolor=style.INK, linewidths=0, label="base", **points)
    axes.scatter(places, novel, marker="v", facecolor="white", linewidths=0.7, label="novel", **points)
    if not all(map(math.isnan, std)):
        beside = [place + 0.3 * width for place in places]
        axes.errorbar(beside, hm, std, fmt="none", ecolor=style.INK, capsize=1.2, elinewidth=0.6, zorder=3)
    for place, (_, _, cell) in zip(places, whole, strict=True):
        if cell is None:
            axes.text(place, 2, "–", ha="center", va="bottom", fontsize=7, color=style.FAINT)
            continue
        number = f"{cell.mean:.0f}{style.dagger([cell]).strip()}"
        text = axes.text(place, 2, number, ha="center", va="bottom", fontsize=7)
        colour = fill["facecolor"]
        text.set(color=style.contrasting_ink(colour), bbox={"facecolor": colour, "linewidth": 0, "pad": 0.6}, zorder=5)


@styled
def hm_radar(suite: SuiteResults) -> Figure | None:
    """Draw HM of every method on an axis per data set, with gaps where it is missing; None below three data sets."""
    hms = {
        title: {name: suite.halves(variant, name)[2] for name in suite.options.datasets}
        for title, variant in suite.by_title.items()
    }
    datasets = [name for name in suite.options.datasets if any(own[name] for own in hms.values())]
    if len(datasets) < 3:
        return None
    looks = _assign_looks(suite)
    figure, (panel,) = style.panels(1, 3.8, subplot_kw={"projection": "polar"})
    figure.set_figwidth(4.9)
    axes: Any = panel
    angles = [2 * math.pi * i / len(datasets) for i in range(len(datasets))]
    for title, own in hms.items():
        values = [cell.mean if (cell := own[name]) else math.nan for name in datasets]
        if not all(map(math.isnan, values)):
            axes.plot([*angles, 0], [*values, values[0]], **looks[title].line(label=title, markersize=4))
    cells = [cell for own in hms.values() for cell in own.values() if cell]
    means = [cell.mean for cell in cells]
    low = max(0, 10 * math.floor(min(means) / 10 - 1))
    high = max(low + 10, 10 * math.ceil(max(means) / 10))
    step = 10 if low >= 40 else 20
    axes.set_ylim(low, high)
    axes.set_yticks(range(low + step, high + 1, step))
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, [display_name(name) + style.dagger(own[name] for own in hms.values()) for name in datasets])
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
def learning_curves(suite: SuiteResults) -> Figure | None:
    """Plot cross-entropy per epoch on the training images: a panel per data set, a line per method, seeds averaged."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    losses: dict[str, dict[str, list[Sequence[float]]]] = {}
    for title, variant in suite.by_title.items():
        for run in suite.rows(variant).drop_duplicates("path").itertuples():
            if run.losses:
                losses.setdefault(str(run.dataset), {}).setdefault(title, []).append(run.losses)
    if not losses:
        return None
    looks = _assign_looks(suite)
    figure, axes = style.panels(len(losses), 1.5 if len(losses) > 1 else 1.9, "epoch", "cross-entropy")
    for panel, name in zip(axes, sorted(losses, key=dataset_order), strict=True):
        for title, every in losses[name].items():
            shortest = min(map(len, every))
            runs = np.array([run[:shortest] for run in every])
            epochs = np.arange(1, shortest + 1)
            markers = {"markersize": 3.5, "markevery": max(1, shortest // 3)}
            panel.plot(epochs, runs.mean(0), **looks[title].line(label=title, **markers))
            if looks[title] is not OTHER:
                panel.fill_between(epochs, runs.min(0), runs.max(0), color=looks[title].colour, alpha=0.18, linewidth=0)
        panel.set_title(display_name(name))
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        style.grid(panel, "y")
    most = max(len(runs) for own in losses.values() for runs in own.values())
    seeds = f"mean of up to {most} seeds, band from lowest to highest" if most > 1 else "one seed"
    style.heading(figure, f"Cross-entropy on the training images ({seeds})")
    style.legend(figure)
    return figure


@styled
def accuracy_speed(suite: SuiteResults) -> Figure | None:
    """Plot average HM of the data sets against the mean of evaluated images per second; methods need results of all."""
    points: dict[str, tuple[float, Metric]] = {}
    for title, variant in suite.by_title.items():
        hm, rate = suite.halves(variant, AVERAGE)[2], mean_speeds(suite, variant)[0]
        if hm and rate:
            points[title] = rate.mean, hm
    if not points:
        return None
    looks = _assign_looks(suite)
    cells = [hm for _, hm in points.values()]
    x, y = "evaluated images per second, decoding included", f"harmonic mean, %{style.dagger(cells)}"
    # The legend is below the axes, an entry in a row where titles are long.
    figure, (axes,) = style.panels(1, 1.8 + 0.15 * min(len(points), style.MOST), x, y)
    for title, (speed, hm) in points.items():
        look = looks[title]
        point = {"linestyle": "none", "markersize": 7, "markeredgecolor": "white", "clip_on": False, "zorder": 3}
        axes.plot(speed, hm.mean, **look.line(label=title, **point))
        if look is OTHER:
            axes.annotate(title, (speed, hm.mean), (3, 0), textcoords="offset points", fontsize=5, color=style.FAINT)
        elif hm.std is not None:
            axes.errorbar(speed, hm.mean, hm.std, fmt="none", ecolor=look.colour, elinewidth=0.9)
    axes.margins(0.15)
    axes.set_xlim(0, 1.12 * max(speed for speed, _ in points.values()))
    several = len(suite.options.datasets) > 1
    over = f"average of {len(suite.options.datasets)} data sets" if several else display_name(suite.options.datasets[0])
    style.heading(figure, f"Accuracy against speed, {over}\n({style.describe_seeds(cells)})", cells)
    style.grid(axes, "both")
    style.legend(figure)
    return figure
