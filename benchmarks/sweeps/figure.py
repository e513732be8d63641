"""Plot a sweep: the score against each varied field, one panel per field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots import COLOURS, FAINT, GRID, INK, SPARE, save_plots
from benchmarks.sweeps.table import find_winners, method_of
from cluster.configuration import Configuration, SweepSettings
from cluster.space import Domain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
"""Panels in a row."""


def draw_sweep(settings: SweepSettings, configurations: Sequence[Configuration], folder: Path) -> list[Path]:
    """Write sweep.png and sweep.pdf into `folder` and return the PNG's path; no plot for fewer than two points."""
    shown = [one for one in configurations if one.score is not None]
    panels = [field for field in settings.domains if len({str(one.values.get(field)) for one in shown}) > 1]
    return save_plots(folder, {"sweep": lambda: _plot(settings, shown, panels)}) if panels else []


def _plot(settings: SweepSettings, shown: Sequence[Configuration], panels: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(3.6 * across + 0.6, 3.1 * down + 0.5), layout="constrained")
    chosen = find_winners(settings, shown)
    colours = {method: COLOURS.get(method, SPARE[i % len(SPARE)]) for i, method in enumerate(settings.methods)}
    left: Axes | None = None
    for number, field in enumerate(panels):
        axes = figure.add_subplot(down, across, number + 1, sharey=left)
        left = left or axes
        _draw_panel(axes, field, settings, shown, colours, chosen)
        if number % across == 0:
            axes.set_ylabel(f"{settings.metric}, %", color=INK)
    figure.legend(
        handles=_handles(settings, colours, stopped=any(one.state != "finished" for one in shown)),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    return figure


def _handles(settings: SweepSettings, colours: Mapping[str, str], *, stopped: bool) -> list[Any]:
    """Make the entries of the legend."""
    from matplotlib.lines import Line2D

    mean = f"{{}}, mean ± std of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else "{}"
    marks = [("o", colour, colour, mean.format(method)) for method, colour in colours.items()]
    marks += [("v", FAINT, "none", "stopped early")] if stopped else []
    marks += [("o", INK, "none", "best")]
    return [
        Line2D([], [], linestyle="none", marker=marker, color=colour, markerfacecolor=face, label=label)
        for marker, colour, face, label in marks
    ]


def _draw_panel(
    axes: Axes,
    field: str,
    settings: SweepSettings,
    shown: Sequence[Configuration],
    colours: Mapping[str, str],
    chosen: Sequence[Configuration],
) -> None:
    domain = settings.domains[field]
    for one, x in zip(shown, _positions(field, domain, shown), strict=True):
        colour = colours[method_of(settings, one.values)]
        done = one.state == "finished"
        assert one.score is not None
        axes.errorbar(
            x,
            one.score,
            yerr=one.spread if done else None,
            fmt="o" if done else "v",
            color=colour if done else FAINT,
            markersize=5,
            elinewidth=1,
            alpha=0.85 if done else 0.6,
            markerfacecolor=colour if done else "none",
        )
        if one in chosen:
            axes.plot(x, one.score, "o", markersize=11, markerfacecolor="none", color=INK)
    axes.set_xlabel(field.rpartition(".")[2], color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if isinstance(domain, list):
        axes.set_xticks(range(len(domain)), [str(value) for value in _sort_values(domain)], parse_math=False)
        axes.set_xlim(-0.5, len(domain) - 0.5)
    elif "loguniform" in domain:
        axes.set_xscale("log")


def _positions(field: str, domain: Domain, shown: Sequence[Configuration]) -> list[float]:
    """Compute X of each configuration: the drawn number, or the place of a listed value, equal ones side by side."""
    values = [one.values[field] for one in shown]
    if not isinstance(domain, list):
        return [float(value) for value in values]
    order, texts = [repr(value) for value in _sort_values(domain)], [repr(value) for value in values]
    positions = []
    for number, text in enumerate(texts):
        count = texts.count(text)
        positions.append(order.index(text) + (texts[:number].count(text) - (count - 1) / 2) * min(0.1, 0.7 / count))
    return positions


def _sort_values(values: list[Any]) -> list[Any]:
    """Sort numbers by size, other values as they were given."""
    plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return sorted(values) if plain else values
