"""The pictures of a report: figures drawn anew from the results, and those that a suite left in its folder."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plots.style import Plots
from benchmarks.report.read import Found
from benchmarks.results.pictures import read_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDEST = 1600
"""Pixels of a picture in the page; its file beside the page keeps all it has."""
DOTS = 200
"""Per inch of print, of a picture that a suite left."""
MOST_TITLES = 12


@dataclass(frozen=True)
class Picture:
    """A figure in the page and its files. alt: what it shows, for those who do not see it. kind: of `shown`."""

    name: str
    caption: str
    alt: str
    shown: bytes
    kind: str
    files: Mapping[str, bytes]
    width: int

    @property
    def forms(self) -> list[str]:
        return sorted(self.files)


def drawn(drawings: Plots, failed: Callable[[str, Exception], None]) -> list[Picture]:
    """Every figure that there are numbers for, in the order of `drawings`; `failed` is told of those that fail."""
    from benchmarks.plots import image_of

    pictures = []
    for name, draw in drawings.items():
        try:
            figure = draw()
            if figure is None:
                continue
            files = {form: image_of(figure, form) for form in ("svg", "pdf", "png")}
            caption, alt = described(figure)
            width = round(figure.get_size_inches()[0] * 96)
            pictures.append(
                Picture(name, caption or _title(name), alt or _title(name), files["svg"], "svg", files, width)
            )
        except Exception as error:
            failed(name, error)
    return pictures


def left_in(found: Found, failed: Callable[[str, Exception], None]) -> list[Picture]:
    """Pictures that a suite made of more than its results, such as maps of attention, and recorded.

    `failed` is told of files that are no pictures.
    """
    folder, pictures = found.done.folder, []
    for name, words in read_pictures(found.done).get("pictures", {}).items():
        try:
            beside = {form: folder / f"{Path(name).name}.{form}" for form in ("pdf", "png", "svg")}
            contents = {form: file.read_bytes() for form, file in beside.items() if form == "png" or file.is_file()}
            shown, width = _sensible(contents["png"])
            pictures.append(Picture(name, words["caption"], words["alt"], shown, "png", contents, width))
        except Exception as error:
            failed(f"{name}.png", error)
    return pictures


def _sensible(png: bytes) -> tuple[bytes, int]:
    """The picture at a size for a page, and how wide it is in print, in CSS pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        width, height = image.size
        printed = round(width / DOTS * 96)
        if width <= WIDEST:
            return png, printed
        smaller = image.convert("RGB").resize((WIDEST, round(height * WIDEST / width)), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        smaller.save(file, "PNG", optimize=True)
        return min(file.getvalue(), png, key=len), printed


def _title(name: str) -> str:
    words = name.replace("-", " ").replace("_", " ")
    return words[:1].upper() + words[1:]


def described(figure: Figure) -> tuple[str, str]:
    """Caption and description of a figure from its own words: titles, axes and legends."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = [text for axes in panels if (text := _heading(axes))]
    whole = figure.get_suptitle()
    caption = whole or (titles[0] if len(titles) == 1 else "")
    said = [whole] if whole else []
    if len(panels) > 1 and titles:
        more = f" and {len(titles) - MOST_TITLES} more" if len(titles) > MOST_TITLES else ""
        said.append(f"{len(panels)} panels: {', '.join(titles[:MOST_TITLES])}{more}")
    else:
        said += titles
    for kind, words in (("across", _labels(panels, "x")), ("upwards", _labels(panels, "y"))):
        if words:
            said.append(f"{kind}: {', '.join(words)}")
    if names := _legend(figure, panels):
        said.append(f"shown: {', '.join(names)}")
    return _plain(caption), _plain(". ".join(said))


def _heading(axes: Axes) -> str:
    return next((text for place in ("left", "center", "right") if (text := axes.get_title(loc=place))), "")


def _labels(panels: Sequence[Axes], way: str) -> list[str]:
    return [text for text in dict.fromkeys(getattr(axes, f"get_{way}label")() for axes in panels) if text]


def _legend(figure: Figure, panels: Sequence[Axes]) -> list[str]:
    legends = [*figure.legends, *(legend for axes in panels if (legend := axes.get_legend()))]
    return list(dict.fromkeys(text.get_text() for legend in legends for text in legend.get_texts() if text.get_text()))


def _plain(text: str) -> str:
    return " ".join(text.replace("$", "").split())
