"""Draw the qualitative pictures: predictions side by side, EigenCAM overlays, prompts as heat maps.

Shapes: S image size.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment.published import display_name
from benchmarks.plots.style import FAINT, INK, PAGE, heading, styled
from runner.config import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIGHT, WRONG = "#1a7f37", "#c62828"
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"

LUMINANCE = np.array([0.299, 0.587, 0.114])
"""Maps are drawn over the image without its colours, which would mix with the map's."""


@styled
def draw_predictions(record: Mapping[str, Any], pixels: Sequence[NDArray[np.uint8]]) -> Figure:
    """Draw every image with its class and every method's answer, below the numbers of images of each kind."""
    from matplotlib.figure import Figure

    picks, counts = record["picks"], record["agreement"]
    down = math.ceil(len(picks) / 5)
    across = max(4, math.ceil(len(picks) / down))
    side, line, room = PAGE / across - 0.1, 0.135, int(16 * PAGE / across)
    answers = [[_format_answer(pick, title, room) for title in pick["answers"]] for pick in picks]
    most_lines = max(sum(len(lines) for lines, _ in lines_of_pick) for lines_of_pick in answers)
    figure = Figure(figsize=(PAGE, down * (side + 0.36 + line * most_lines) + 0.7), layout="constrained")
    title = "The first images: no method is right where another is wrong"
    target, (seen, total) = Target.parse_unchecked(record["target"]), record["images"].values()
    subtitle = f"{display_name(target.dataset)}, {seen:,} of {total:,} images"
    if any(len(set(pick["right"].values())) > 1 for pick in picks):
        title = "Where the methods disagree"
        # More than two methods disagree in too many ways to be listed.
        listed = [f"{group} {count:,}" for group, count in counts.items()] if len(answers[0]) == 2 else []
        subtitle = ", ".join([subtitle, *listed])
    heading(figure, "\n".join([title, *textwrap.wrap(subtitle, 120)]))
    grid: Any = figure.subplots(down, across, squeeze=False)
    for panel in grid.flat:
        panel.set_axis_off()
    for panel, image, pick, lines_of_pick in zip(grid.flat, pixels, picks, answers, strict=False):
        panel.imshow(image, interpolation="bicubic")
        panel.set_title("\n".join(_wrap(pick["class"], room - 3, 2)), fontweight="bold", fontsize=7.5)
        y = -0.03
        for lines, colour in lines_of_pick:
            panel.text(0, y, "\n".join(lines), transform=panel.transAxes, color=colour, fontsize=7.5, va="top")
            y -= line * len(lines) / side
    return figure


def _format_answer(pick: Mapping[str, Any], title: str, room: int) -> tuple[list[str], str]:
    """Format a method's answer as lines of at most `room` letters and their colour."""
    # A right answer is the class above, so it is not repeated.
    if pick["right"][title]:
        return _wrap(f"{TICK} {title}", room, 2), RIGHT
    return _wrap(f"{CROSS} {title}: {pick['answers'][title]}", room, 3, indent="\N{EM SPACE}"), WRONG


@styled
def draw_eigencam(record: Mapping[str, Any], pixels: Sequence[NDArray[np.uint8]]) -> Figure:
    """Draw a column per image: the image, then the same image under every method's map."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    picks = record["picks"]
    titles = list(picks[0]["eigencam"])
    side = min(1.1, (PAGE - 1.3) / max(len(picks), 4))
    names = [_wrap(pick["class"], int(side / 0.052), 4) for pick in picks]
    height = 0.55 + 0.1 * max(map(len, names)) + (1 + len(titles)) * (side + 0.03)
    layout = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
    figure = Figure(figsize=(max(1.3 + len(picks) * side, PAGE / 2), height), layout=layout)
    panels: Any = figure.subplots(1 + len(titles), len(picks), squeeze=False)
    for row, title in enumerate(["image", *titles]):
        panels[row, 0].set_ylabel(title, rotation=0, ha="right", va="center")
        for panel, image, pick in zip(panels[row], pixels, picks, strict=True):
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
            if row == 0:
                panel.imshow(image, interpolation="bicubic")
                continue
            high, wide = image.shape[:2]
            panel.imshow(image @ LUMINANCE, cmap="gray", vmin=0, vmax=255, interpolation="bicubic")
            cam = panel.imshow(
                pick["eigencam"][title]["map"],
                cmap="inferno",
                alpha=0.55,
                interpolation="bicubic",
                extent=(-0.5, wide - 0.5, high - 0.5, -0.5),
                vmin=0,
                vmax=1,
            )
            mark, colour = (TICK, RIGHT) if pick["right"][title] else (CROSS, WRONG)
            badge = panel.text(0.97, 0.97, mark, transform=panel.transAxes, ha="right", va="top", size=7)
            badge.set(color="white", weight="bold")
            badge.set_bbox({"boxstyle": "round,pad=0.15", "facecolor": colour, "linewidth": 0})
    for panel, lines in zip(panels[0], names, strict=True):
        panel.set_title("\n".join(lines), fontsize=6, loc="center")
    scale = figure.colorbar(cam, ax=panels[1:], ticks=[0, 1], aspect=30, pad=0.01)
    scale.outline.set_visible(False)
    shares = [100 * cam["share_of_variance"] for pick in picks for cam in pick["eigencam"].values()]
    variance = " to ".join(dict.fromkeys((f"{min(shares):.0f}", f"{max(shares):.0f}")))
    name = display_name(Target.parse_unchecked(record["target"]).dataset)
    subtitle = f"{name}; first principal component, {variance} % of each image's variance"
    heading(figure, f"EigenCAM of the last block's patches\n{subtitle}")
    return figure


@styled
def draw_prompts(record: Mapping[str, Any], dataset: str) -> Figure:
    """Draw random tokens and those of every method, a row per token, all on one scale around zero."""
    from matplotlib.figure import Figure

    methods = record["methods"]
    stages = [
        (f"{method['title']}, {stage['name']}", stage["tokens"]) for method in methods for stage in method["stages"]
    ]
    values = [np.array(record["random"]["tokens"])]
    values += [np.array([token["values"] for token in tokens]) for _, tokens in stages]
    names = [f"random start, standard deviation {record['random']['std']}", *(name for name, _ in stages)]
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
    for panel, (_, tokens) in zip(panels[1:], stages, strict=True):
        panel.set_title("nearest word", loc="right", color=FAINT, fontsize=7.5)
        for start, token in enumerate(tokens):
            text, number = token["cosine"][0]["word"], token["cosine"][0]["token"]
            # The font of the plots does not have all letters.
            text = text if all(ord(letter) < 0x250 for letter in text) else f"token {number}"
            panel.text(1.01, start, text, transform=panel.get_yaxis_transform(), va="center", fontsize=7.5, color=INK)
    panels[-1].set_xlabel("dimension of the token embedding", fontsize=7.5)
    scale = figure.colorbar(image, ax=panels, extend="both", aspect=40)
    scale.outline.set_visible(False)
    heading(figure, f"Text prompts of the first layer, {display_name(dataset)}")
    return figure


def _wrap(words: str, room: int, most: int, indent: str = "") -> list[str]:
    """Return at most `most` lines of at most `room` letters; what does not fit ends in an ellipsis."""
    how: dict[str, Any] = {"max_lines": most, "placeholder": " …", "break_on_hyphens": False}
    return textwrap.wrap(words, room, subsequent_indent=indent, **how)
