"""Plot base-to-novel results: harmonic means as bars and as a radar, training curves, accuracy against speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import (
    COLUMN,
    FAINT,
    GRID,
    INK,
    PAGE,
    Look,
    Plots,
    assign_looks,
    canvas,
    dagger,
    describe_seeds,
    grid,
    heading,
    ink_on,
    legend,
    panels,
    styled,
)
from benchmarks.results.frame import dataset_order, images_per_second, losses_by_dataset
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.rows import has_controls, variants_by_title, why_incomparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS_IN_ROW = 27
"""Largest number of bars that still have room for their numbers."""


RADAR = ("coop", "cocoop", "maple", "procap")
"""The methods of the paper's figure 1b."""


@dataclass(frozen=True)
class Series:
    """One method in a plot. Its mappings are by data set, including `AVERAGE` if all data sets have results.

    speeds: images per second, decoding included. losses: cross-entropy of each epoch, a list per run. published: the
    numbers are the paper's.
    """

    title: str
    method: str
    halves: Mapping[str, Halves]
    speeds: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    published: bool = False

    def hm(self, dataset: str) -> Metric | None:
        return self.halves.get(dataset, (None, None, None))[2]


def halves_plots(suite: SuiteResults) -> Plots:
    """Return the plots of base-to-novel.

    The radar shows published values of the paper's methods that did not run, if they are comparable with ours.
    """
    series = list_series(suite)
    absent = [method for method in RADAR if method not in {one.method for one in series}]
    comparable = not why_incomparable(suite) and not has_controls(suite)
    beside = _paper_series(suite.datasets, absent) if comparable else []
    return {
        "hm-bars": partial(hm_bars, series),
        "hm-radar": partial(hm_radar, series, beside),
        "learning-curves": partial(learning_curves, series),
        "accuracy-speed": partial(accuracy_speed, series),
    }


def list_series(suite: SuiteResults) -> list[Series]:
    found = []
    for title, variant in variants_by_title(suite).items():
        halves = {name: suite.halves(variant, name) for name in suite.datasets}
        rows = suite.rows(variant)
        timed = {str(name): own for name, own in rows.groupby("dataset") if own.fps.notna().all()}
        speeds = {name: rate for name, own in timed.items() if (rate := images_per_second(own))}
        if len(suite.datasets) > 1:
            halves[AVERAGE] = suite.average_halves(variant)
            if len(speeds) == len(suite.datasets):
                speeds[AVERAGE] = sum(speeds.values()) / len(speeds)
        found.append(Series(title, variant.method, halves, speeds, losses_by_dataset(rows)))
    return found


def _paper_series(datasets: Iterable[str], methods: Iterable[str]) -> list[Series]:
    """Collect what the paper prints of our methods on these data sets."""
    found = []
    for method in methods:
        lines = {name: line for name in datasets if (line := published.halves(method, name))}
        halves = {name: (Metric(line.base), Metric(line.novel), Metric(line.hm)) for name, line in lines.items()}
        if lines:
            title = next(iter(lines.values())).method
            found.append(Series(f"{title} (published)", method, halves, published=True))
    return found


@styled
def hm_bars(series: Sequence[Series]) -> Figure | None:
    """Draw bars of HM for every method on every data set and the average; triangles show base and novel."""
    from matplotlib.patches import Patch

    shown = [one for one in series if any(one.hm(name) for name in one.halves)]
    groups = [name for name in _datasets(shown) if any(one.hm(name) for one in shown)]
    if not shown:
        return None
    looks = _looks(shown)
    rows = math.ceil(len(groups) * len(shown) / BARS_IN_ROW)
    across = math.ceil(len(groups) / rows)
    rows = math.ceil(len(groups) / across)
    figure, axes = panels(rows, 2.1, "", "accuracy, %", across=1)
    figure.set_figwidth(max(COLUMN, min(PAGE, 0.9 + 0.34 * across * len(shown))))
    for number, panel in enumerate(axes):
        here = groups[number * across : (number + 1) * across]
        _bar_row(panel, here, across, shown, looks)
    cells = [one.hm(name) for one in shown for name in groups]
    heading(figure, f"Harmonic mean of base and novel accuracy ({describe_seeds(cells)})", cells)
    handles: list[Any] = [Patch(**looks[one.title].fill(label=one.title)) for one in shown]
    handles.append(axes[0].scatter([], [], marker="^", s=13, color=INK, linewidths=0, label="base"))
    handles.append(
        axes[0].scatter([], [], marker="v", s=13, facecolor="white", edgecolor=INK, linewidths=0.7, label="novel")
    )
    legend(figure, handles)
    return figure


