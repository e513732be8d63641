"""Draw the qualitative pictures: predictions side by side, EigenCAM overlays, prompts as heat maps.

Right and wrong are marked by a tick and a cross as well as by colour.

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

from benchmarks.plots.style import FAINT, INK, PAGE, heading, styled
from benchmarks.qualitative.prompts import RANDOM_STD, Prompts
from benchmarks.results.published.tables import display_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIGHT, WRONG = "#1a7f37", "#c62828"
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"

CAM_LOOK: Mapping[str, Any] = {"colour_map": "inferno", "alpha": 0.55, "interpolation": "bicubic", "over": "luminance"}
"""How every map is drawn, whatever the method; over the image without its colours, which would mix with the map's."""

LUMINANCE = np.array([0.299, 0.587, 0.114])


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


@styled
def draw_predictions(pictures: Sequence[Picture], counts: Mapping[str, int], what: str) -> Figure:
    """Draw every image with its class and every method's answer; of two methods a block for each kind.

    counts: of all images, how many are of each kind. what: the data set and its images, in words.
    """
    from matplotlib.figure import Figure

    blocks = _group_by_kind(pictures)
    across = max(4, min(5, max(len(group) for _, group in blocks)))
    rows = [math.ceil(len(group) / across) for _, group in blocks]
    side, line, room = PAGE / across - 0.1, 0.135, int(16 * PAGE / across)
    answers = [[_format_answer(picture, title, room) for title in picture.answers] for picture in pictures]
    most_lines = max(sum(len(lines) for lines, _ in own) for own in answers)
    height = sum(rows) * (side + 0.36 + line * most_lines) + 0.3 * len(blocks) + 0.4
    figure = Figure(figsize=(PAGE, height), layout="constrained")
    disagree = any(len(set(picture.right.values())) > 1 for picture in pictures)
    first = "The first images: no method is right where another is wrong"
    others = [f"{kind} {count:,}" for kind, count in counts.items() if not kind.startswith("only")]
    heading(figure, f"{'Where the methods disagree' if disagree else first}\n{', '.join([what, *others])}")
    parts: Any = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=rows)
    remaining = iter(answers)
    for part, (kind, group), down in zip(parts[:, 0], blocks, rows, strict=True):
        if kind:
            shown = f", first {len(group)} shown" if len(group) < counts[kind] else ""
            part.suptitle(f"{kind[0].upper()}{kind[1:]}: {counts[kind]:,}{shown}", x=0.01, ha="left", fontsize=8)
        panels = list(part.subplots(down, across, squeeze=False).flat)
        for panel in panels:
            panel.set_axis_off()
        for panel, picture in zip(panels, group, strict=False):
            panel.imshow(picture.pixels, interpolation="bicubic")
            panel.set_title("\n".join(_wrap(picture.truth, room - 3, 2)), fontweight="bold", fontsize=7.5)
            y = -0.03
            for lines, colour in next(remaining):
                text = "\n".join(lines)
                panel.text(0, y, text, transform=panel.transAxes, color=colour, fontsize=7.5, va="top")
                y -= line * len(lines) / side
    return figure


def _group_by_kind(pictures: Sequence[Picture]) -> list[tuple[str, list[Picture]]]:
    """Group the images by kind; one unnamed group for more than two methods, or if they never disagree."""
    if len(pictures[0].answers) > 2 or all(len(set(picture.right.values())) == 1 for picture in pictures):
        return [("", list(pictures))]
    return [(kind, list(group)) for kind, group in groupby(pictures, key=lambda picture: picture.kind)]


def _format_answer(picture: Picture, title: str, room: int) -> tuple[list[str], str]:
    """Format a method's answer as lines of at most `room` letters and their colour."""
    # A right answer is the class above, so it is not repeated.
    if picture.right[title]:
        return _wrap(f"{TICK} {title}", room, 2), RIGHT
    return _wrap(f"{CROSS} {title}: {picture.answers[title]}", room, 3, indent="\N{EM SPACE}"), WRONG


