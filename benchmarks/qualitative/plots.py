"""Draw the qualitative pictures: predictions side by side, EigenCAM overlays, prompts as heat maps.

Pages are laid out in inches, so that text keeps its size. Right and wrong are marked by a tick and a cross as well as
by colour.

Shapes: S image size, P prompt tokens, D text width.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.plots.style import FAINT, INK, PAGE, styled
from benchmarks.qualitative.prompts import RANDOM_STD, LearnedPrompts, Stage
from benchmarks.results.published.tables import display_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIGHT, WRONG = "#1a7f37", "#c62828"
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"

CAM_LOOK: Mapping[str, Any] = {"colour_map": "inferno", "alpha": 0.55, "interpolation": "bicubic", "over": "luminance"}
"""How every map is drawn, whatever the method; over the image without its colours, which would mix with the map's."""

LUMINANCE = np.array([0.299, 0.587, 0.114])

WIDTH = PAGE
MARGIN = 0.08
GAP = 0.14


@dataclass(frozen=True)
class Picture:
    """An image [S, S, 3] that is shown, what every method (by title) answers, and its maps [grid, grid].

    kind: which methods are right, in words. shares: of the variance of the patches, what each map stands for.
    """

    pixels: NDArray[np.uint8]
    kind: str
    truth: str
    answers: Mapping[str, str]
    right: Mapping[str, bool]
    maps: Mapping[str, NDArray[np.float64]]
    shares: Mapping[str, float]


class Page:
    """A figure with coordinates in inches from its top left corner."""

    def __init__(self, height: float, width: float = WIDTH) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure: Figure = Figure(figsize=(width, height))

    def text(self, x: float, y: float, words: str, size: float = 8, colour: str = INK, **style: Any) -> None:
        """`y` is the line that letters stand on."""
        self.figure.text(x / self.width, 1 - y / self.height, words, size=size, color=colour, **style)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        corner = (x / self.width, 1 - (y + height) / self.height)
        return self.figure.add_axes((*corner, width / self.width, height / self.height))

    def image(self, x: float, y: float, side: float, pixels: NDArray[np.uint8]) -> Axes:
        """A square image without ticks."""
        axes = self.axes(x, y, side, side)
        axes.imshow(pixels, interpolation=_smooth(pixels, side))
        axes.set_axis_off()
        return axes


@styled
def draw_predictions(pictures: Sequence[Picture], counts: Mapping[str, int], what: str) -> Figure:
    """Every image with its class and every method's answer; of two methods that disagree a block for each kind.

    counts: of all images, how many are of each kind. what: the data set and its images, in words.
    """
    blocks = _blocks(pictures)
    most = max(len(group) for _, group in blocks)
    across = max(4, math.ceil(most / math.ceil(most / 5)))
    side = (WIDTH - 2 * MARGIN - (across - 1) * GAP) / across
    line, room = 0.135, int(side / 0.061)
    rows = [
        (kind if first == 0 else "", group[first : first + across])
        for kind, group in blocks
        for first in range(0, len(group), across)
    ]
    # As many lines as the longest of a row needs, so that every row starts at the same height.
    heights = [side + 0.06 + line * max(len(_caption(picture, room)) for picture in row) for _, row in rows]
    header = 0.24
    height = 0.48 + sum(heights) + sum(header * bool(kind) + GAP for kind, _ in rows)
    page = Page(height)
    alike = "The first images: no method is right where another is wrong"
    page.text(MARGIN, 0.15, "Where the methods disagree" if _disagree(pictures) else alike, 9)
    others = [f"{kind} {count:,}" for kind, count in counts.items() if not kind.startswith("only")]
    page.text(MARGIN, 0.32, ", ".join([what, *others]), 7.5, FAINT)
    top = 0.48
    for (kind, row), tall in zip(rows, heights, strict=True):
        if kind:
            page.text(MARGIN, top + 0.12, f"{kind[0].upper()}{kind[1:]}: {_shown(counts[kind], dict(blocks)[kind])}", 8)
            top += header
        for column, picture in enumerate(row):
            left = MARGIN + column * (side + GAP)
            page.image(left, top, side, picture.pixels)
            for number, (words, colour, weight) in enumerate(_caption(picture, room), 1):
                page.text(left, top + side + 0.03 + number * line, words, 7.5, colour, weight=weight)
        top += tall + GAP
    return page.figure


