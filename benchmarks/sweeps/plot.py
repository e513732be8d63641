"""Plot a sweep: the score against each varied field, one panel per field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.plots.style import FAINT, GRID, INK, assign_looks, heading
from benchmarks.sweeps.table import find_best
from cluster.configuration import Configuration, SweepSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 3


def plot_sweep(settings: SweepSettings, configurations: Sequence[Configuration]) -> Figure | None:
    """Plot the scores against each varied field; None for fewer than two points."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = [one for one in configurations if one.score is not None]
    fields = [field for field in settings.domains if len({str(one.values.get(field)) for one in shown}) > 1]
    if not fields:
        return None
    columns = min(MAX_COLUMNS, len(fields))
    rows = math.ceil(len(fields) / columns)
    figure = Figure(figsize=(3.6 * columns + 0.6, 3.1 * rows + 0.5), layout="constrained")
    colours = {method: look.colour for method, look in assign_looks({name: name for name in settings.methods}).items()}
    left: Axes | None = None
    for number, field in enumerate(fields):
        axes = figure.add_subplot(rows, columns, number + 1, sharey=left)
        left = left or axes
        _draw_panel(axes, field, settings, shown, colours)
        if number % columns == 0:
            axes.set_ylabel(f"{settings.metric}, %", color=INK)
    mean = f", mean ± std of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    marks = [("o", colour, colour, f"{method}{mean}") for method, colour in colours.items()]
    marks += [("v", FAINT, "none", "stopped early")] if any(one.state != "finished" for one in shown) else []
    marks += [("o", INK, "none", "best")]
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, markerfacecolor=face, label=label)
        for marker, colour, face, label in marks
    ]
    heading(figure, f"Sweep {settings.name}: {settings.metric} of each configuration, by the values of each field")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK)
    return figure


def _draw_panel(
    axes: Axes, field: str, settings: SweepSettings, shown: Sequence[Configuration], colours: Mapping[str, str]
) -> None:
    domain, best = settings.domains[field], find_best(settings, shown)
    listed = domain if isinstance(domain, list) else []
    if all(isinstance(value, int | float) for value in listed):
        listed = sorted(listed)
    for one in shown:
        x, finished = listed.index(one.values[field]) if listed else one.values[field], one.state == "finished"
        assert one.score is not None
        colour = colours[one.values.get("method", settings.methods[0])] if finished else FAINT
        axes.errorbar(
            x,
            one.score,
            yerr=one.spread if finished else None,
            fmt="o" if finished else "v",
            color=colour,
            markersize=5,
            elinewidth=1,
            alpha=0.85 if finished else 0.6,
            markerfacecolor=colour if finished else "none",
        )
        if one in best:
            axes.plot(x, one.score, "o", markersize=11, markerfacecolor="none", color=INK)
    axes.set_xlabel(field.rpartition(".")[2], color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if listed:
        axes.set_xticks(range(len(listed)), [str(value) for value in listed], parse_math=False)
        axes.set_xlim(-0.5, len(listed) - 0.5)
    elif "loguniform" in domain:
        axes.set_xscale("log")
