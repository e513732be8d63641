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
    """A picture and its files, by suffix. alt: a description. shown: in the page, as SVG or PNG. width: in inches."""

    name: str
    caption: str
    alt: str
    shown: bytes
    files: Mapping[str, bytes]
    width: float


def draw_picture(name: str, draw: Callable[[], Figure | None]) -> Picture | None:
    """Draw a plot, and describe it by its titles; None if it has nothing to show."""
    figure = draw()
    if figure is None:
        return None
    files = {form: image_of(figure, form) for form in ("svg", "pdf", "png")}
    caption = figure.get_suptitle() or name.replace("-", " ").capitalize()
    panels = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    alt = ": ".join(filter(None, [caption, ", ".join(dict.fromkeys(filter(None, panels)))]))
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
