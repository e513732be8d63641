"""Plot accuracy over numbers that a suite varies: shots, prompt tokens, epochs, loss weights, temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.experiment.published import AVERAGE, display_name
from benchmarks.experiment.suite import Variant
from benchmarks.plots import style
from benchmarks.plots.style import Look, Plots
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.grid import paper_weights, sensitivity_variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def shots_plots(suite: SuiteResults) -> Plots:
    """Return the curves of the suite few-shot."""
    return {"few-shot": partial(few_shot_curves, suite)}


def few_shot_curves(suite: SuiteResults) -> Figure | None:
    """Plot a line per method, a panel for the average and one per data set; untrained methods are horizontal."""
    # By title, then by number of shots, 0 for a method that trains nothing.
    lines = {
        title: {float(variant.key.get("shots", 0)): variant for variant in variants}
        for title, variants in suite.group_by_title("shots").items()
    }
    ticks = sorted({shots for variants in lines.values() for shots in variants if shots})
    names = [*([AVERAGE] if len(suite.options.datasets) > 1 else []), *suite.options.datasets]
    cells = {
        (name, title, shots): suite.on_classes(variant, name)
        for name in names
        for title, variants in lines.items()
        for shots, variant in variants.items()
    }
    if not any(cell for (_, _, shots), cell in cells.items() if shots):
        return None
    drawn = {title: [cell.mean for key, cell in cells.items() if key[1] == title and cell] for title in lines}
    heights = {title: fmean(means) for title, means in drawn.items() if means}
    looks = style.look_at_suite(suite, heights, "shots")
    figure, axes = style.panels(len(names), 1.6 if len(names) > 1 else 2.1, "shots per class", "accuracy, %")
    for panel, name in zip(axes, names, strict=True):
        for title, variants in lines.items():
            # 0 shots have no place on the axis, which is logarithmic.
            if level := cells.get((name, title, 0)):
                panel.axhline(level.mean, **looks[title].line(label=title, marker="", linewidth=1.2))
            if points := {shots: cells[name, title, shots] for shots in sorted(variants) if shots}:
                style.draw_curve(panel, points, looks[title], title, markersize=4)
        style.set_ticks(panel, ticks, base=2)
        panel.set_title(display_name(name), fontweight="bold" if name == AVERAGE else "normal")
        style.grid(panel, "y")
    seeds = style.describe_cells(suite, cells.values())
    style.heading(figure, f"Accuracy on all classes by number of shots ({seeds})", cells.values())
    style.legend(figure)
    return figure


def prompt_length_plots(suite: SuiteResults) -> Plots:
    """Return a plot for each method, as in the paper: averages on the left, HM on the right, here of each data set."""
    variants: dict[str, dict[float, Variant]] = {}
    for variant in suite.variants:
        # A method without tokens has no curve.
        if tokens := variant.key.get("n_ctx"):
            variants.setdefault(variant.method, {})[tokens] = variant
    plots = {}
    for method, by_tokens in variants.items():
        name = f"prompt-length-{method}" if len(variants) > 1 else "prompt-length"
        plots[name] = partial(average_and_datasets, suite, dict(sorted(by_tokens.items())), "prompt tokens", 2)
    return plots


def average_and_datasets(
    suite: SuiteResults, variants: Mapping[float, Variant], label: str, base: int
) -> Figure | None:
    """Plot averages of base, novel and HM (left), and HM of each data set and their mean (right).

    A missing point leaves a gap, a variant without such a number is a horizontal line; None for less than two values.
    """
    datasets = suite.options.datasets
    means = {value: suite.hm(variant, AVERAGE) for value, variant in variants.items()}
    averages = {value: (*suite.halves(variant, AVERAGE)[:2], means[value]) for value, variant in variants.items()}
    hms = {name: {value: suite.halves(variant, name)[2] for value, variant in variants.items()} for name in datasets}
    cells = [cell for row in [*averages.values(), *map(dict.values, hms.values())] for cell in row]
    if len(variants) < 2 or not any(cells):
        return None
    variant = next(iter(variants.values()))
    figure, (left, right) = style.panels(2, 2.15, label, "accuracy, %")
    looks = (("base", style.BASE), ("novel", style.NOVEL), ("harmonic mean", Look(style.INK, "o")))
    for half, (title, look) in enumerate(looks):
        style.draw_curve(left, {value: halves[half] for value, halves in averages.items()}, look, title)
    for other in suite.variants:
        if not other.key and (level := suite.hm(other, AVERAGE)):
            look, title = style.assign_looks({other.name: other.method})[other.name], f"{other.name},\nharmonic mean"
            cells.append(level)
            left.axhline(level.mean, **look.line(label=title, marker="", linewidth=1.2))
    for number, (name, curve) in enumerate(hms.items()):
        look, title = style.make_look(number), display_name(name)
        style.draw_curve(right, curve, look, title, linewidth=0.9, markersize=3.5)
    if len(datasets) > 1:
        style.draw_curve(right, means, Look(style.INK, "o"), "mean", linewidth=2.4, markersize=5)
    over = f"average over {len(datasets)} data sets" if len(datasets) > 1 else display_name(datasets[0])
    left.set_title(f"(a) {over}")
    right.set_title("(b) harmonic mean by data set")
    right.set_ylabel("harmonic mean, %")
    for panel in (left, right):
        style.set_ticks(panel, list(variants), base)
        style.grid(panel, "y")
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    style.heading(figure, f"{variant.name}: accuracy by {label} ({style.describe_cells(suite, cells)})", cells)
    return figure


def sensitivity_plots(suite: SuiteResults) -> Plots:
    """Return the heat map of the suite sensitivity, and its curves over the initial temperature of InfoNCE."""
    variants, label = sensitivity_variants(suite)[1], "initial temperature of InfoNCE"
    return {
        "sensitivity-weights": partial(weights_map, suite),
        "sensitivity-temperature": partial(average_and_datasets, suite, variants, label, 10),
    }


def weights_map(suite: SuiteResults) -> Figure | None:
    """Draw HM over lambda (upwards) x beta, the mean over the data sets, at the paper's temperature."""
    import pandas as pd
    from matplotlib.patches import Rectangle

    cells = {weights: suite.hm(variant, AVERAGE) for weights, variant in sensitivity_variants(suite)[0].items()}
    if not any(cells.values()):
        return None
    # `unstack` makes a row for each lambda and a column for each beta, both sorted; missing pairs are NaN.
    values = pd.Series({weights: cell.mean if cell else math.nan for weights, cell in cells.items()}).unstack()
    lambdas, betas = values.index, values.columns
    low, high = values.min(axis=None), values.max(axis=None)
    figure, (axes,) = style.panels(1, 0.36 * len(lambdas) + 0.4, "weight of KL, β", "weight of InfoNCE, λ")
    figure.set_figwidth(max(style.COLUMN, 0.52 * len(betas) + 1.1))
    # At least a tenth of a point wide: a single value would have no range of colours.
    axes.imshow(values, cmap="cividis", vmin=low, vmax=max(high, low + 0.1), origin="lower", aspect="auto")
    for row, column in product(range(len(lambdas)), range(len(betas))):
        value = values.iloc[row, column]
        text = axes.text(column, row, "–" if math.isnan(value) else f"{value:.2f}", ha="center", va="center")
        text.set(fontsize=7.5, color="white" if value < (low + high) / 2 else style.INK)
        text.set_fontweight("bold" if value == high else "normal")
    paper, _ = paper_weights()
    if paper in cells:
        corner = betas.get_loc(paper[1]) - 0.5, lambdas.get_loc(paper[0]) - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=style.INK, linewidth=1.8, clip_on=False))
    axes.set_xticks(range(len(betas)), [f"{value:g}" for value in betas])
    axes.set_yticks(range(len(lambdas)), [f"{value:g}" for value in lambdas])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    datasets = suite.options.datasets
    over = f"mean over {len(datasets)} data sets" if len(datasets) > 1 else display_name(datasets[0])
    seeds = style.describe_cells(suite, cells.values(), std=False)
    title = f"ProCAP by the weights of its loss, {over} ({seeds});\nframed: the paper's weights, bold: the best"
    style.heading(figure, title, cells.values())
    return figure
