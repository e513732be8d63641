"""The picture of a sweep: its figure against each field that was varied, one panel a field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots import COLOURS, FAINT, GRID, INK, SPARE, save_figures
from benchmarks.sweeps.table import method_of, winners
from cluster.space import Dimension
from cluster.sweep_record import SweepSettings, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
"""Panels in a row."""


def draw_sweep(settings: SweepSettings, records: Mapping[str, TrialRecord], folder: Path) -> list[Path]:
    """Write sweep.png and sweep.pdf into `folder`, and give the PNG's path; nothing where there is nothing to see."""
    shown = [record for record in records.values() if record.figure is not None]
    panels = [one for one in settings.dimensions() if len({str(record.values.get(one.field)) for record in shown}) > 1]
    if not panels:
        return []
    return save_figures(folder, {"sweep": lambda: _figure(settings, records, shown, panels)})


def _figure(
    settings: SweepSettings,
    records: Mapping[str, TrialRecord],
    shown: Sequence[TrialRecord],
    panels: Sequence[Dimension],
) -> Figure:
    from matplotlib.figure import Figure

    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(3.6 * across + 0.6, 3.1 * down + 0.5), layout="constrained")
    chosen = [record for _, record in winners(settings, records)]
    colours = {method: COLOURS.get(method, SPARE[i % len(SPARE)]) for i, method in enumerate(settings.methods)}
    left: Axes | None = None
    for number, one in enumerate(panels):
        axes = figure.add_subplot(down, across, number + 1, sharey=left)
        left = left or axes
        _panel(axes, one, settings, shown, colours, chosen)
        if number % across == 0:
            axes.set_ylabel(f"{settings.metric}, %", color=INK)
    figure.legend(
        handles=_handles(settings, colours, stopped=any(record.state != "finished" for record in shown)),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    return figure


def _handles(settings: SweepSettings, colours: Mapping[str, str], *, stopped: bool) -> list[Any]:
    """What the marks mean."""
    from matplotlib.lines import Line2D

    mean = f"{{}}, mean ± std of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else "{}"
    marks = [("o", colour, colour, mean.format(method)) for method, colour in colours.items()]
    marks += [("v", FAINT, "none", "stopped early")] if stopped else []
    marks += [("o", INK, "none", "best")]
    return [
        Line2D([], [], linestyle="none", marker=marker, color=colour, markerfacecolor=face, label=label)
        for marker, colour, face, label in marks
    ]


def _panel(
    axes: Axes,
    one: Dimension,
    settings: SweepSettings,
    shown: Sequence[TrialRecord],
    colours: Mapping[str, str],
    chosen: Sequence[TrialRecord],
) -> None:
    for record, x in zip(shown, _places(one, shown), strict=True):
        colour = colours[method_of(settings, record.values)]
        done = record.state == "finished"
        assert record.figure is not None
        axes.errorbar(
            x,
            record.figure,
            yerr=record.spread if done else None,
            fmt="o" if done else "v",
            color=colour if done else FAINT,
            markersize=5,
            elinewidth=1,
            alpha=0.85 if done else 0.6,
            markerfacecolor=colour if done else "none",
        )
        if record in chosen:
            axes.plot(x, record.figure, "o", markersize=11, markerfacecolor="none", color=INK)
    axes.set_xlabel(one.field.rpartition(".")[2], color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if one.kind == "list":
        axes.set_xticks(range(len(one.values)), [str(value) for value in _in_order(one)], parse_math=False)
        axes.set_xlim(-0.5, len(one.values) - 0.5)
    elif one.kind == "log":
        axes.set_xscale("log")


def _places(one: Dimension, shown: Sequence[TrialRecord]) -> list[float]:
    """Where each configuration is on the axis: numbers of a range where they are, those of one list value abreast."""
    values = [record.values[one.field] for record in shown]
    if one.kind != "list":
        return [float(value) for value in values]
    order, texts = [repr(value) for value in _in_order(one)], [repr(value) for value in values]
    places = []
    for number, text in enumerate(texts):
        abreast = texts.count(text)
        places.append(order.index(text) + (texts[:number].count(text) - (abreast - 1) / 2) * min(0.1, 0.7 / abreast))
    return places


def _in_order(one: Dimension) -> list[Any]:
    """Numbers by size, other values as they were given."""
    plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in one.values)
    return sorted(one.values) if plain else list(one.values)
