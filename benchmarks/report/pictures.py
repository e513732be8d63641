"""Make the pictures of a report: plots drawn from the results, and pictures that a suite left in its folder."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.plots.style import DPI, image_of
from benchmarks.results.suite import SuiteResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_WIDTH = 1600
"""Pixels of a picture in the page; its file beside the page keeps the full size."""


@dataclass(frozen=True)
class Picture:
    """A picture and its files, by suffix. alt: its description in words. shown: the SVG or PNG in the page.

    width: inches in print.
    """

    name: str
    caption: str
    alt: str
    shown: bytes
    files: Mapping[str, bytes]
    width: float


def draw_picture(name: str, draw: Callable[[], Figure | None]) -> Picture | None:
    """Draw a plot, and describe it by its titles, axis labels and legends; None if it has nothing to show."""
    figure = draw()
    if figure is None:
        return None
    files = {form: image_of(figure, form) for form in ("svg", "pdf", "png")}
    panels = [axes for axes in figure.axes if axes.get_visible()]
    legends = [*figure.legends, *(legend for axes in panels if (legend := axes.get_legend()))]
    caption = figure.get_suptitle() or name.replace("-", " ").capitalize()
    alt = caption
    for part, texts in (
        ("panels", [axes.get_title(loc="left") for axes in panels]),
        ("x axis", [axes.get_xlabel() for axes in panels]),
        ("y axis", [axes.get_ylabel() for axes in panels]),
        ("shown", [text.get_text() for legend in legends for text in legend.get_texts()]),
    ):
        listed = ", ".join(dict.fromkeys(filter(None, texts)))
        alt += f". {part}: {listed}" if listed else ""
    # Formulas have dollar signs, and long texts line breaks.
    caption, alt = (" ".join(text.replace("$", "").split()) for text in (caption, alt))
    return Picture(name, caption, alt, files["svg"], files, figure.get_figwidth())


def load_picture(results: SuiteResults, name: str) -> Picture:
    """Load a recorded picture of a suite, such as attention maps, at most MAX_WIDTH pixels wide in the page."""
    from PIL import Image

    texts = results.pictures["pictures"][name]
    paths = {form: results.folder / f"{name}.{form}" for form in ("pdf", "png", "svg")}
    files = {form: path.read_bytes() for form, path in paths.items() if form == "png" or path.is_file()}
    shown = io.BytesIO()
    with Image.open(io.BytesIO(files["png"])) as image:
        width = image.width / DPI
        smaller = image.convert("RGB")
        smaller.thumbnail((MAX_WIDTH, 100 * MAX_WIDTH), Image.Resampling.LANCZOS)
        smaller.save(shown, "PNG", optimize=True)
    return Picture(name, texts["caption"], texts["alt"], shown.getvalue(), files, width)