def _blocks(pictures: Sequence[Picture]) -> list[tuple[str, list[Picture]]]:
    """The images of each kind; one unnamed block for more than two methods, or if they never disagree."""
    if len(pictures[0].answers) > 2 or not _disagree(pictures):
        return [("", list(pictures))]
    return [(kind, list(group)) for kind, group in groupby(pictures, key=lambda picture: picture.kind)]


def _disagree(pictures: Sequence[Picture]) -> bool:
    """Whether some methods are right and others wrong about an image that is shown."""
    return any(len(set(picture.right.values())) > 1 for picture in pictures)


def _shown(count: int, shown: Sequence[Picture]) -> str:
    """How many images there are of a kind, and how many of them are in the picture."""
    return f"{count:,}" + (f", first {len(shown)} shown" if len(shown) < count else "")


def _caption(picture: Picture, room: int) -> list[tuple[str, str, str]]:
    """Lines of at most `room` letters with their colours and weights: the class, then an answer per method."""
    lines = [(words, INK, "bold") for words in _wrap(picture.truth, room - 3, 2)]
    for title, answer in picture.answers.items():
        right = picture.right[title]
        colour = RIGHT if right else WRONG
        # A right answer is the class above, so it is not repeated.
        prediction = f"{TICK if right else CROSS} {title}" + ("" if right else f": {answer}")
        lines += [(words, colour, "normal") for words in _wrap(prediction, room, 3, indent="\N{EM SPACE}")]
    return lines


@styled
def draw_eigencam(pictures: Sequence[Picture], what: str) -> Figure:
    """A column per image: the image, then the same image under every method's map.

    what: the data set.
    """
    titles = list(pictures[0].maps)
    across = max(len(pictures), 4)
    left, bar = max(0.62, 0.16 + 0.058 * max(map(len, titles))), 0.5
    side = min(1.1, (WIDTH - left - bar - MARGIN - (across - 1) * 0.05) / across)
    rows = ["image", *titles]
    names = [_wrap(picture.truth, int(side / 0.052), 4) for picture in pictures]
    blocks = _blocks(pictures)
    top = (0.74 if any(kind for kind, _ in blocks) else 0.5) + 0.1 * max(map(len, names))
    page = Page(top + len(rows) * (side + 0.05) + 0.04)
    page.text(MARGIN, 0.15, "EigenCAM of the last block's patches", 9)
    page.text(
        MARGIN, 0.32, f"{what}; first principal component, {_range(pictures)} of each image's variance", 7.5, FAINT
    )
    done = 0
    for kind, group in blocks:
        start, end = (left + number * (side + 0.05) for number in (done, done + len(group) - 1))
        done += len(group)
        if kind:
            page.text((start + end + side) / 2, 0.58, kind, 7.5, INK, ha="center")
            rule = page.axes(start + 0.02, 0.63, end + side - start - 0.04, 0.01)
            rule.axhline(0.5, color=FAINT, linewidth=0.8)
            rule.set_axis_off()
    for number, title in enumerate(rows):
        y = top + number * (side + 0.05)
        page.text(left - 0.08, y + side / 2 + 0.04, title if number else "image", 7.5, INK, ha="right")
        for column, picture in enumerate(pictures):
            x = left + column * (side + 0.05)
            axes = page.image(x, y, side, picture.pixels)
            if number == 0:
                for place, words in enumerate(reversed(names[column])):
                    page.text(x + side / 2, top - 0.05 - 0.1 * place, words, 6, INK, ha="center")
                continue
            mapped = _overlay(axes, picture.pixels, picture.maps[title])
            _badge(axes, picture.right[title])
    last = left + len(pictures) * (side + 0.05)
    colours = page.axes(last + 0.05, top + side + 0.05, 0.09, len(titles) * (side + 0.05) - 0.05)
    scale = page.figure.colorbar(mapped, cax=colours, ticks=[0, 1])
    scale.outline.set_visible(False)
    colours.tick_params(labelsize=7, colors=FAINT, labelcolor=INK, length=2)
    return page.figure


