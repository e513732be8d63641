"""Plot time against classes: reference mode dashed, fast mode solid, and its expected time dotted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import INK, MARKERS, SPARE, grid
from benchmarks.results.runtime import METHOD_TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_classes(report: dict[str, Any]) -> Figure | None:
    """Plot milliseconds of a training step and of an evaluated batch against classes, by batch size and mode."""
    from matplotlib.figure import Figure

    sizes = [one for one in report["scaling"] if one["backbone"] == report["backbone"]["name"]]
    ticks = sorted({one["point"]["classes"] for one in sizes})
    if len(ticks) < 2:
        return None
    groups = sorted({(one["point"]["batch"], one["point"]["precision"]) for one in sizes})
    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    titles = {"train": "training step, ms", "eval": "evaluated batch, ms"}
    for panel, (kind, title) in zip(panels, titles.items(), strict=True):
        for number, (batch, precision) in enumerate(groups):
            wanted = {"kind": kind, "batch": batch, "precision": precision}
            own = [one for one in sizes if wanted.items() <= one["point"].items()]
            own.sort(key=lambda one: one["point"]["classes"])
            classes = [one["point"]["classes"] for one in own]
            slow, fast = ([1e3 * one["seconds"][mode]["median"] for one in own] for mode in ("reference", "fast"))
            expected = [seconds / one["counted"] for seconds, one in zip(slow, own, strict=True)]
            look = {"color": SPARE[number % len(SPARE)], "marker": MARKERS[number % len(MARKERS)]}
            name = f"batch {batch}, {precision}"
            panel.plot(classes, slow, linestyle="--", label=f"{name}, reference", **look)
            panel.plot(classes, fast, linestyle="-", label=f"{name}, fast", **look)
            panel.plot(classes, expected, linestyle=":", label=f"{name}, fast by counting", color=look["color"])
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("classes")
        panel.set_title(title, loc="left", fontsize=10)
        grid(panel, "both")
    method = METHOD_TITLES.get(sizes[0]["method"], sizes[0]["method"])
    weights = " with random weights" if report["settings"]["pretrained"] == "random" else ""
    subject = f"{report['backbone']['name']}{weights} on {report['device']['name']}"
    figure.suptitle(f"{method}: time against classes, {subject}", x=0.01, ha="left", color=INK)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
