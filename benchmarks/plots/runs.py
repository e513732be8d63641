"""Plot results of any runs: accuracies as bars and against the cost of a training, scores of unknown images."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.experiment.published import title_target
from benchmarks.plots import style
from benchmarks.plots.style import Look, Plots
from benchmarks.results.detection import score_rule

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

COSTS = {"train_seconds": "training seconds", "parameters": "learned parameters"}
MOST_BARS = 40
MAX_PANELS, BINS, TITLE = 8, 40, 24
"""Panels of histograms of scores, their bins, and letters of a title that fit above a panel."""


def cost_plots(frame: pd.DataFrame) -> Plots:
    """Return the plots of results; see `average_results`."""
    means = average_results(frame)
    return {"accuracy-bars": partial(accuracy_bars, means), "cost": partial(accuracy_against_cost, means)}


def average_results(frame: pd.DataFrame) -> pd.DataFrame:
    """Average results by their column `title`: method, accuracy, measure, train_seconds, parameters.

    The best accuracy is first. It is that on test images of the own data set, after all classes on all of them, after
    base classes the harmonic mean of base and novel if any title has one; where there are none, that on the images
    which were evaluated. Titles without results on all data sets are left out.
    """
    if frame.empty:
        return frame
    is_own = (frame.target_dataset == frame.dataset) & ((frame.classes != "all") | (frame.target_classes == "all"))
    tests = frame[(frame.split == "test") & is_own & ~frame.limited]
    tests = tests if len(tests) else frame
    # Also of halves of the base classes, on which `procap sweep --metric held-out` validates.
    halves = tests.target_classes.str.removeprefix("dev-")
    pivot = partial(tests.assign(half=halves).pivot_table, index=["title", "dataset"], columns="half")
    by_classes, seeds = pivot(values="accuracy"), pivot(values="seed", aggfunc=lambda values: tuple(sorted(values)))
    validation = "" if (tests.split == "test").any() else "validation "
    accuracy, measure = by_classes.mean(axis="columns"), f"mean over data sets and seeds of {validation}accuracy"
    if {"base", "novel"} <= {*by_classes}:
        harmonic = 2 * by_classes["base"] * by_classes["novel"] / (by_classes["base"] + by_classes["novel"])
        measure += ", after base classes of the harmonic mean of base and novel"
        # An accuracy of base classes alone, or of other seeds than that of novel ones, is not compared with these.
        harmonic = harmonic.where(seeds["base"] == seeds["novel"])
        accuracy = harmonic.fillna(accuracy.where(by_classes["base"].isna()))
    by_dataset = accuracy.unstack("dataset").dropna()
    # A run has a row for each target, also under several titles, of settings of the evaluation; data sets count alike,
    # however many seeds they have.
    runs = tests.drop_duplicates(["title", "path"])
    costs = runs.groupby(["title", "dataset"])[[*COSTS]].mean().groupby("title").mean()
    means = costs.loc[by_dataset.index].assign(
        method=tests.groupby("title").method.first(), accuracy=by_dataset.mean(axis="columns"), measure=measure
    )
    return means.sort_values("accuracy")[::-1]


def _looks(means: pd.DataFrame) -> dict[str, Look]:
    return style.highlight(style.assign_looks(means.method.to_dict()), means.accuracy.to_dict())


def accuracy_bars(means: pd.DataFrame) -> Figure | None:
    """Draw the accuracy of each title as a bar, the best on top; None for a single title."""
    if len(means) < 2:
        return None
    shown = means.head(MOST_BARS)
    looks = _looks(means)
    figure, (axes,) = style.panels(1, 0.2 * len(shown) + 0.3, "accuracy, %")
    figure.set_figwidth(style.PAGE)
    axes.barh(range(len(shown)), shown.accuracy, color=[looks[title].colour for title in shown.index], zorder=2)
    for row, accuracy in enumerate(shown.accuracy):
        axes.annotate(f"{accuracy:.1f}", (accuracy, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(shown)), list(shown.index))
    axes.set(xlim=(0, 100), ylim=(len(shown) - 0.5, -0.5))
    style.grid(axes, "x")
    style.heading(figure, means.measure.iloc[0].capitalize())
    return figure


def accuracy_against_cost(means: pd.DataFrame) -> Figure | None:
    """Draw accuracy against training seconds and against learned parameters; None below two trained titles.

    Titles without training are a horizontal line.
    """
    from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator

    trained = means[means.train_seconds.notna()] if len(means) else means
    if len(trained) < 2:
        return None
    looks, thousands = _looks(means), EngFormatter(sep="")
    figure, panels = style.panels(len(COSTS), 2.6, y="accuracy, %", sharey=True)
    for axes, (cost, label) in zip(panels, COSTS.items(), strict=True):
        for title, row in means.iterrows():
            look = looks[str(title)]
            if title in trained.index and row[cost] > 0:
                axes.plot(row[cost], row.accuracy, **look.line(label=title, linestyle="none", markersize=6))
            elif title not in trained.index:
                axes.axhline(row.accuracy, **look.line(label=title, marker="", linewidth=1))
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        # Neither draws two ticks in every range: over four decades LogLocator leaves out all ticks of subdivided ones.
        subdivided = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
        axes.xaxis.set_major_locator(subdivided if high > 3 * low else AutoLocator())
        axes.xaxis.set_major_formatter(lambda cost, _: thousands(cost) if cost >= 1 else f"{cost:g}")
        axes.minorticks_off()
        axes.set_xlabel(label)
        style.grid(axes, "both")
    style.heading(figure, f"{means.measure.iloc[0].capitalize()},\nagainst the cost of a training")
    style.legend(figure)
    return figure


def score_histograms(frame: pd.DataFrame) -> Figure | None:
    """Draw a panel for each of MAX_PANELS titles and known sets, with a line for each set; None without scores."""
    scored = frame[frame.unknown.astype(bool)]
    if scored.empty:
        return None
    groups = [*scored.groupby(["target", "title"], sort=False)][:MAX_PANELS]
    figure, axes = style.panels(len(groups), 1.6, "score", "share of images")
    for panel, ((known, title), rows) in zip(axes, groups, strict=True):
        # All detections of a seed have the same known images.
        pooled = {"known": [score for seed in rows.unknown for score in next(iter(seed.values())).known.scores]}
        for target, detection in (item for seed in rows.unknown for item in seed.items()):
            pooled.setdefault(title_target(target), []).extend(detection.unknown.scores)
        edges = np.histogram_bin_edges(np.concatenate([*pooled.values()]), BINS)
        for number, (name, values) in enumerate(pooled.items()):
            # The known images are a grey area behind the lines of the others.
            look = {"color": style.make_look(number - 1).colour} if number else {"color": style.GREY, "fill": True}
            panel.stairs(np.histogram(values, edges)[0] / len(values), edges, label=name, **look)
        panel.set_title(textwrap.fill(f"{title} ({score_rule(rows)}), {known.removesuffix(':test')}", TITLE))
        style.grid(panel, "y")
    style.heading(figure, "Scores of known and unknown images")
    style.legend(figure)
    return figure