def _range(pictures: Sequence[Picture]) -> str:
    """The shares of variance of all maps, in words."""
    shares = [100 * share for picture in pictures for share in picture.shares.values()]
    low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _overlay(axes: Axes, pixels: NDArray[np.uint8], grid: NDArray[np.float64]) -> Any:
    high, wide = pixels.shape[:2]
    axes.images[0].set(data=pixels @ LUMINANCE, cmap="gray", clim=(0, 255))
    return axes.imshow(
        grid,
        cmap=CAM_LOOK["colour_map"],
        alpha=CAM_LOOK["alpha"],
        interpolation=CAM_LOOK["interpolation"],
        extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
        vmin=0,
        vmax=1,
    )


def _badge(axes: Axes, right: bool) -> None:
    """A tick or a cross in the top right corner."""
    axes.text(
        0.97,
        0.97,
        TICK if right else CROSS,
        transform=axes.transAxes,
        ha="right",
        va="top",
        size=7,
        color="white",
        weight="bold",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": RIGHT if right else WRONG, "linewidth": 0},
    )


@styled
def draw_prompts(start: Tensor, learned: Sequence[LearnedPrompts]) -> Figure:
    """Random tokens and those of every method, a row per token, all on one scale around zero."""
    panels: list[tuple[str, NDArray[np.float64], Stage | None]] = [
        (f"random start, standard deviation {RANDOM_STD}", start.numpy(), None),
        *((f"{one.title}, {stage.name}", stage.tokens.numpy(), stage) for one in learned for stage in one.stages),
    ]
    # The few largest of CLIP's dimensions would leave everything else white.
    limit = float(np.quantile(np.abs(np.concatenate([values for _, values, _ in panels])), 0.995))
    row, title, left, right = 0.16, 0.25, 0.25, 1.42
    body = sum(title + row * len(values) + 0.06 for _, values, _ in panels)
    page = Page(0.22 + body + 0.3)
    page.text(MARGIN, 0.15, f"Text prompts of the first layer, {display_name(learned[0].run.config.dataset)}", 9)
    top = 0.2
    for number, (name, values, stage) in enumerate(panels):
        page.text(left, top + title - 0.07, name, 8)
        if number == 1:
            page.text(WIDTH - right + 0.08, top + title - 0.07, "nearest word", 7.5, FAINT)
        axes = page.axes(left, top + title, WIDTH - left - right, row * len(values))
        drawn = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_yticks(range(len(values)), [str(token + 1) for token in range(len(values))])
        axes.tick_params(labelsize=7, length=0, labelcolor=INK, colors=FAINT)
        axes.tick_params(axis="x", length=2, labelbottom=number == len(panels) - 1)
        for spine in axes.spines.values():
            spine.set_color("#d1d5db")
        for token, near in enumerate(stage.cosine if stage else ()):
            y = top + title + row * (token + 0.5) + 0.04
            page.text(WIDTH - right + 0.08, y, _printable(near[0].word, near[0].token), 7.5)
        top += title + row * len(values) + 0.06
    page.text(left, top + 0.26, "dimension of the token embedding", 7.5, FAINT)
    colours = page.axes(WIDTH - 0.52, 0.2 + title, 0.09, body - title - 0.06)
    scale = page.figure.colorbar(drawn, cax=colours, extend="both", extendfrac=0.03)
    scale.outline.set_visible(False)
    colours.tick_params(labelsize=7, colors=FAINT, labelcolor=INK, length=2)
    return page.figure


def _printable(word: str, token: int) -> str:
    """The word where the font of the figures has its letters."""
    return word if all(ord(letter) < 0x250 for letter in word) else f"token {token}"


def _smooth(pixels: NDArray[np.uint8], side: float) -> str:
    """Smaller images than the page has dots for are enlarged smoothly."""
    return "bicubic" if pixels.shape[0] < 150 * side else "antialiased"


def _wrap(words: str, room: int, most: int, indent: str = "") -> list[str]:
    """At most `most` lines of at most `room` letters; what does not fit ends in an ellipsis."""
    how: dict[str, Any] = {"max_lines": most, "placeholder": " …", "break_on_hyphens": False}
    return textwrap.wrap(words, room, subsequent_indent=indent, **how)
