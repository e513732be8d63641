"""Figures of a table: harmonic means as bars and as a radar, learning curves, accuracy against speed.

Colours are Okabe and Ito's, which colour-blind readers tell apart; a method keeps its colour and marker everywhere.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scores import Cell, Score, dataset_order
from benchmarks.tables import AVERAGE, Row, Table
from runner.results import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"zeroshot": "#7f7f7f", "coop": "#56b4e9", "cocoop": "#e69f00", "maple": "#009e73", "procap": "#d55e00"}
SPARE = ("#0072b2", "#cc79a7", "#f0e442", "#000000", "#8c6d31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
FORMATS = ("png", "pdf")
DPI = 160


@dataclass(frozen=True)
class Look:
    """How one row of the table is drawn everywhere."""

    colour: str
    marker: str


def draw_figures(table: Table, scores: Sequence[Score], folder: Path) -> list[Path]:
    """Write every figure that `table` has the numbers for, as PNG and PDF, and give the PNGs' paths."""
    looks = _looks(table)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "hm-bars": lambda: hm_bars(table, looks),
        "hm-radar": lambda: hm_radar(table, looks),
        "learning-curves": lambda: learning_curves(table, scores, looks),
        "accuracy-speed": lambda: accuracy_speed(table, looks),
    }
    return save_figures(folder, drawings)


def save_figures(folder: Path, drawings: Mapping[str, Callable[[], Figure | None]]) -> list[Path]:
    """Draw and write each figure in every format; gives the PNGs. A drawing that has nothing to show is left out."""
    written = []
    for name, draw in drawings.items():
        figure = draw()
        if figure is None:
            continue
        for form in FORMATS:
            image = io.BytesIO()
            # Without a date, the same numbers give the same file.
            dated: dict[str, Any] = {"CreationDate": None} if form == "pdf" else {}
            figure.savefig(image, format=form, dpi=DPI, metadata=dated, bbox_inches="tight", facecolor="white")
            write_bytes(folder / f"{name}.{form}", image.getvalue())
        written.append(folder / f"{name}.png")
    return written


