"""Draw the qualitative pictures: predictions next to each other, EigenCAM overlays, prompts as heat maps.

Shapes: S image size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment.published import display_name
from benchmarks.plots.style import FAINT, INK, PAGE, heading, panels
from runner.config import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RIGHT, WRONG = "#1a7f37", "#c62828"
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"
ACROSS, LETTERS = 4, 26
"""Images of predictions in a row, and letters that fit below one."""
LUMINANCE = np.array([0.299, 0.587, 0.114])
"""Maps are drawn over the image without its colours, which would mix with the map's."""


def draw_predictions(record: Mapping[str, Any], pixels: Sequence[NDArray[np.uint8]]) -> Figure:
    """Draw each image with its class and the answer of each method."""
    picks, line = record["picks"], 0.08
    names, answers = [textwrap.fill(pick["class"], LETTERS) for pick in picks], list[dict[str, str]]()
    for pick in picks:
        # A right answer is the class above, so it is not repeated.
        said = {name: "" if pick["right"][name] else f": {answer}" for name, answer in pick["answers"].items()}
        texts = {name: f"{CROSS if text else TICK} {name}{text}" for name, text in said.items()}
        answers.append({name: textwrap.fill(text, LETTERS, max_lines=3) for name, text in texts.items()})
    lines = [
        sum(text.count("\n") + 1 for text in (name, *texts.values()))
        for name, texts in zip(names, answers, strict=True)
    ]
    figure, axes = panels(len(picks), 1.65 + 0.15 * max(lines), across=ACROSS)
    for panel, image, pick, name, texts in zip(axes, pixels, picks, names, answers, strict=True):
        panel.set_axis_off()
        panel.imshow(image, interpolation="bicubic")
        panel.set_title(name, fontweight="bold", fontsize=7.5)
        y = -0.03
        for title, text in texts.items():
            colour = RIGHT if pick["right"][title] else WRONG
            panel.text(0, y, text, transform=panel.transAxes, color=colour, fontsize=7.5, va="top")
            y -= line * (text.count("\n") + 1)
    target, (seen, total) = Target.parse_unchecked(record["target"]), record["images"].values()
    heading(figure, f"Answers of the methods\n{display_name(target.dataset)}, {seen:,} of {total:,} images")
    return figure


def draw_eigencam(record: Mapping[str, Any], pixels: Sequence[NDArray[np.uint8]]) -> Figure:
    """Draw a column per image: the image, then the same image under the map of each method."""
    picks = record["picks"]
    titles = list(picks[0]["eigencam"])
    side = min(1.1, (PAGE - 1.3) / max(len(picks), 4))
    figure, axes = panels((1 + len(titles)) * len(picks), side + 0.1, across=len(picks))
    for number, panel in enumerate(axes):
        row, column = divmod(number, len(picks))
        image, pick = pixels[column], picks[column]
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
        if row == 0:
            panel.imshow(image, interpolation="bicubic")
            panel.set_title(textwrap.fill(pick["class"], int(side / 0.052)), fontsize=6, loc="center")
            continue
        title = titles[row - 1]
        high, wide = image.shape[:2]
        panel.imshow(image @ LUMINANCE, cmap="gray", vmin=0, vmax=255, interpolation="bicubic")
        # The map has a value for each patch: `extent` stretches it over the pixels of the image.
        over: dict[str, Any] = {"alpha": 0.55, "extent": (-0.5, wide - 0.5, high - 0.5, -0.5), "vmin": 0, "vmax": 1}
        panel.imshow(pick["eigencam"][title], cmap="inferno", interpolation="bicubic", **over)
    for title, panel in zip(["image", *titles], axes[:: len(picks)], strict=True):
        panel.set_ylabel(title, rotation=0, ha="right", va="center")
    name = display_name(Target.parse_unchecked(record["target"]).dataset)
    heading(figure, f"EigenCAM of the last block's patches\n{name}; first principal component, from low to high")
    return figure


def draw_prompts(record: Mapping[str, Any], dataset: str) -> Figure:
    """Draw random tokens and those of every method, a row per token, all on one scale around zero."""
    from matplotlib.figure import Figure

    parts: list[tuple[str, Any, list[Any]]] = [("random start", record["random"], [])]
    for method in record["methods"]:
        for stage in method["stages"]:
            values = [token["values"] for token in stage["tokens"]]
            parts.append((f"{method['title']}, {stage['name']}", values, stage["tokens"]))
    counts = [len(values) for _, values, _ in parts]
    # The few largest of CLIP's dimensions would leave everything else white.
    limit = float(np.quantile(np.abs(np.concatenate([values for _, values, _ in parts])), 0.995))
    figure = Figure(figsize=(PAGE, 0.6 + 0.16 * sum(counts) + 0.28 * len(counts)), layout="constrained")
    axes: Any = figure.subplots(len(parts), 1, squeeze=False, sharex=True, height_ratios=counts)[:, 0]
    for panel, (name, values, tokens) in zip(axes, parts, strict=True):
        image = panel.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        panel.set_title(name)
        panel.set_yticks(range(len(values)), [str(number) for number in range(1, len(values) + 1)])
        panel.tick_params(axis="y", length=0)
        panel.spines[:].set_color("#d1d5db")
        if tokens:
            panel.set_title("nearest word", loc="right", color=FAINT, fontsize=7.5)
        for number, token in enumerate(tokens):
            word = token["cosine"][0]
            # The font of the plots does not have all letters.
            text = word["word"] if all(ord(letter) < 0x250 for letter in word["word"]) else f"token {word['token']}"
            # Right of the panel: x in parts of its width, y in rows of the heat map.
            panel.text(1.01, number, text, transform=panel.get_yaxis_transform(), va="center", fontsize=7.5, color=INK)
    axes[-1].set_xlabel("dimension of the token embedding", fontsize=7.5)
    scale = figure.colorbar(image, ax=axes, extend="both", aspect=40)
    scale.outline.set_visible(False)
    heading(figure, f"Text prompts of the first layer, {display_name(dataset)}")
    return figure
