"""Plot base-to-novel results: harmonic means as bars and as a radar, training curves, accuracy against speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots import style
from benchmarks.plots.style import Plots, styled
from benchmarks.results.frame import dataset_order
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.base_novel import mean_speeds
from benchmarks.tables.rows import has_controls, variants_by_title, why_incomparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS_IN_ROW = 27
"""Largest number of bars that still have room for their numbers."""

RADAR = ("coop", "cocoop", "maple", "procap")
"""The methods of the paper's figure 1b."""


def halves_plots(suite: SuiteResults) -> Plots:
    """Return the plots of base-to-novel."""
    return {
        "hm-bars": partial(hm_bars, suite),
        "hm-radar": partial(hm_radar, suite),
        "learning-curves": partial(learning_curves, suite),
        "accuracy-speed": partial(accuracy_speed, suite),
    }


def _halves_by_title(suite: SuiteResults) -> dict[str, dict[str, Halves]]:
    """Return the results of every variant by data set, the average of several data sets last."""
    names = [*suite.options.datasets, *([AVERAGE] if len(suite.options.datasets) > 1 else [])]
    return {
        title: {name: suite.halves(variant, name) for name in names}
        for title, variant in variants_by_title(suite).items()
    }


def _methods(suite: SuiteResults) -> dict[str, str]:
    return {title: variant.method for title, variant in variants_by_title(suite).items()}


@styled
def hm_bars(suite: SuiteResults) -> Figure | None:
    """Draw bars of HM for every method on every data set and the average; triangles show base and novel."""
    results = {title: own for title, own in _halves_by_title(suite).items() if any(hm for _, _, hm in own.values())}
    if not results:
        return None
    groups = [name for name in next(iter(results.values())) if any(own[name][2] for own in results.values())]
    looks = style.assign_looks(_methods(suite))
    rows = math.ceil(len(groups) * len(results) / BARS_IN_ROW)
    across = math.ceil(len(groups) / rows)
    figure, axes = style.panels(math.ceil(len(groups) / across), 2.1, "", "accuracy, %", across=1)
    figure.set_figwidth(max(style.COLUMN, min(style.PAGE, 0.9 + 0.34 * across * len(results))))
    for number, panel in enumerate(axes):
        names = groups[number * across : (number + 1) * across]
        cells = {name: [own[name][2] for own in results.values()] for name in names}
        for place, (title, own) in enumerate(results.items()):
            shift = (place - (len(results) - 1) / 2) * 0.84 / len(results)
            _bars(panel, title, [own[name] for name in names], shift, 0.84 / len(results), looks[title].fill())
        if AVERAGE in names:
            at = names.index(AVERAGE)
            panel.axvspan(at - 0.5, at + 0.5, color=style.GRID, alpha=0.55, zorder=0, linewidth=0)
        panel.set_xticks(range(len(names)), [display_name(name) + style.dagger(cells[name]) for name in names])
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(-0.5, across - 0.5)
        panel.set_ylim(0, 100)
        style.grid(panel, "y")
    every = [own[name][2] for own in results.values() for name in groups]
    style.heading(figure, f"Harmonic mean of base and novel accuracy ({style.describe_seeds(every)})", every)
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
    """Draw HM of every method on an axis per data set; None for under three data sets.

    The line of a method has a gap at data sets without HM. Published values of the paper's methods that did not run are
    drawn hollow, if they are comparable with ours.
    """
    from matplotlib.figure import Figure

    results = {
        title: {name: own[name][2] for name in suite.options.datasets} for title, own in _halves_by_title(suite).items()
    }
    results = {title: own for title, own in results.items() if any(own.values())}
    datasets = [name for name in suite.options.datasets if any(own[name] for own in results.values())]
    if len(datasets) < 3:
        return None
    methods = _methods(suite)
    seeds = style.describe_seeds([cell for own in results.values() for cell in own.values()], std=False)
    paper = {}
    for method in () if why_incomparable(suite) or has_controls(suite) else RADAR:
        lines = {name: line for name in datasets if (line := published.halves(method, name))}
        if lines and method not in methods.values():
            title = f"{next(iter(lines.values())).method} (published)"
            paper[title] = method
            results[title] = {name: Metric(line.hm) for name, line in lines.items()}
    looks = style.assign_looks(methods | paper)

    figure = Figure(figsize=(4.9, 4.4), layout="constrained")
    axes: Any = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / len(datasets) for i in range(len(datasets))]
    for title, own in results.items():
        cells = [own.get(name) for name in datasets]
        values = [cell.mean if cell else math.nan for cell in cells]
        hollow = {"markerfacecolor": "white", "linewidth": 0.9} if title in paper else {}
        axes.plot([*angles, 0], [*values, values[0]], label=title, **looks[title].line(markersize=4, **hollow))
    every = [cell for own in results.values() for cell in own.values()]
    means = [cell.mean for cell in every if cell]
    low = max(0, 10 * math.floor(min(means) / 10 - 1))
    high = max(low + 10, 10 * math.ceil(max(means) / 10))
    step = 10 if low >= 40 else 20
    axes.set_ylim(low, high)
    axes.set_yticks(range(low + step, high + 1, step))
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    axes.set_xticks(
        angles, [display_name(name) + style.dagger(own.get(name) for own in results.values()) for name in datasets]
    )
    axes.set_rlabel_position(180 / len(datasets))
    axes.tick_params(axis="y", labelsize=6.5, labelcolor=style.FAINT)
    axes.tick_params(axis="x", pad=2, labelsize=8)
    # Centred labels would overlap the circle.
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    axes.grid(color="#d1d5db", linewidth=0.6)
    axes.spines["polar"].set_color("#d1d5db")
    style.heading(figure, f"Harmonic mean in % ({seeds}; the centre is {low})", every)
    style.legend(figure)
    return figure


