"""Define the style of all plots: colours, markers, print sizes and file formats.

Colours are those of Okabe and Ito and of Tol, which colour-blind readers can distinguish. A method has the same colour,
marker and dashes in all plots. Sizes are those of a printed page.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.results.metrics import Metric, describe_seeds
from benchmarks.results.suite_results import SuiteResults
from procap.methods import METHODS, title_and_colour
from runner.results import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Without a home folder that can be written, matplotlib prints advice about its caches.
logging.getLogger("matplotlib").addFilter(lambda record: record.funcName != "_get_config_or_cache_dir")
STYLE = Path(__file__).with_name("procap.mplstyle")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "d")
INK, FAINT, GRID, GREY = "#1f2430", "#6b7280", "#e5e7eb", "#c3c8d0"
COLOURED = 10
"""Methods of a plot that have colours; with more, the others are grey."""
FORMATS = ("png", "pdf")
MAKER = "ProCAP Bench"
"""Metadata of every plot file; identifies files that this program may replace."""
DPI = 200
COLUMN, PAGE = 3.4, 6.9
"""Inches: one column of a two-column page, and its whole width."""

HATCHES = ("", "////", "....", "xxxx", "----")
"""Patterns of bars of many methods, next to which equal colours are not."""

Dashes = str | tuple[float, tuple[float, ...]]
DASHES: tuple[Dashes, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))

Plots = Mapping[str, Callable[[], "Figure | None"]]
"""What draws each plot, by the name of its files; a plot without anything to show is None."""


class Look(NamedTuple):
    """Colour, marker and dashes of one line; that of the reference is thick."""

    colour: str
    marker: str
    dashes: Dashes = "-"
    is_reference: bool = False

    def line(self, **more: Any) -> dict[str, Any]:
        """Return arguments of `Axes.plot`; grey lines are thin and lie below the others."""
        faded = {"linewidth": 0.7, "markersize": 3, "zorder": 2} if self.colour == GREY else {}
        thick = {"linewidth": 2.4, "zorder": 4} if self.is_reference else {}
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, **more, **faded, **thick}


ENDS: Mapping[str, Look] = {"zeroshot": Look("#7f7f7f", "h", DASHES[2]), "procap": Look("#d55e00", "o", DASHES[0])}
"""The looks that stand out."""
COLOURS = ("#661100", "#e69f00", "#0072b2", "#8c6d31", "#009e73", "#cc79a7", "#882255", "#b8a800", "#44aa99", "#56b4e9",
           "#332288")  # fmt: skip
"""By place in METHODS modulo their number, which gives the default methods of each suite different ones."""


def make_look(number: int) -> Look:
    """Make one of 660 distinct looks."""
    marker, dashes = MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]
    return Look(COLOURS[number % len(COLOURS)], marker, dashes)


LOOKS: Mapping[str, Look] = {
    **{name: make_look(number) for number, name in enumerate((name for name in METHODS if name not in ENDS), 1)},
    **ENDS,
}
"""The look of each built-in method, by its place in METHODS."""
BASE, NOVEL = Look("#0072b2", "^", DASHES[1]), Look("#cc79a7", "v", DASHES[3])
"""Looks of base and novel accuracy in plots that draw them as separate lines."""


def assign_looks(methods: Mapping[str, str]) -> dict[str, Look]:
    """Assign a look to each title: that of its method for the first title, further ones to other titles and plug-ins.

    A plug-in has the colour that its class gives. methods: by title.
    """
    looks: dict[str, Look] = {}
    # None has the marker and dashes of one that stands out.
    ends = {look[1:3] for look in ENDS.values()}
    numbers = itertools.count(len(LOOKS) - len(ENDS) + 1)
    further = (look for number in numbers if (look := make_look(number))[1:3] not in ends)
    # Reversed, because the last entry of a key wins: here the first title of a method.
    first_titles = {method: title for title, method in reversed([*methods.items()])}
    for title, method in methods.items():
        if first_titles[method] != title:
            looks[title] = next(further)
        elif method in LOOKS:
            looks[title] = LOOKS[method]
        else:
            look, colour = next(further), title_and_colour(method)[1]
            looks[title] = look._replace(colour=colour) if colour else look
    return looks


def look_at_suite(suite: SuiteResults, heights: Mapping[str, float], column: str = "") -> dict[str, Look]:
    """Assign looks to the titles of `group_by_title(column)`; of many titles only the highest have colours."""
    methods = {title: variants[0].method for title, variants in suite.group_by_title(column).items()}
    return highlight(assign_looks(methods), heights, suite.reference(column))


def highlight(looks: Mapping[str, Look], heights: Mapping[str, float], reference: str = "") -> dict[str, Look]:
    """Make the reference's line thick, and all looks grey but the COLOURED highest, the last title's and ENDS."""
    best = sorted(looks, key=lambda title: heights.get(title, 0.0), reverse=True)[:COLOURED]
    kept = {*best, [*looks][-1], *(title for title, look in looks.items() if look in ENDS.values())}
    if len(looks) > COLOURED:
        looks = {title: look if title in kept else look._replace(colour=GREY) for title, look in looks.items()}
    return {title: look._replace(is_reference=title == reference) for title, look in looks.items()}


def draw_styled(draw: Callable[[], Figure | None]) -> Figure | None:
    """Draw a plot in `procap.mplstyle`, whatever matplotlib's settings are."""
    from matplotlib import style

    with style.context(STYLE, after_reset=True):
        return draw()


