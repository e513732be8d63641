"""Plot the sensitivity of ProCAP: harmonic mean over two loss weights as a heat map, and over initial temperature."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import (
    COLUMN,
    FAINT,
    INK,
    Plots,
    assign_dataset_looks,
    canvas,
    dagger,
    describe_seeds,
    grid,
    heading,
    ink_on,
    legend,
    styled,
)
from benchmarks.results.metrics import Metric
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.grid import paper_weights, variants_by_temperature, variants_by_weights

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
    """Draw HM over lambda (upwards) x beta, the mean over the data sets, at the paper's temperature.

    A value of zero has a separate row or column; a missing cell is hatched.
    """
    import numpy as np
    from matplotlib.patches import Rectangle

    paper, _ = paper_weights()
    variants = variants_by_weights(suite)
    cells = {place: suite.mean_of_hms(variant) for place, variant in variants.items()}
    means = [cell.mean for cell in cells.values() if cell]
    if not means:
        return None
    lambdas, betas = (sorted({place[axis] for place in variants}) for axis in (0, 1))
    figure, axes = canvas(max(COLUMN, 0.52 * len(betas) + 1.1), 0.36 * len(lambdas) + 1.0)
    values = np.array([[_mean(cells.get((weight, beta))) for beta in betas] for weight in lambdas])
    low, high = min(means), max(means)
    # Draw cells as vectors with edges of the same colour; otherwise viewers show hairlines between them.
    sides = [np.arange(len(names) + 1) - 0.5 for names in (betas, lambdas)]
    image = axes.pcolormesh(
        *sides, values, cmap="cividis", vmin=low, vmax=max(high, low + 0.1), edgecolor="face", linewidth=0.2
    )
    for row, weight in enumerate(lambdas):
        for column, beta in enumerate(betas):
            cell = cells.get((weight, beta))
            if cell is None:
                axes.add_patch(
                    Rectangle(
                        (column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#c4c8cf", linewidth=0
                    )
                )
                axes.text(column, row, "–", ha="center", va="center", color=FAINT)
                continue
            ink = ink_on(*image.cmap(image.norm(np.array(cell.mean)))[:3])
            bold = "bold" if cell.mean == high else "normal"
            axes.text(
                column,
                row,
                f"{cell.mean:.2f}{dagger([cell]).strip()}",
                ha="center",
                va="center",
                color=ink,
                fontsize=7.5,
                fontweight=bold,
            )
    if paper[0] in lambdas and paper[1] in betas:
        corner = (betas.index(paper[1]) - 0.5, lambdas.index(paper[0]) - 0.5)
        for colour, width in (("white", 3.6), (INK, 1.8)):
            axes.add_patch(
                Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=width, zorder=4, clip_on=False)
            )
    axes.set_xticks(range(len(betas)), [_power(value) for value in betas], parse_math=True)
    axes.set_yticks(range(len(lambdas)), [_power(value) for value in lambdas], parse_math=True)
    axes.set_xlabel(r"weight of KL, $\beta$", parse_math=True)
    axes.set_ylabel(r"weight of InfoNCE, $\lambda$", parse_math=True)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar: Any = figure.colorbar(image, ax=axes, pad=0.02, aspect=14)
    bar.set_label("harmonic mean, %")
    bar.solids.set_edgecolor("face")
    bar.outline.set_visible(False)
    some = f"mean over {len(suite.datasets)} data sets" if len(suite.datasets) > 1 else display_name(suite.datasets[0])
    seeds = describe_seeds(cells.values(), std=False)
    title = f"ProCAP by the weights of its loss, {some} ({seeds});\nframed: the paper's weights, bold: the best"
    heading(figure, title, cells.values())
    return figure


@styled
def temperature_curve(suite: SuiteResults) -> Figure | None:
    """Plot HM over the initial temperature of InfoNCE at the paper's weights: thin per data set, thick on average."""
    _, temperature = paper_weights()
    variants = variants_by_temperature(suite)
    places = list(variants)
    own = {name: [suite.halves(variants[place], name)[2] for place in places] for name in suite.datasets}
    averages = [suite.mean_of_hms(variants[place]) for place in places]
    if len(places) < 2 or not any(cell for cells in own.values() for cell in cells):
        return None
    figure, axes = canvas(COLUMN, 2.9)
    looks = assign_dataset_looks(suite.datasets)
    for name, cells in own.items():
        label = display_name(name) + dagger(cells)
        axes.plot(
            places, list(map(_mean, cells)), zorder=2, **looks[name].line(linewidth=0.9, markersize=3.5, label=label)
        )
    if len(suite.datasets) > 1:
        axes.plot(
            places,
            list(map(_mean, averages)),
            color=INK,
            linewidth=2.4,
            marker="o",
            markersize=5,
            zorder=3,
            label="mean",
        )
    axes.axvline(temperature, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    axes.text(
        temperature, 1.01, "the paper's", transform=axes.get_xaxis_transform(), ha="center", fontsize=6.5, color=FAINT
    )
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(r"initial temperature of InfoNCE, $\tau_p$", parse_math=True)
    axes.set_ylabel("harmonic mean, %")
    grid(axes, "y")
    every = [cell for cells in own.values() for cell in cells]
    heading(figure, f"ProCAP by initial temperature ({describe_seeds(every, std=False)})", every)
    legend(figure, axes.get_legend_handles_labels()[0])
    return figure


def _mean(cell: Metric | None) -> float:
    return cell.mean if cell else math.nan


def _power(value: float) -> str:
    """Format 0, 1, 0.5, or a power of ten."""
    exponent = round(math.log10(value)) if value > 0 else 0
    return rf"$10^{{{exponent}}}$" if value > 0 and exponent and math.isclose(value, 10.0**exponent) else f"{value:g}"