def _bar_row(axes: Axes, groups: Sequence[str], across: int, series: Sequence[Series], looks: dict[str, Look]) -> None:
    from matplotlib.colors import to_rgb

    width = 0.84 / len(series)
    for at, name in enumerate(groups):
        if name == AVERAGE:
            axes.axvspan(at - 0.5, at + 0.5, color=GRID, alpha=0.55, zorder=0, linewidth=0)
        for place, one in enumerate(series):
            base, novel, hm = one.halves.get(name, (None, None, None))
            x = at + (place - (len(series) - 1) / 2) * width
            if base is None or novel is None or hm is None:
                axes.text(x, 2, "–", ha="center", va="bottom", fontsize=7, color=FAINT)
                continue
            colour = looks[one.title].colour
            axes.bar(x, hm.mean, 0.9 * width, zorder=2, **looks[one.title].fill())
            axes.plot([x, x], [base.mean, novel.mean], color=INK, linewidth=0.6, zorder=3)
            whole: dict[str, Any] = {"s": 13, "zorder": 4, "clip_on": False}
            axes.scatter(x, base.mean, marker="^", color=INK, linewidths=0, **whole)
            axes.scatter(x, novel.mean, marker="v", facecolor="white", edgecolor=INK, linewidths=0.7, **whole)
            if hm.std is not None:
                axes.errorbar(x + 0.3 * width, hm.mean, hm.std, color=INK, capsize=1.2, linewidth=0.6, zorder=3)
            text = axes.text(x, 2, f"{hm.mean:.0f}{'†' * hm.limited}", ha="center", va="bottom", fontsize=7, zorder=5)
            text.set(color=ink_on(*to_rgb(colour)), bbox={"facecolor": colour, "linewidth": 0, "pad": 0.6})
    cells = {name: [one.hm(name) for one in series] for name in groups}
    axes.set_xticks(range(len(groups)), [display_name(name) + dagger(cells[name]) for name in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, across - 0.5)
    axes.set_ylim(0, 100)
    grid(axes, "y")


@styled
def hm_radar(series: Sequence[Series], beside: Sequence[Series] = ()) -> Figure | None:
    """Draw HM of every method on an axis per data set, `beside` (published) hollow; None for under three data sets.

    The line of a method has a gap at data sets without HM.
    """
    from matplotlib.figure import Figure

    shown = [*(one for one in series if any(map(one.hm, one.halves))), *beside]
    datasets = [name for name in _datasets(series) if name != AVERAGE and any(e.hm(name) for e in series)]
    if len(datasets) < 3:
        return None
    figure = Figure(figsize=(4.9, 4.4), layout="constrained")
    axes: Any = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / len(datasets) for i in range(len(datasets))]
    looks = _looks(shown)
    cells = {(one.title, name): one.hm(name) for one in shown for name in datasets}
    means = {key: cell.mean for key, cell in cells.items() if cell}
    for one in shown:
        values = [means.get((one.title, name), math.nan) for name in datasets]
        look = looks[one.title]
        faint = {"markerfacecolor": "white", "linewidth": 0.9} if one.published else {"linewidth": 1.6}
        axes.plot([*angles, 0], [*values, values[0]], label=one.title, **look.line(markersize=4, **faint))
    low = max(0, 10 * math.floor(min(means.values()) / 10 - 1))
    step = 10 if low >= 40 else 20
    axes.set_ylim(low, min(100, max(low + 10, 10 * math.ceil(max(means.values()) / 10))))
    ticks = [tick for tick in range(step * (low // step + 1), 101, step) if tick <= axes.get_ylim()[1]]
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    names = [display_name(name) + dagger(cells[one.title, name] for one in shown) for name in datasets]
    axes.set_xticks(angles, names, color=INK)
    axes.set_yticks(ticks)
    axes.set_rlabel_position(180 / len(datasets))
    axes.tick_params(axis="y", labelsize=6.5, labelcolor=FAINT)
    axes.tick_params(axis="x", pad=2, labelsize=8)
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    for label in axes.get_yticklabels():
        label.set_bbox({"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.8})
    axes.grid(color="#d1d5db", linewidth=0.6)
    axes.spines["polar"].set_color("#d1d5db")
    seeds = describe_seeds([one.hm(name) for one in series for name in datasets], std=False)
    heading(figure, f"Harmonic mean in % ({seeds}; the centre is {low})", cells.values())
    legend(figure, axes.get_legend_handles_labels()[0])
    return figure


@styled
def learning_curves(series: Sequence[Series]) -> Figure | None:
    """Plot cross-entropy per epoch on the training images: a panel per data set, a line per method, seeds averaged."""
    from matplotlib.ticker import LogFormatter, MaxNLocator

    shown = [one for one in series if one.losses]
    datasets = sorted({name for one in shown for name in one.losses}, key=dataset_order)
    if not datasets:
        return None
    looks = _looks(series)
    figure, axes = panels(len(datasets), 1.5 if len(datasets) > 1 else 1.9, "epoch", "cross-entropy")
    counts = [len(runs) for one in shown for runs in one.losses.values()]
    lengths = [len(losses) for one in shown for runs in one.losses.values() for losses in runs]
    for panel, name in zip(axes, datasets, strict=True):
        for one in shown:
            runs = one.losses.get(name)
            if not runs:
                continue
            columns = list(zip(*runs, strict=False))
            epochs = range(1, len(columns) + 1)
            mean = [sum(column) / len(column) for column in columns]
            places = [0, *(len(mean) * (part + 1) // 3 - 1 for part in range(3))]
            look = looks[one.title].line(markersize=3.5, markevery=sorted(set(places)))
            panel.plot(epochs, mean, label=one.title, **look)
            if len(runs) > 1:
                low, high = list(map(min, columns)), list(map(max, columns))
                panel.fill_between(epochs, low, high, color=looks[one.title].colour, alpha=0.18, linewidth=0)
        panel.set_title(display_name(name), loc="left")
        panel.set_ylim(0, 1.08 * panel.dataLim.ymax)
        panel.yaxis.set_major_locator(MaxNLocator(4))
        if max(lengths) > 4 * min(lengths):
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(LogFormatter())
        if panel.dataLim.xmax == 1:
            # For a single point matplotlib's locators would label fractions of an epoch.
            panel.set_xticks([1])
            panel.minorticks_off()
        elif max(lengths) <= 4 * min(lengths):
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        grid(panel, "y")
    many = str(max(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    several = f" (mean of {many} seeds, band from lowest to highest)" if max(counts) > 1 else " (one seed)"
    heading(figure, f"Cross-entropy on the training images{several}")
    legend(figure, _handles(shown, looks))
    return figure


@styled
def accuracy_speed(series: Sequence[Series]) -> Figure | None:
    """Plot HM against evaluated images per second: the average if there is one, else every data set."""

    def points_of(one: Series, names: Iterable[str]) -> list[tuple[Series, str, Metric, float]]:
        found = [(name, one.hm(name), one.speeds.get(name)) for name in names]
        return [(one, name, hm, rate) for name, hm, rate in found if hm and rate]

    points = [point for one in series for point in points_of(one, [AVERAGE])]
    averaged = bool(points)
    points = points or [point for one in series for point in points_of(one, one.halves)]
    if not points:
        return None
    from matplotlib.ticker import LogLocator

    looks = _looks(series)
    figure, axes = canvas(COLUMN, 2.8)
    for one, name, hm, rate in points:
        look = looks[one.title]
        axes.errorbar(
            rate,
            hm.mean,
            hm.std,
            color=look.colour,
            marker=look.marker,
            markersize=7,
            markeredgecolor="white",
            elinewidth=0.9,
            zorder=3,
            # Points at 0 and 100 would be cut off at the edge.
            clip_on=False,
        )
        if not averaged and len({point[1] for point in points}) > 1:
            axes.annotate(
                display_name(name), (rate, hm.mean), (5, 0), textcoords="offset points", fontsize=6, va="center"
            )
    rates, heights = [point[3] for point in points], [point[2].mean for point in points]
    if max(rates) > 10 * min(rates):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlim(min(rates) / 1.3, 1.3 * max(rates))
    else:
        axes.set_xlim(0, 1.12 * max(rates))
    margin = max(2.0, 0.25 * (max(heights) - min(heights)))
    axes.set_ylim(max(0, min(heights) - margin), min(100, max(heights) + margin))
    axes.set_xlabel("evaluated images per second, decoding included")
    cells = [hm for _, _, hm, _ in points]
    axes.set_ylabel(f"harmonic mean, %{dagger(cells)}")
    names = list(dict.fromkeys(point[1] for point in points))
    sets = len(_datasets(series)) - averaged
    over = f"average of {sets} data sets" if averaged else display_name(names[0]) if len(names) == 1 else "by data set"
    heading(figure, f"Accuracy against speed, {over}\n({describe_seeds(cells)})", cells)
    grid(axes, "both")
    legend(figure, _handles([one for one in series if any(p[0] is one for p in points)], looks, line=False))
    return figure


def _looks(series: Iterable[Series]) -> dict[str, Look]:
    return assign_looks({one.title: one.method for one in series})


def _handles(series: Iterable[Series], looks: dict[str, Look], *, line: bool = True) -> list[Any]:
    from matplotlib.lines import Line2D

    keep: dict[str, Any] = {} if line else {"linestyle": "none", "markersize": 6}
    return [Line2D([], [], **{**looks[one.title].line(label=one.title), **keep}) for one in series]


def _datasets(series: Iterable[Series]) -> list[str]:
    """Return the data sets in order, the average last."""
    found = dict.fromkeys(name for one in series for name in one.halves)
    return [name for name in found if name != AVERAGE] + [AVERAGE] * (AVERAGE in found)
