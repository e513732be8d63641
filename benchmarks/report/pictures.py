"""Pictures of a report: plots drawn from the results, and pictures that a suite left in its folder."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.plots.style import DPI, Plots, image_of
from benchmarks.report.model import Picture
from benchmarks.results.pictures import read_pictures
from benchmarks.results.suite import SuiteResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_WIDTH = 1600
"""Pixels of a picture in the page; its file beside the page keeps the full size."""
CSS_DPI = 96
MAX_TITLES = 12
"""Panels that a description names."""


def draw_plots(plots: Plots, on_error: Callable[[str, Exception], None]) -> list[Picture]:
    """Every plot that there are numbers for, in order; errors are passed to `on_error` with the name of the plot."""
    pictures = []
    for name, draw in plots.items():
        try:
            figure = draw()
            if figure is None:
                continue
            files = {form: image_of(figure, form) for form in ("svg", "pdf", "png")}
            caption, alt = describe_plot(figure)
            title = name.replace("-", " ").replace("_", " ")
            title = title[:1].upper() + title[1:]
            width = round(figure.get_size_inches()[0] * CSS_DPI)
            pictures.append(Picture(name, caption or title, alt or title, files["svg"], "svg", files, width))
        except Exception as error:
            on_error(name, error)
    return pictures


def load_pictures(suite: SuiteResults, on_error: Callable[[str, Exception], None]) -> list[Picture]:
    """Pictures that a suite made of more than its results, such as attention maps, and recorded in `pictures.json`."""
    pictures = []
    for name, texts in read_pictures(suite).get("pictures", {}).items():
        try:
            paths = {form: suite.folder / f"{name}.{form}" for form in ("pdf", "png", "svg")}
            files = {form: path.read_bytes() for form, path in paths.items() if form == "png" or path.is_file()}
            shown, width = _shrink(files["png"])
            pictures.append(Picture(name, texts["caption"], texts["alt"], shown, "png", files, width))
        except Exception as error:
            on_error(f"{name}.png", error)
    return pictures


def _shrink(png: bytes) -> tuple[bytes, int]:
    """The picture at most MAX_WIDTH pixels wide, and its printed width in CSS pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        width, height = image.size
        printed = round(width / DPI * CSS_DPI)
        if width <= MAX_WIDTH:
            return png, printed
        smaller = image.convert("RGB").resize((MAX_WIDTH, round(height * MAX_WIDTH / width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    smaller.save(file, "PNG", optimize=True)
    return min(file.getvalue(), png, key=len), printed


def describe_plot(figure: Figure) -> tuple[str, str]:
    """Caption and description of a plot, from its titles, axis labels and legends."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    own = [
        next(filter(None, (axes.get_title(loc=side) for side in ("left", "center", "right"))), "") for axes in panels
    ]
    titles = list(filter(None, own))
    heading = figure.get_suptitle()
    parts = [heading] if heading else []
    if len(panels) > 1 and titles:
        more = f" and {len(titles) - MAX_TITLES} more" if len(titles) > MAX_TITLES else ""
        parts.append(f"{len(panels)} panels: {', '.join(titles[:MAX_TITLES])}{more}")
    else:
        parts += titles
    legends = [*figure.legends, *(legend for axes in panels if (legend := axes.get_legend()))]
    named = {
        "x axis": [axes.get_xlabel() for axes in panels],
        "y axis": [axes.get_ylabel() for axes in panels],
        "shown": [text.get_text() for legend in legends for text in legend.get_texts()],
    }
    parts += [
        f"{kind}: {', '.join(names)}"
        for kind, found in named.items()
        if (names := list(dict.fromkeys(filter(None, found))))
    ]
    caption = heading or (titles[0] if len(titles) == 1 else "")
    return _drop_math(caption), _drop_math(". ".join(parts))


def _drop_math(text: str) -> str:
    return " ".join(text.replace("$", "").split())
