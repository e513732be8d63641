"""Define the style of all plots: colours, markers, print sizes and file formats.

Colours are Okabe and Ito's, which colour-blind readers can distinguish. A method has the same colour, marker and dashes
in all plots, so that it is also recognizable on a grey printout. Sizes are those of a printed page.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.results.metrics import Metric
from runner.results import write_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"zeroshot": "#7f7f7f", "coop": "#56b4e9", "cocoop": "#e69f00", "maple": "#009e73", "procap": "#d55e00"}
SPARE = ("#0072b2", "#cc79a7", "#f0e442", "#000000", "#8c6d31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
FORMATS = ("png", "pdf")
MAKER = "ProCAP Bench"
"""Metadata of every plot file; identifies files that this program may replace."""
DPI = 200
DAGGER = "†"
COLUMN, PAGE = 3.4, 6.9
"""Inches: one column of a two-column page, and its whole width."""

Dashes = str | tuple[float, tuple[float, ...]]
DASHES: tuple[Dashes, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
TYPE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "figure.titlesize": 9,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.45,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "legend.handlelength": 3.0,
    # Names of classes and methods may contain dollar signs; texts with formulas pass parse_math=True.
    "text.parse_math": False,
}
FILES: dict[Any, Any] = {"pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "procap"}

Plots = Mapping[str, Callable[[], "Figure | None"]]
"""What draws each plot, by the name of its files; a plot without anything to show is None."""

Draw = TypeVar("Draw", bound=Callable[..., Any])


@dataclass(frozen=True)
class Look:
    """Colour, marker, dashes and hatch of one line or bar. hatch: distinguishes bars on a grey printout."""

    colour: str
    marker: str
    dashes: Dashes = "-"
    hatch: str = ""

    def line(self, **more: Any) -> dict[str, Any]:
        """Return arguments of `Axes.plot`."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes, **more}

    def fill(self, **more: Any) -> dict[str, Any]:
        """Return arguments of `Axes.bar` and of a patch in a legend."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0, **more}


LOOKS: Mapping[str, Look] = {
    "zeroshot": Look(COLOURS["zeroshot"], "o", DASHES[2], "xxx"),
    "coop": Look(COLOURS["coop"], "s", DASHES[3]),
    "cocoop": Look(COLOURS["cocoop"], "^", DASHES[4], "\\\\\\"),
    "maple": Look(COLOURS["maple"], "D", DASHES[1], "///"),
    "procap": Look(COLOURS["procap"], "o", DASHES[0]),
}
BASE, NOVEL = Look("#0072b2", "^", DASHES[1]), Look("#cc79a7", "v", DASHES[3])
"""Looks of base and novel accuracy in plots that draw them as separate lines."""


def assign_looks(methods: Mapping[str, str]) -> dict[str, Look]:
    """Assign a look to each title: the method's own for its first title, spare ones for the others."""
    found: dict[str, Look] = {}
    spares = [Look(colour, MARKERS[(3 + i) % len(MARKERS)], DASHES[i % len(DASHES)]) for i, colour in enumerate(SPARE)]
    for position, (title, method) in enumerate(methods.items()):
        own = LOOKS.get(method)
        if own is not None and own not in found.values():
            found[title] = own
        else:
            found[title] = spares.pop(0) if spares else Look(FAINT, MARKERS[position % 8], DASHES[position % 5])
    return found


def assign_dataset_looks(datasets: Iterable[str]) -> dict[str, Look]:
    """Assign a look to each data set, for plots with a line per data set; up to 56 are distinct."""
    colours = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#000000", "#8c6d31")
    return {
        name: Look(colours[i % len(colours)], MARKERS[(1 + i) % len(MARKERS)], DASHES[i % len(DASHES)])
        for i, name in enumerate(datasets)
    }


def styled(draw: Draw) -> Draw:
    """Decorate a function to draw with the sizes and colours of `TYPE`, whatever matplotlib's settings are."""

    @functools.wraps(draw)
    def drawn(*args: Any, **more: Any) -> Any:
        with _set_to(TYPE):
            return draw(*args, **more)

    return drawn  # type: ignore[return-value]


