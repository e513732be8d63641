"""Draw ProCAP with its prompt slots, in the terms of the paper, and the options that decide how it is read.

    python -m benchmarks.studies.method_diagram

Writes docs/procap.svg. The file has its own background, light or dark by what the viewer prefers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

OUT = Path(__file__).parents[2] / "docs" / "procap.svg"
WIDTH, HEIGHT = 1240, 1114
LAYERS, DEPTH, TOKENS = 12, 9, 4
PITCH, BOX = 40, 26
VISION, TEXT = 205, 1035
"""Centers of the two towers."""
V, T, MIDDLE = 470, 770, 620
"""Centers of the two columns of prompt tokens, and of what is between them."""

# Class of a shape: fill and stroke on a light background, then on a dark one.
COLOURS = {
    "page": ("#ffffff", "#d0d7de", "#161b22", "#30363d"),
    "frozen": ("#eef0f3", "#8c959f", "#2b313a", "#7d8590"),
    "vision": ("#d6e6fb", "#2f6fbd", "#173a63", "#6ba7f0"),
    "text": ("#fde3c8", "#c0691b", "#5a3310", "#f0a35e"),
    "attention": ("#ece3fa", "#7a52b3", "#3b2a5c", "#b596ea"),
    "loss": ("#d9f0df", "#2c8a4b", "#173f26", "#5fc483"),
    "word": ("#ffffff", "#8c959f", "#161b22", "#7d8590"),
}
INK, SOFT, OPTION = ("#1f2328", "#e6edf3"), ("#59636e", "#9198a1"), ("#0a6c74", "#56c7cf")


def style() -> str:
    """Write the style sheet: colours for light and, in a media query, for dark backgrounds."""
    sheets = []
    for dark in (0, 1):
        rules = [f".{name}{{fill:{c[2 * dark]};stroke:{c[2 * dark + 1]}}}" for name, c in COLOURS.items()]
        lines = [(f"line-{name}", c[2 * dark + 1]) for name, c in COLOURS.items()] + [("line", SOFT[dark])]
        rules += [f".{name}{{fill:none;stroke:{colour}}}.{name}-head{{fill:{colour}}}" for name, colour in lines]
        inks = (("t", INK), ("soft", SOFT), ("o", OPTION))
        rules += [f".{name}{{fill:{colours[dark]}}}" for name, colours in inks]
        sheets.append("".join(rules))
    fonts = (
        "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;text-anchor:middle}"
        ".o{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:11px}"
        ".soft{font-size:11.5px}.l{text-anchor:start}.r{text-anchor:end}.b{font-weight:bold;font-size:14px}"
        "rect,path{stroke-width:1.2}.i{font-style:italic}"
    )
    return f"<style>{fonts}{sheets[0]}@media(prefers-color-scheme:dark){{{sheets[1]}}}</style>"


def arrow_heads() -> str:
    """Define one arrow head for every colour of a line."""
    names = ["line", *(f"line-{name}" for name in COLOURS)]
    return "<defs>" + "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{name}-head" d="M0 0L8 4L0 8z"/></marker>'
        for name in names
    ) + "</defs>"  # fmt: skip


def rect(kind: str, x: float, y: float, width: float, height: float, radius: float = 5) -> str:
    """Draw a box around its center x, from its upper edge y."""
    place = f'x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect class="{kind}" {place}/>'


def text(words: str, x: float, y: float, kind: str = "t") -> str:
    """Write words; `_{..}` and `^{..}` are lowered and raised."""
    parts, shift = [], 0
    for part in re.split(r"([_^]\{[^}]*\})", words):
        is_script = part[:2] in ("_{", "^{")
        level = (4 if part[0] == "_" else -5) if is_script else 0
        size = ' font-size="9.5"' if is_script else ""
        content = escape(part[2:-1] if is_script else part, quote=False)
        if content:
            parts.append(f'<tspan dy="{level - shift}"{size}>{content}</tspan>' if level - shift or size else content)
            shift = level
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{"".join(parts)}</text>'


def box(kind: str, words: str, x: float, y: float, width: float, height: float = BOX) -> str:
    return rect(kind, x, y, width, height) + text(words, x, y + height / 2 + 4.5)


def arrow(points: Sequence[tuple[float, float]], kind: str = "line", *, head: bool = True, dashed: bool = False) -> str:
    """Draw a line through points, with a head at its end."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    end = f' marker-end="url(#{kind})"' if head else ""
    return f'<path class="{kind}" d="{path}"{end}{DASHES * dashed}/>'


DASHES = ' stroke-dasharray="4 3"'


def layer_y(layer: int) -> float:
    """The upper edge of a layer of the towers, counted from 1 at the bottom."""
    return 690 - (layer - 1) * PITCH


def towers() -> list[str]:
    """Draw the layers of both frozen towers, and the arrow of the level that enters each prompted one."""
    found = []
    for center, kind, title, letter in ((VISION, "vision", "image tower", "I"), (TEXT, "text", "text tower", "T")):
        side = 1 if center < MIDDLE else -1
        for layer in range(1, LAYERS + 1):
            y = layer_y(layer)
            found.append(box("frozen", f"layer {layer}", center, y, 170))
            if layer < LAYERS:
                found.append(arrow([(center, y), (center, y - PITCH + BOX + 1)]))
            if layer <= DEPTH:
                token = V - 42 if side == 1 else T + 42
                found.append(arrow([(token, y + BOX / 2), (center + side * 86, y + BOX / 2)], f"line-{kind}"))
        name, top = f"frozen CLIP {title} E_{{{letter}}}", layer_y(LAYERS)
        found.append(text(name, center - side * 12, top - 32, "t b l" if side == -1 else "t b r"))
        found.append(arrow([(center, top), (center, top - 69)]))
        found.append(arrow([(center, layer_y(1) + BOX + 34), (center, layer_y(1) + BOX + 1)]))
    notes = (
        ("level ℓ enters layer ℓ", 357, "soft"), ("in place of level ℓ − 1", 357, "soft"), ("inject · depth", 357, "o"),
        ("layers 10 to 12 keep", 882, "soft"), ("the rows of level 9", 882, "soft"),
    )  # fmt: skip
    return found + [text(words, x, layer_y(11) + 8 + 16 * (n % 3), kind) for n, (words, x, kind) in enumerate(notes)]


def levels() -> list[str]:
    """Draw the nine levels of both modalities and the cross-attention between consecutive ones."""
    found = [text("visual prompts", V, layer_y(DEPTH) - 14, "t"), text("textual prompts", T, layer_y(DEPTH) - 14, "t")]
    for level in range(DEPTH + 1):
        y = layer_y(level) if level else layer_y(1) + PITCH + 8
        found += [box("vision", f"V_{{{level}}}", V, y, 84), box("text", f"T_{{{level}}}", T, y, 84)]
        if level:
            below = (layer_y(level - 1) if level > 1 else layer_y(1) + PITCH + 8) - 1
            found += [
                arrow([(V - 18, below), (V - 18, y + BOX + 1)], "line-vision"),
                arrow([(T + 18, below), (T + 18, y + BOX + 1)], "line-text"),
                arrow([(T - 43, below + 8), (V + 43, y + BOX - 6)], "line-attention"),
                arrow([(V + 43, below + 8), (T - 43, y + BOX - 6)], "line-attention"),
            ]
    return found


def attention_notes() -> list[str]:
    """Describe one level of cross-attention, above the levels."""
    y = layer_y(LAYERS) - 6
    lines = (
        "each level ℓ, both directions from level ℓ − 1:",
        "V_{ℓ} = V_{ℓ−1} + MHA_{v}(V_{ℓ−1}, T_{ℓ−1}, T_{ℓ−1})",
        "T_{ℓ} = T_{ℓ−1} + MHA_{t}(T_{ℓ−1}, W_{p}V_{ℓ−1}, W_{p}V_{ℓ−1})",
    )
    found = [rect("attention", MIDDLE, y - 16, 430, 92)]
    for number, line in enumerate(lines):
        found.append(text(line, MIDDLE, y + 3 + 19 * number, "t" if number else "soft"))
    found += [text("W_{p}", MIDDLE - 44, layer_y(1) + BOX + 32, "soft")]
    found.append(text("norm · zero_output · shared_attention · heads · head_width", MIDDLE, y + 64, "o"))
    return found


def inputs() -> list[str]:
    """Draw the Gaussians below the levels, and the rows that enter the first layers."""
    y = layer_y(1) + 2 * PITCH + 54
    found = []
    for center, kind, mark in ((V, "vision", "v"), (T, "text", "t")):
        found.append(box(kind, f"μ^{{{mark}}},  log σ²^{{{mark}}}", center, y, 130, 30))
        found.append(arrow([(center, y - 1), (center, y - 59)], f"line-{kind}"))
    found += [
        text("training: μ + σ ⊙ ε,  ε ~ N(0, I)", MIDDLE, y - 32, "soft"),
        text("inference: μ", MIDDLE, y - 17, "soft"),
        box("loss", "L_{KL},  L_{2}", MIDDLE, y + 1, 92, 28),
        arrow([(V + 65, y + 15), (MIDDLE - 47, y + 15)], "line-vision"),
        arrow([(T - 65, y + 15), (MIDDLE + 47, y + 15)], "line-text"),
        text("deep_tokens", MIDDLE, y + 46, "o"),
    ]
    options = (
        ("n_ctx · vision_init_std", "logvar_init · logvar_lr_scale"),
        ("init_templates · template_init_combine", "init_std · logvar_min · logvar_max"),
    )
    for center, lines in zip((V - 40, T + 40), options, strict=True):
        found += [text(line, center, y + 46 + 15 * number, "o") for number, line in enumerate(lines)]
    top = layer_y(1) + BOX + 36
    patches = ("CLS", "word"), ("x_{1}", "frozen"), ("…", ""), ("x_{196}", "frozen"), ("V_{1}", "vision")
    words = ("SOS", "word"), ("T_{1}", "text"), ("class prompt", "word"), ("EOS", "word")
    found += [
        *cells(*patches, x=VISION - 92, y=top),
        text("patches of image x, then 4 prompt rows", VISION, top + 44, "soft"),
        *cells(*words, x=TEXT - 101, y=top),
        text("4 prompt rows, then the rest of the prompt of class k", TEXT, top + 44, "soft"),
    ]
    return found


def cells(*parts: tuple[str, str], x: float, y: float) -> list[str]:
    """Draw a row of tokens from x to the right."""
    found = []
    for words, kind in parts:
        width = max(26.0, 7.1 * len(re.sub(r"[_^{}]", "", words)) + 11)
        if kind:
            found.append(box(kind, words, x + width / 2, y, width, 24))
        else:
            found.append(text(words, x + width / 2, y + 16))
        x += width + 4
    return found


def losses() -> list[str]:
    """Draw both features, the classification, the InfoNCE heads, and the total loss."""
    top = layer_y(LAYERS)
    found = []
    sides = (VISION, "vision", "v", "g_{img}", "z"), (TEXT, "text", "t_{k}", "g_{text}", "c_{k}")
    for center, kind, feature, head, projected in sides:
        inward = 1 if center < MIDDLE else -1
        found += [
            box("word", feature, center, top - 96, 56),
            arrow([(center + inward * 29, top - 83), (MIDDLE - inward * 121, top - 83)]),
            arrow([(center, top - 97), (center, top - 117)]),
            box(kind, head, center, top - 145, 92),
            text("nce_hidden_width · nce_width", center, top - 167, "o"),
            text("nce_activation", center, top - 153, "o"),
            arrow([(center + inward * 47, top - 132), (MIDDLE - inward * 146, top - 132)], f"line-{kind}"),
            text(projected, center + inward * 100, top - 138),
        ]
    found += [
        box("loss", "L_{CE}:  cos(v, t_{k}) / τ", MIDDLE, top - 97, 240, 28),
        text("learn_logit_scale", MIDDLE, top - 56, "o"),
        box("loss", "L_{InfoNCE}:  z · c_{k} / τ_{p},  both directions", MIDDLE, top - 146, 290, 28),
        text("nce_temperature", MIDDLE, top - 153, "o"),
        box("loss", "L = L_{CE} + λ L_{InfoNCE} + β L_{KL} + γ L_{2}", MIDDLE, top - 212, 330, 30),
        text("nce_weight · kl_weight · l2_weight", MIDDLE, top - 219, "o"),
    ]
    return found


def class_prompts() -> list[str]:
    """Draw the three layouts of a class prompt, for EuroSAT's template and the class "river"."""
    y, left = 940, 250
    slots = [(f"T^{{{number}}}", "text") for number in range(1, TOKENS + 1)]
    phrase = ["a", "centered", "satellite", "photo", "of", "a"]
    rows: tuple[tuple[str, str, list[str]], ...] = (
        ("class_prompt=phrase", "default: tokens replace the first four words", phrase[TOKENS:]),
        ("class_prompt=maple", "further words are left out", []),
        ("class_prompt=template", "tokens before the whole template", phrase),
    )
    found = [
        text("Slots of the class prompt for the template “a centered satellite photo of a {}” and the class “river”; "
             "T^{1} … T^{4} start at “a”, “centered”, “satellite”, “photo”", MIDDLE, y - 18, "t"),
    ]  # fmt: skip
    for number, (option, meaning, words) in enumerate(rows):
        at = y + 4 + 52 * number
        found += [text(option, left - 16, at + 12, "o r"), text(meaning, left - 16, at + 28, "soft r")]
        content = [("SOS", "word"), *slots, *((word, "word") for word in words), ("river", "frozen"), (".", "word")]
        found += cells(*content, ("EOS", "word"), ("0", "word"), ("…", ""), x=left + 20, y=at + 2)
    legend = {
        "vision": "learned, image side", "text": "learned, text side", "attention": "learned cross-attention",
        "frozen": "frozen", "loss": "term of the loss", "": "option",
    }  # fmt: skip
    for number, (kind, meaning) in enumerate(legend.items()):
        at = y + 4 + 24 * number
        found += [rect(kind, 1010, at, 26, 15, 3) if kind else text("name", 1010, at + 11, "o")]
        found += [text(meaning, 1034, at + 12, "soft l")]
    return found


def diagram() -> str:
    """Return the whole drawing as SVG."""
    parts = [
        rect("page", WIDTH / 2, 1, WIDTH - 2, HEIGHT - 2, 8),
        *towers(), *levels(), *attention_notes(), *inputs(), *losses(), *class_prompts(),
    ]  # fmt: skip
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    title = "<title>ProCAP: Gaussian prompts of both modalities, refined by cross-attention</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}'
    return "\n".join([head + style() + arrow_heads(), *parts, "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(diagram(), encoding="utf-8")
    print(OUT)