@styled
def learning_curves(suite: SuiteResults) -> Figure | None:
    """Plot cross-entropy per epoch on the training images: a panel per data set, a line per method, seeds averaged."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    methods = _methods(suite)
    losses: dict[str, dict[str, list[Sequence[float]]]] = {title: {} for title in methods}
    for title, variant in variants_by_title(suite).items():
        for run in suite.rows(variant).drop_duplicates("path").itertuples():
            if run.losses:
                losses[title].setdefault(str(run.dataset), []).append(run.losses)
    datasets = sorted({name for own in losses.values() for name in own}, key=dataset_order)
    if not datasets:
        return None
    looks = style.assign_looks(methods)
    figure, axes = style.panels(len(datasets), 1.5 if len(datasets) > 1 else 1.9, "epoch", "cross-entropy")
    for panel, name in zip(axes, datasets, strict=True):
        for title, own in losses.items():
            if name not in own:
                continue
            shortest = min(map(len, own[name]))
            runs = np.array([run[:shortest] for run in own[name]])
            epochs = np.arange(1, shortest + 1)
            every = max(1, shortest // 3)
            panel.plot(epochs, runs.mean(0), label=title, **looks[title].line(markersize=3.5, markevery=every))
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
    from matplotlib.figure import Figure

    name = AVERAGE if len(suite.options.datasets) > 1 else suite.options.datasets[0]
    points: dict[str, tuple[float, Metric]] = {}
    for title, variant in variants_by_title(suite).items():
        hm, rate = suite.halves(variant, name)[2], mean_speeds(suite, variant)[0]
        if hm and rate:
            points[title] = rate.mean, hm
    if not points:
        return None
    looks = style.assign_looks(_methods(suite))
    figure = Figure(figsize=(style.COLUMN, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for title, (speed, hm) in points.items():
        point = looks[title].line(linestyle="none", markersize=7, markeredgecolor="white")
        axes.plot(speed, hm.mean, label=title, clip_on=False, zorder=3, **point)
        if hm.std is not None:
            axes.errorbar(speed, hm.mean, hm.std, fmt="none", ecolor=looks[title].colour, elinewidth=0.9)
    rates = [speed for speed, _ in points.values()]
    axes.margins(0.15)
    axes.set_xlim(0, 1.12 * max(rates))
    cells = [hm for _, hm in points.values()]
    axes.set_xlabel("evaluated images per second, decoding included")
    axes.set_ylabel(f"harmonic mean, %{style.dagger(cells)}")
    over = f"average of {len(suite.options.datasets)} data sets" if name == AVERAGE else display_name(name)
    style.heading(figure, f"Accuracy against speed, {over}\n({style.describe_seeds(cells)})", cells)
    style.grid(axes, "both")
    style.legend(figure)
    return figure
