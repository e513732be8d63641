"""Plot reliability diagrams: accuracy against confidence, a panel per method and half of the classes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.plots import style
from benchmarks.plots.style import Look, styled
from benchmarks.results.frame import order_in
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.calibration import average_over_tests
from runner.calibration import BINS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN, FIRST = 5, ("procap", "zeroshot", "maple", "coop")
"""Of more methods than SHOWN those of FIRST, and then the most accurate ones, have panels."""
WIDTH = 21
"""Letters of a title that fit above a panel."""
FEW = 0.01
"""Share of a panel's images below which a bin is pale."""


@styled
def reliability(suite: SuiteResults) -> Figure | None:
    """Draw base above novel classes for up to SHOWN methods; None without evaluations that recorded calibration.

    The bars of a panel pool the images of all data sets and seeds; its ECE is the mean over them, as in the table.
    """
    frame = suite.frame[suite.frame.nll.notna() & suite.frame.target_classes.isin(["base", "novel"])]
    frames = {title: frame[frame.number == suite.variants.index(one)] for title, one in suite.by_title.items()}
    recorded = {title: own for title, own in frames.items() if len(own)}
    if not recorded:
        return None
    methods = {title: suite.by_title[title].method for title in recorded}
    ranked = sorted(recorded, key=lambda title: (order_in(methods[title], FIRST)[0], -recorded[title].accuracy.mean()))
    titles = [title for title in recorded if title in ranked[:SHOWN]]
    looks = style.assign_looks({title: methods[title] for title in titles})
    halves, across = sorted(frame.target_classes.unique()), len(titles)
    figure, axes = style.panels(len(halves) * across, 1.35, "confidence", across=across, sharex=True, sharey=True)
    figure.set_figwidth(min(style.PAGE, 0.8 + 1.22 * across))
    cells = []
    for number, panel in enumerate(axes):
        half, title = halves[number // across], titles[number % across]
        own = recorded[title][recorded[title].target_classes == half]
        cells.append(ece := average_over_tests(own, "ece"))
        words = f"ECE {ece.mean:.1f} %{style.dagger([ece])}" if ece else "ECE -"
        panel.set_title(words if number >= across else f"{textwrap.fill(title, WIDTH)}\n{words}")
        if not number % across:
            panel.set_ylabel(f"{half} classes:\naccuracy")
        _draw_bins(panel, own, looks[title])
    over = plural(len(suite.options.datasets), "data set")
    style.heading(figure, f"Confidence against accuracy, {over} ({style.describe_seeds(cells, std=False)})", cells)
    style.legend(figure)
    return figure


def _draw_bins(panel: Axes, rows: pd.DataFrame, look: Look) -> None:
    """Draw the accuracy of each bin of equal width, and the gap to the mean confidence of its images."""
    import numpy as np

    bins = [one.equal_width for one in rows.calibration]
    count, confidence, correct = (
        np.sum([getattr(one, name) for one in bins], axis=0) for name in ("count", "confidence", "correct")
    )
    used = np.flatnonzero(count)
    accuracy, mean = correct[used] / count[used], confidence[used] / count[used]
    panel.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.8, linestyle=(0, (4, 2)), label="accuracy = confidence")
    for few in (False, True):
        some = (count[used] < FEW * count.sum()) == few
        place: dict[str, Any] = {"width": 1 / BINS, "align": "edge", "alpha": 0.35 if few else 1.0}
        names = ("", "") if few else ("accuracy", "gap to the mean confidence (pale: less than 1 % of the images)")
        panel.bar(used[some] / BINS, accuracy[some], facecolor=look.colour, linewidth=0, label=names[0], **place)
        gap: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": style.INK,
            "linewidth": 0.4,
            "hatch": "//////",
            "label": names[1],
        }
        panel.bar(used[some] / BINS, (mean - accuracy)[some], bottom=accuracy[some], **gap, **place)
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
    style.grid(panel, "both")