def image_of(figure: Figure, form: str) -> bytes:
    """Render the figure as "png", "pdf" or "svg"; the same numbers give the same bytes."""
    from matplotlib import style

    image = io.BytesIO()
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": MAKER},
        "pdf": {"Creator": MAKER, "CreationDate": None},
        "svg": {"Creator": MAKER, "Date": None},
    }
    # Fonts as TrueType, as some publishers refuse matplotlib's default, Type 3. Without a salt ids in SVG are random.
    with style.context({"pdf.fonttype": 42, "svg.hashsalt": "procap"}, after_reset=True):
        if figure.get_layout_engine():
            # Lay out once for all formats; savefig would do it twice for each.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            # The heading begins above the first panel, whose place is known only after the layout.
            for title in figure.texts:
                title.set_x(figure.axes[0].get_position().x0)
        figure.savefig(image, format=form, dpi=DPI, metadata=metadata[form], bbox_inches="tight", pad_inches=0.03)
    return image.getvalue()


def save_plots(folder: Path, plots: Plots) -> list[Path]:
    """Write each plot that has data in all FORMATS; returns the files of the first one."""
    written = []
    for name, draw in plots.items():
        if figure := draw_styled(draw):
            for form in FORMATS:
                write_bytes(folder / f"{name}.{form}", image_of(figure, form))
            written.append(folder / f"{name}.{FORMATS[0]}")
    return written


def panels(
    count: int, height: float, x: str = "", y: str = "", across: int = 4, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure with `count` panels of `height` inches, at most `across` in a row.

    x, y: labels of the axes, written below the last row and left of the first column.
    subplots: arguments of `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    down = math.ceil(count / across)
    # The same number of rows with even lengths: 5 panels are 3 and 2, not 4 and 1.
    across = math.ceil(count / down)
    # Not by pyplot, which keeps every figure in memory and may need a display.
    figure = Figure(figsize=(min(across * COLUMN, PAGE), height * down + 0.6), layout="constrained")
    axes: Any = figure.subplots(down, across, squeeze=False, **subplots)
    for spare in axes.flat[count:]:
        spare.set_axis_off()
    for lowest in axes[-1]:
        lowest.set_xlabel(x)
    for leftmost in axes[:, 0]:
        leftmost.set_ylabel(y)
    return figure, list(axes.flat[:count])


def grid(axes: Axes, which: Any) -> None:
    """Draw the grid lines and frame that all plots share; `which` is "x", "y" or "both"."""
    axes.grid(axis=which, color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT, labelcolor=INK)


def draw_curve(axes: Axes, points: Mapping[float, Metric | None], look: Look, label: str, **style: Any) -> None:
    """Draw means as a line with error bars of one standard deviation; a missing point leaves a gap."""
    mean = [cell.mean if cell else math.nan for cell in points.values()]
    std = [cell.std or 0.0 if cell else math.nan for cell in points.values()]
    axes.plot(list(points), mean, **look.line(**{"label": label, "zorder": 3, **style}))
    if any(cell and cell.std for cell in points.values()):
        axes.errorbar(list(points), mean, std, fmt="none", ecolor=look.colour, elinewidth=0.8, zorder=3)


def set_ticks(axes: Axes, values: Sequence[float], base: int) -> None:
    """Label the logarithmic x axis at these values only."""
    # Before the ticks, which a change of the scale would replace.
    axes.set_xscale("log", base=base)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def heading(figure: Figure, title: str, cells: Iterable[Metric | None] = ()) -> None:
    """Write the title above the figure, with a note if one of `cells` is limited."""
    limited = any(cell is not None and cell.limited for cell in cells)
    figure.suptitle(title + ";\nonly the first images of a test set" * limited, x=0.01, ha="left")


def legend(figure: Figure) -> None:
    """Draw one legend of all panels below the figure."""
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # The width of an entry in inches: its handle, and its letters.
    width = max(0.58 + 0.056 * len(label) for label in entries)
    columns = max(1, int(figure.get_figwidth() / width))
    # The panels would give their height to the rows of a long legend.
    figure.set_figheight(figure.get_figheight() + 0.16 * max(0, math.ceil(len(entries) / columns) - 4))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def describe_cells(suite: SuiteResults, cells: Iterable[Metric | None], *, std: bool = True) -> str:
    """Describe the seeds of a suite's plot, and whether the run was quick."""
    return ", ".join(filter(None, (describe_seeds(cells, std=std), "quick run" * suite.options.quick)))