@contextlib.contextmanager
def _set_to(values: Mapping[Any, Any]) -> Iterator[None]:
    """Use matplotlib's defaults with these changes, so that no setting of the user or the machine affects a plot."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(values)
        yield


def image_of(figure: Figure, form: str) -> bytes:
    """Render the figure as "png", "pdf" or "svg"; the same numbers give the same bytes."""
    image = io.BytesIO()
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": MAKER},
        "pdf": {"Creator": MAKER, "CreationDate": None},
        "svg": {"Creator": MAKER, "Date": None},
    }
    with _set_to(FILES):
        figure.savefig(
            image,
            format=form,
            dpi=DPI,
            metadata=metadata[form],
            bbox_inches="tight",
            pad_inches=0.03,
            facecolor="white",
        )
    found = image.getvalue()
    return _slim(found) if form == "svg" else found


def _slim(svg: bytes) -> bytes:
    """Remove comments, and round coordinates to a hundredth of a point."""
    plain = re.sub(rb"\s*<!--.*?-->", b"", svg, flags=re.DOTALL)
    return re.sub(rb'(?<= d=")[^"]*', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]).replace(b"\n", b""), plain)


def save_plots(folder: Path, plots: Plots, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw and write each plot in every format; returns the files of the first format.

    A plot without data is left out.
    """
    written = []
    for name, draw in plots.items():
        figure = draw()
        if figure is None:
            continue
        for form in formats:
            write_bytes(folder / f"{name}.{form}", image_of(figure, form))
        written.append(folder / f"{name}.{formats[0]}")
    return written


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure with one panel; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def panels(count: int, height: float, x: str, y: str, across: int | None = None) -> tuple[Figure, list[Axes]]:
    """Make a figure as wide as a page with `count` panels of `height` inches; unused places stay empty.

    x, y: labels of the axes, written below the last row and beside the first column.
    """
    from matplotlib.figure import Figure

    across = across or panels_across(count)
    down = math.ceil(count / across)
    width = PAGE if across > 2 else across * COLUMN
    figure = Figure(figsize=(width, height * down + 0.6), layout="constrained")
    every: Any = figure.subplots(down, across, squeeze=False)
    for spare in every.flat[count:]:
        spare.set_axis_off()
    for lowest in every[-1]:
        lowest.set_xlabel(x)
    for leftmost in every[:, 0]:
        leftmost.set_ylabel(y)
    return figure, list(every.flat[:count])


def panels_across(count: int) -> int:
    """Return how many panels are in a row: up to four, with as few unused places as possible."""
    return count if count < 4 else min((4, 3), key=lambda across: (-count % across, -across)) if count > 4 else 2


def grid(axes: Axes, which: Any) -> None:
    """Draw the grid lines and frame that all plots share; `which` is "x", "y" or "both"."""
    axes.grid(axis=which, color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK)


def heading(figure: Figure, title: str, cells: Iterable[Metric | None] = ()) -> None:
    """Write the title above the figure from its left edge, and explain the dagger if one of `cells` is limited."""
    limited = f";\n{DAGGER} only the first images of a test set" if dagger(cells) else ""
    figure.suptitle(f"{title}{limited}", x=0.01, ha="left")


def legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Draw the legend below the figure, in as many columns as fit its width."""
    widths = [0.58 + 0.056 * len(str(handle.get_label())) for handle in handles]

    def taken(columns: int) -> float:
        # Matplotlib fills legends column by column; the first columns get the remainder.
        rows, longer = divmod(len(widths), columns)
        ends = [column * rows + min(column, longer) for column in range(columns + 1)]
        return sum(max(widths[first:end]) for first, end in pairwise(ends))

    fitting = [columns for columns in range(1, len(widths) + 1) if taken(columns) <= figure.get_figwidth() - 0.1]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=max(fitting, default=1), frameon=False)


def ink_on(red: float, green: float, blue: float) -> str:
    """Return white or ink, whichever has the higher contrast on a fill, by WCAG 2; channels from 0 to 1."""
    channels = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in (red, green, blue)]
    luminance = sum(share * one for share, one in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.067 else INK


def describe_seeds(cells: Iterable[Metric | None], *, std: bool = True) -> str:
    """Describe the seeds of a plot: "mean ± std of 3 seeds", "mean of 3 seeds", "seed 1"."""
    seeds = {cell.seeds for cell in cells if cell is not None}
    if len(seeds) != 1:
        return "seeds differ" if seeds else ""
    (only,) = seeds
    return f"mean{' ± std' * std} of {len(only)} seeds" if len(only) > 1 else f"seed {only[0]}"


def dagger(cells: Iterable[Metric | None]) -> str:
    """Return a dagger if only the first images of a test set were evaluated."""
    return f" {DAGGER}" if any(cell is not None and cell.limited for cell in cells) else ""
