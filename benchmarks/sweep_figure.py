"""The picture of a sweep: its figure against each field that was varied, one panel a field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import COLOURS, FAINT, GRID, INK, SPARE, save_figures
from benchmarks.sweep_table import method_of
from cluster.space import Dimension
from cluster.sweep_record import SweepSettings, TrialRecord, best

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
    first = best(records, settings.direction)
    for number, one in enumerate(panels):
        axes = figure.add_subplot(down, across, number + 1)
        _panel(axes, one, settings, shown, first[1] if first else None)
        if number % across == 0:
            axes.set_ylabel(f"{settings.metric}, %", color=INK)
    return figure


def _panel(
    axes: Axes, one: Dimension, settings: SweepSettings, shown: Sequence[TrialRecord], first: TrialRecord | None
) -> None:
    at = _places(one, shown)
    colours = {method: COLOURS.get(method, SPARE[i % len(SPARE)]) for i, method in enumerate(settings.methods)}
    for record in shown:
        colour = colours[method_of(settings, record.values)]
        x = at(record.values[one.field])
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
    if first is not None and first.figure is not None:
        axes.plot(at(first.values[one.field]), first.figure, "o", markersize=11, markerfacecolor="none", color=INK)
    axes.set_xlabel(one.field.rpartition(".")[2], color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if one.kind == "list":
        axes.set_xticks(range(len(one.values)), [str(value) for value in one.values])
        axes.set_xlim(-0.5, len(one.values) - 0.5)
    elif one.kind == "log":
        axes.set_xscale("log")


def _places(one: Dimension, shown: Sequence[TrialRecord]) -> Any:
    """Where a value is on the axis: values of a list side by side, numbers where they are."""
    if one.kind != "list":
        return float
    order = [repr(value) for value in one.values]
    return lambda value: order.index(repr(value))