def hm_bars(table: Table, looks: dict[str, Look]) -> Figure | None:
    """A bar of HM for every method on every data set and the average; triangles show base and novel."""
    rows = [row for row in (*table.rows, *table.averages) if row.hm]
    groups = list(dict.fromkeys(row.dataset for row in rows))
    if not rows:
        return None
    titles = [title for title in table.titles if any(row.title == title for row in rows)]
    figure, axes = _canvas(max(6.4, 0.5 + 0.36 * len(groups) * (len(titles) + 1)), 4.2)
    width = 0.84 / len(titles)
    for row in rows:
        place, hm = titles.index(row.title), row.hm
        assert hm is not None and row.base is not None and row.novel is not None
        x = groups.index(row.dataset) + (place - (len(titles) - 1) / 2) * width
        first = row.dataset == next(other.dataset for other in rows if other.title == row.title)
        colour = looks[row.title].colour
        axes.bar(x, hm.mean, 0.9 * width, color=colour, label=row.title if first else None, zorder=2)
        axes.plot([x, x], [row.base.mean, row.novel.mean], color=INK, linewidth=0.8, zorder=3)
        axes.scatter(x, row.base.mean, marker="^", s=22, color=INK, zorder=4, linewidths=0)
        axes.scatter(x, row.novel.mean, marker="v", s=22, facecolor="white", edgecolor=INK, linewidths=0.8, zorder=4)
        if hm.std is not None:
            axes.errorbar(x + 0.3 * width, hm.mean, hm.std, color=INK, capsize=2, linewidth=0.8, zorder=3)
        mark = "†" if hm.limited else ""
        axes.text(x, 1.2, f"{hm.mean:.0f}{mark}", ha="center", va="bottom", fontsize=8, color=_ink_on(colour), zorder=5)
    if AVERAGE in groups:
        axes.axvspan(len(groups) - 1.5, len(groups) - 0.5, color=GRID, alpha=0.5, zorder=0, linewidth=0)
    axes.set_xticks(range(len(groups)), [_limited_name(group, rows) for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy, %")
    axes.set_title("Harmonic mean of base and novel accuracy", loc="left", color=INK, fontsize=12)
    axes.scatter([], [], marker="^", s=22, color=INK, label="base")
    axes.scatter([], [], marker="v", s=22, facecolor="white", edgecolor=INK, label="novel")
    grid(axes, "y")
    figure.legend(loc="outside lower center", ncols=len(titles) + 2, frameon=False)
    return figure


def hm_radar(table: Table, looks: dict[str, Look]) -> Figure | None:
    """HM of every method on an axis per data set; None for fewer than three data sets with every method's HM."""
    from matplotlib.figure import Figure

    rows = [row for row in table.rows if row.hm]
    datasets = [name for name in table.datasets if len([r for r in rows if r.dataset == name]) == len(table.titles)]
    if len(datasets) < 3:
        return None
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axes: Any = figure.add_subplot(projection="polar")
    angles = [2 * math.pi * i / len(datasets) for i in range(len(datasets))]
    means = {(row.dataset, row.title): row.hm.mean for row in rows if row.hm}
    for title in table.titles:
        values = [means[name, title] for name in datasets]
        look = looks[title]
        axes.plot(
            [*angles, 0],
            [*values, values[0]],
            color=look.colour,
            marker=look.marker,
            markersize=5,
            linewidth=2,
            label=title,
        )
        axes.fill(angles, values, color=look.colour, alpha=0.06)
    shown = [means[name, title] for name in datasets for title in table.titles]
    low = max(0, 10 * math.floor(min(shown) / 10 - 1))
    step = 10 if low >= 40 else 20
    ticks = range(step * (low // step + 1), 101, step)
    axes.set_ylim(low, min(100, 10 * math.ceil(max(shown) / 10)))
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, datasets, fontsize=10, color=INK)
    axes.set_yticks([tick for tick in ticks if tick <= axes.get_ylim()[1]])
    axes.set_rlabel_position(180 / len(datasets))
    axes.tick_params(axis="y", labelsize=8, labelcolor=FAINT)
    axes.tick_params(axis="x", pad=6)
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        side = math.sin(angle)
        label.set_horizontalalignment("left" if side > 0.1 else "right" if side < -0.1 else "center")
    for label in axes.get_yticklabels():
        label.set_bbox({"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1})
    axes.grid(color="#d1d5db")
    axes.spines["polar"].set_color("#d1d5db")
    figure.suptitle(f"Harmonic mean in % (centre {low})", x=0.02, ha="left", color=INK)
    figure.legend(loc="outside lower center", ncols=min(4, len(table.titles)), frameon=False)
    return figure


def learning_curves(table: Table, scores: Sequence[Score], looks: dict[str, Look]) -> Figure | None:
    """Cross-entropy per epoch on the training images: one panel per data set, one line per method, seeds averaged."""
    from matplotlib.figure import Figure

    runs = {s.config: s.training for s in scores if s.training.epochs and s.config.path in table.title_of}
    datasets = sorted({config.dataset for config in runs}, key=dataset_order)
    if not datasets:
        return None
    across = 2 if len(datasets) == 4 else min(len(datasets), 3)
    down = math.ceil(len(datasets) / across)
    figure = Figure(figsize=(3.1 * across + 0.6, 2.5 * down + 0.7), layout="constrained")
    panels: Any = figure.subplots(down, across, squeeze=False)
    for panel, dataset in zip(panels.flat, datasets, strict=False):
        lines: dict[str, list[list[float]]] = {}
        for config, training in runs.items():
            if config.dataset == dataset:
                losses = [epoch.terms["ce"] for epoch in training.epochs]
                lines.setdefault(table.title_of[config.path], []).append(losses)
        for title in sorted(lines, key=list(looks).index):
            columns = list(zip(*lines[title], strict=False))
            mean = [sum(column) / len(column) for column in columns]
            look, epochs = looks[title], range(1, len(mean) + 1)
            every = max(1, len(mean) // 6)
            panel.plot(
                epochs,
                mean,
                color=look.colour,
                marker=look.marker,
                markersize=4,
                markevery=every,
                linewidth=1.8,
                label=title,
            )
        panel.set_title(dataset, loc="left", fontsize=10, color=INK)
        panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        grid(panel, "y")
    for panel in panels.flat[len(datasets) :]:
        panel.set_axis_off()
    for panel in panels[-1]:
        panel.set_xlabel("epoch")
    for panel in panels[:, 0]:
        panel.set_ylabel("training cross-entropy")
    handles, titles = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=len(titles), frameon=False)
    return figure


def accuracy_speed(table: Table, looks: dict[str, Look]) -> Figure | None:
    """HM against evaluated images per second: the average where there is one, else every data set."""
    candidates: Sequence[Row] = [row for row in table.averages if row.hm] or table.rows
    points = [(row, row.hm, row.images_per_second) for row in candidates if row.hm and row.images_per_second]
    if not points:
        return None
    figure, axes = _canvas(6.4, 4.2)
    named: set[str] = set()
    for row, hm, rate in points:
        look = looks[row.title]
        name = None if row.title in named else row.title
        axes.scatter(rate, hm.mean, s=90, color=look.colour, marker=look.marker, zorder=3, label=name)
        named.add(row.title)
    axes.set_xlim(0, 1.15 * max(rate for _, _, rate in points))
    heights = [hm.mean for _, hm, _ in points]
    margin = max(2.0, 0.25 * (max(heights) - min(heights)))
    axes.set_ylim(max(0, min(heights) - margin), min(100, max(heights) + margin))
    axes.set_xlabel("evaluated images per second, decoding included")
    axes.set_ylabel("harmonic mean, %")
    over = "average over data sets" if points[0][0].dataset == AVERAGE else "single data sets"
    axes.set_title(f"Accuracy against speed, {over}", loc="left", color=INK)
    grid(axes, "both")
    figure.legend(loc="outside lower center", ncols=min(4, len(named)), frameon=False)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def grid(axes: Axes, which: Any) -> None:
    """The lines and frame that all figures share; `which` is "x", "y" or "both"."""
    axes.grid(axis=which, color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK)


def _ink_on(colour: str) -> str:
    """White on dark fills, ink on light ones."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def _looks(table: Table) -> dict[str, Look]:
    """A colour and a marker per title: a method's own for its first variant, spare ones for the others."""
    looks: dict[str, Look] = {}
    spare = list(SPARE)
    methods = {row.title: row.method for row in table.rows} | {row.title: row.method for row in table.others}
    for position, (title, method) in enumerate(methods.items()):
        free = method in COLOURS and COLOURS[method] not in {look.colour for look in looks.values()}
        colour = COLOURS[method] if free else spare.pop(0) if spare else FAINT
        looks[title] = Look(colour, MARKERS[position % len(MARKERS)])
    return looks


def _limited_name(group: str, rows: Sequence[Row]) -> str:
    cells: list[Cell] = [row.hm for row in rows if row.dataset == group and row.hm]
    return f"{group} †" if any(cell.limited for cell in cells) else group
