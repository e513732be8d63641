"""Plot the runtime benchmark: FPS and time as bars, step time against classes.

Colours and markers are those of `benchmarks.plots`; reference mode is hatched and pale, fast mode solid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots import COLOURS, FAINT, INK, MARKERS, SPARE, grid, save_plots
from benchmarks.results.runtime import METHOD_TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALE = 0.35
LINES = {"reference": "--", "fast": "-"}
PANELS = (
    ("training, s", "train_seconds", None),
    ("images/s, encoder only", "encoder_fps", "median"),
    ("images/s, decoding included", "end_to_end_fps", "median"),
)


def draw_figures(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plots that the report has numbers for, as PNG and PDF; returns the PNGs' paths."""
    drawings: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
        "runtime-bars": bars,
        "runtime-classes": step_against_classes,
    }
    return save_plots(folder, {name: partial(draw, report) for name, draw in drawings.items()})


def bars(report: dict[str, Any]) -> Figure | None:
    """Draw a panel each for training time and both rates; a bar per method and mode, whiskers from min to max."""
    from matplotlib.figure import Figure

    rows = report["rows"]
    if not rows:
        return None
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    figure = Figure(figsize=(max(9.6, 1.1 * len(kinds) * len(datasets)), 3.6), layout="constrained")
    panels: Any = figure.subplots(1, len(PANELS))
    width = 0.84 / len(kinds)
    for panel, (title, key, part) in zip(panels, PANELS, strict=True):
        for row in rows:
            value = row[key] if part is None or row[key] is None else row[key][part]
            if value is None:
                continue
            kind = _kind(row)
            x = datasets.index(row["dataset"]) + (kinds.index(kind) - (len(kinds) - 1) / 2) * width
            first = row["dataset"] == datasets[0] and key == "encoder_fps"
            look = {"label": _named(kind)} if first else {}
            panel.bar(x, value, 0.92 * width, zorder=2, **_fill(row), **look)
            if part:
                whisker = [[value - row[key]["lowest"]], [row[key]["highest"] - value]]
                panel.errorbar(x, value, whisker, color=INK, capsize=2, linewidth=0.8, zorder=3)
            mark = "≈" if part is None and row["extrapolated"] else ""
            top = row[key]["highest"] if part else value
            panel.text(x, top, f"{mark}{_short(value)}", ha="center", va="bottom", fontsize=7, color=INK, zorder=4)
        panel.set_xticks(range(len(datasets)), datasets)
        panel.set_title(title, loc="left", fontsize=10, color=INK)
        panel.margins(y=0.12)
        grid(panel, "y")
    figure.suptitle(f"Training time and speed, {_subject(report)}", x=0.01, ha="left", color=INK, fontsize=12)
    figure.legend(loc="outside lower center", ncols=min(6, len(kinds)), frameon=False)
    return figure


def step_against_classes(report: dict[str, Any]) -> Figure | None:
    """Plot milliseconds of a training step and of an evaluated batch against classes, by batch size and mode.

    Dotted: reference time divided by the ratio of counted operations, the expected time of fast mode.
    """
    from matplotlib.figure import Figure

    sizes = [one for one in report["scaling"] if one["backbone"] == report["backbone"]["name"]]
    if len({one["point"]["classes"] for one in sizes}) < 2:
        return None
    kinds = [kind for kind in ("train", "eval") if any(one["point"]["kind"] == kind for one in sizes)]
    figure = Figure(figsize=(4.6 * len(kinds), 3.8), layout="constrained")
    panels: Any = figure.subplots(1, len(kinds), squeeze=False)[0]
    lines = list(dict.fromkeys((one["point"]["batch"], one["point"]["precision"]) for one in sizes))
    colours = ("#0072b2", *SPARE[1:])
    for panel, kind in zip(panels, kinds, strict=True):
        for place, (batch, precision) in enumerate(lines):
            own = [one for one in sizes if _is(one, kind, batch, precision)]
            own.sort(key=lambda one: one["point"]["classes"])
            classes = [one["point"]["classes"] for one in own]
            colour, marker = colours[place % len(colours)], MARKERS[place % len(MARKERS)]
            for mode, dashes in LINES.items():
                values = [1e3 * one["seconds"][mode]["median"] for one in own]
                label = f"batch {batch}, {mode}" + (f", {precision}" if len({p for _, p in lines}) > 1 else "")
                panel.plot(classes, values, color=colour, marker=marker, markersize=5, linestyle=dashes, label=label)
            promised = [1e3 * one["seconds"]["reference"]["median"] / one["counted"] for one in own]
            panel.plot(classes, promised, color=colour, linestyle=":", linewidth=1)
        panel.set_xscale("log")
        panel.set_yscale("log")
        ticks = sorted({one["point"]["classes"] for one in sizes})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("classes")
        panel.set_title({"train": "training step, ms", "eval": "evaluated batch, ms"}[kind], loc="left", fontsize=10)
        grid(panel, "both")
    method = METHOD_TITLES.get(sizes[0]["method"], sizes[0]["method"])
    figure.suptitle(f"{method}: time against classes, {_subject(report)}", x=0.01, ha="left", color=INK)
    handles, titles = panels[0].get_legend_handles_labels()
    (promise,) = panels[0].plot([], [], color=FAINT, linestyle=":", label="fast by counting")
    figure.legend(
        [*handles, promise], [*titles, "fast by counting"], loc="outside lower center", ncols=3, frameon=False
    )
    return figure


def _kind(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["title"], row["mode"], row["precision"]


def _named(kind: tuple[str, str, str]) -> str:
    return f"{kind[0]}, {kind[1]}" + (f", {kind[2]}" if kind[2] != "fp32" else "")


def _fill(row: dict[str, Any]) -> dict[str, Any]:
    colour = COLOURS.get(row["method"], SPARE[0])
    if row["mode"] == "fast":
        return {"color": colour, "edgecolor": "white", "linewidth": 0.5}
    return {"color": colour, "alpha": PALE, "hatch": "///", "edgecolor": INK, "linewidth": 0.0}


def _is(one: dict[str, Any], kind: str, batch: int, precision: str) -> bool:
    point = one["point"]
    return (point["kind"], point["batch"], point["precision"]) == (kind, batch, precision)


def _subject(report: dict[str, Any]) -> str:
    weights = " with random weights" if report["settings"]["pretrained"] == "random" else ""
    return f"{report['backbone']['name']}{weights} on {report['device']['name']}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
