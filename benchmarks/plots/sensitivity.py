"""Plot the sensitivity of ProCAP: harmonic mean over two loss weights as a heat map, and over initial temperature."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots import style
from benchmarks.plots.style import Look, Plots, styled
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.grid import paper_weights, sensitivity_variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sensitivity_plots(suite: SuiteResults) -> Plots:
    """Return the heat map and the curve of the suite sensitivity."""
    return {
        "sensitivity-weights": partial(weights_map, suite),
        "sensitivity-temperature": partial(temperature_curve, suite),
    }


@styled
def weights_map(suite: SuiteResults) -> Figure | None:
    """Draw HM over lambda (upwards) x beta, the mean over the data sets, at the paper's temperature."""
    import numpy as np
    from matplotlib.patches import Rectangle

    cells = {weights: suite.mean_of_hms(variant) for weights, variant in sensitivity_variants(suite)[0].items()}
    means = [cell.mean for cell in cells.values() if cell]
    if not means:
        return None
    lambdas, betas = (sorted({weights[axis] for weights in cells}) for axis in (0, 1))
    values = np.full((len(lambdas), len(betas)), np.nan)
    for (weight, beta), cell in cells.items():
        values[lambdas.index(weight), betas.index(beta)] = cell.mean if cell else np.nan
    figure, (axes,) = style.panels(1, 0.36 * len(lambdas) + 0.4)
    figure.set_figwidth(max(style.COLUMN, 0.52 * len(betas) + 1.1))
    low, high = min(means), max(means)
    image = axes.imshow(values, cmap="cividis", vmin=low, vmax=max(high, low + 0.1), origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        cell = cells.get((lambdas[row], betas[column]))
        axes.text(
            column,
            row,
            f"{cell.mean:.2f}{style.dagger([cell]).strip()}" if cell else "–",
            ha="center",
            va="center",
            color=style.contrasting_ink(image.cmap(image.norm(value))) if cell else style.FAINT,
            fontsize=7.5,
            fontweight="bold" if value == high else "normal",
        )
    paper, _ = paper_weights()
    if paper in cells:
        corner = betas.index(paper[1]) - 0.5, lambdas.index(paper[0]) - 0.5
        for colour, width in (("white", 3.6), (style.INK, 1.8)):
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=width, clip_on=False))
    axes.set_xticks(range(len(betas)), [_format_power(value) for value in betas], parse_math=True)
    axes.set_yticks(range(len(lambdas)), [_format_power(value) for value in lambdas], parse_math=True)
    axes.set_xlabel(r"weight of KL, $\beta$", parse_math=True)
    axes.set_ylabel(r"weight of InfoNCE, $\lambda$", parse_math=True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar: Any = figure.colorbar(image, ax=axes, pad=0.02, aspect=14, label="harmonic mean, %")
    bar.outline.set_visible(False)
    datasets = suite.options.datasets
    over = f"mean over {len(datasets)} data sets" if len(datasets) > 1 else display_name(datasets[0])
    seeds = style.describe_seeds(cells.values(), std=False)
    title = f"ProCAP by the weights of its loss, {over} ({seeds});\nframed: the paper's weights, bold: the best"
    style.heading(figure, title, cells.values())
    return figure


@styled
def temperature_curve(suite: SuiteResults) -> Figure | None:
    """Plot HM over the initial temperature of InfoNCE at the paper's weights: thin per data set, thick on average."""
    _, variants = sensitivity_variants(suite)
    hms = {
        name: {value: suite.halves(variant, name)[2] for value, variant in variants.items()}
        for name in suite.options.datasets
    }
    every = [cell for own in hms.values() for cell in own.values()]
    if len(variants) < 2 or not any(every):
        return None
    figure, (axes,) = style.panels(1, 2.3, y="harmonic mean, %")
    looks = style.assign_dataset_looks(suite.options.datasets)
    for name, own in hms.items():
        label = display_name(name) + style.dagger(own.values())
        style.draw_curve(axes, own, looks[name], label, linewidth=0.9, markersize=3.5)
    if len(suite.options.datasets) > 1:
        averages = {value: suite.mean_of_hms(variant) for value, variant in variants.items()}
        style.draw_curve(axes, averages, Look(style.INK, "o"), "mean", linewidth=2.4, markersize=5)
    _, temperature = paper_weights()
    axes.axvline(temperature, color=style.FAINT, linewidth=0.8, linestyle=":", label="the paper's")
    style.set_ticks(axes, list(variants), base=10)
    axes.set_xlabel(r"initial temperature of InfoNCE, $\tau_p$", parse_math=True)
    style.grid(axes, "y")
    style.heading(figure, f"ProCAP by initial temperature ({style.describe_seeds(every)})", every)
    style.legend(figure)
    return figure


def _format_power(value: float) -> str:
    """Format 0, 1, 0.5, or a power of ten."""
    exponent = round(math.log10(value)) if value > 0 else 0
    return rf"$10^{{{exponent}}}$" if value > 0 and exponent and math.isclose(value, 10.0**exponent) else f"{value:g}"