@styled
def draw_eigencam(pictures: Sequence[Picture], what: str) -> Figure:
    """Draw a column per image: the image, then the same image under every method's map. what: the data set."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    titles = list(pictures[0].maps)
    side = min(1.1, (PAGE - 1.3) / max(len(pictures), 4))
    names = [_wrap(picture.truth, int(side / 0.052), 4) for picture in pictures]
    height = 0.75 + 0.1 * max(map(len, names)) + (1 + len(titles)) * (side + 0.03)
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(max(1.3 + len(pictures) * side, PAGE / 2), height), layout=layout)
    panels: Any = figure.subplots(1 + len(titles), len(pictures), squeeze=False)
    for row, title in enumerate(["image", *titles]):
        panels[row, 0].set_ylabel(title, rotation=0, ha="right", va="center")
        for panel, picture in zip(panels[row], pictures, strict=True):
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
            if row == 0:
                panel.imshow(picture.pixels, interpolation="bicubic")
                continue
            high, wide = picture.pixels.shape[:2]
            panel.imshow(picture.pixels @ LUMINANCE, cmap="gray", vmin=0, vmax=255, interpolation="bicubic")
            cam = panel.imshow(
                picture.maps[title],
                cmap=CAM_LOOK["colour_map"],
                alpha=CAM_LOOK["alpha"],
                interpolation=CAM_LOOK["interpolation"],
                extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
                vmin=0,
                vmax=1,
            )
            mark, colour = (TICK, RIGHT) if picture.right[title] else (CROSS, WRONG)
            badge = panel.text(0.97, 0.97, mark, transform=panel.transAxes, ha="right", va="top", size=7)
            badge.set(color="white", weight="bold")
            badge.set_bbox({"boxstyle": "round,pad=0.15", "facecolor": colour, "linewidth": 0})
    for panel, lines in zip(panels[0], names, strict=True):
        # Two empty lines leave room for the kind.
        panel.set_title("\n".join(["", "", *lines]), fontsize=6, loc="center")
    first = 0
    for kind, group in _group_by_kind(pictures):
        above = 12 + 7 * max(map(len, names))
        text = panels[0, first].annotate(kind, (0, 1), (0, above), "axes fraction", "offset points", fontsize=7.5)
        text.set_in_layout(False)
        first += len(group)
    scale = figure.colorbar(cam, ax=panels[1:], ticks=[0, 1], aspect=30, pad=0.01)
    scale.outline.set_visible(False)
    shares = [100 * share for picture in pictures for share in picture.shares.values()]
    variance = " to ".join(dict.fromkeys((f"{min(shares):.0f}", f"{max(shares):.0f}")))
    subtitle = f"{what}; first principal component, {variance} % of each image's variance"
    heading(figure, f"EigenCAM of the last block's patches\n{subtitle}")
    return figure


@styled
def draw_prompts(start: Tensor, learned: Sequence[Prompts]) -> Figure:
    """Draw random tokens and those of every method, a row per token, all on one scale around zero."""
    from matplotlib.figure import Figure

    stages = [(f"{one.title}, {stage.name}", stage) for one in learned for stage in one.stages]
    values = [start.numpy(), *(stage.tokens.numpy() for _, stage in stages)]
    names = [f"random start, standard deviation {RANDOM_STD}", *(name for name, _ in stages)]
    # The few largest of CLIP's dimensions would leave everything else white.
    limit = float(np.quantile(np.abs(np.concatenate(values)), 0.995))
    counts = [len(tokens) for tokens in values]
    height = 0.6 + 0.16 * sum(counts) + 0.28 * len(counts)
    figure = Figure(figsize=(PAGE, height), layout="constrained")
    panels: Any = figure.subplots(len(values), 1, squeeze=False, sharex=True, height_ratios=counts)[:, 0]
    for panel, tokens, name in zip(panels, values, names, strict=True):
        image = panel.imshow(tokens, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        panel.set_title(name)
        panel.set_yticks(range(len(tokens)), [str(token + 1) for token in range(len(tokens))])
        panel.tick_params(axis="y", length=0)
        panel.spines[:].set_color("#d1d5db")
    for panel, (_, stage) in zip(panels[1:], stages, strict=True):
        panel.set_title("nearest word", loc="right", color=FAINT, fontsize=7.5)
        for token, words in enumerate(stage.cosine):
            text = _format_word(words[0].word, words[0].token)
            panel.text(1.01, token, text, transform=panel.get_yaxis_transform(), va="center", fontsize=7.5, color=INK)
    panels[-1].set_xlabel("dimension of the token embedding", fontsize=7.5)
    scale = figure.colorbar(image, ax=panels, extend="both", aspect=40)
    scale.outline.set_visible(False)
    heading(figure, f"Text prompts of the first layer, {display_name(learned[0].run.config.dataset)}")
    return figure


def _format_word(word: str, token: int) -> str:
    """Return the word if the font of the plots has its letters."""
    return word if all(ord(letter) < 0x250 for letter in word) else f"token {token}"


def _wrap(words: str, room: int, most: int, indent: str = "") -> list[str]:
    """Return at most `most` lines of at most `room` letters; what does not fit ends in an ellipsis."""
    how: dict[str, Any] = {"max_lines": most, "placeholder": " …", "break_on_hyphens": False}
    return textwrap.wrap(words, room, subsequent_indent=indent, **how)
