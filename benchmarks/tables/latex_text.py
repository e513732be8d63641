"""Text and rows as LaTeX reads them: pdfLaTeX with nothing but booktabs, XeLaTeX and LuaLaTeX likewise."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
    "`": r"\textquoteleft{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "−": r"$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "τ": r"$\tau$",
    "²": r"$^2$",
    "₂": r"$_2$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
}
ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0308": '"',
    "\u030a": "r",
    "\u030c": "v",
    "\u0327": "c",
}


def escape(text: str) -> str:
    """`text` as plain type, with its usual signs and accents; any other sign by its number, as U+1F600.

    What stands between backticks is a command, in the type of one.
    """
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:
        # Backticks that are no pairs are signs like any other.
        parts = ["`".join(parts)]
    return "".join(rf"\texttt{{{_plain(part)}}}" if place % 2 else _plain(part) for place, part in enumerate(parts))


def _plain(text: str) -> str:
    # Two hyphens, as flags have them, would be set as a dash.
    return "".join("{}-" if text[place - 1 : place + 1] == "--" else _sign(sign) for place, sign in enumerate(text))


def _sign(sign: str) -> str:
    if sign in SIGNS:
        return SIGNS[sign]
    if " " <= sign <= "\x7e":
        return sign
    letter, *marks = list(unicodedata.normalize("NFD", sign))
    if letter.isascii() and letter.isalpha() and len(marks) == 1 and marks[0] in ACCENTS:
        return rf"\{ACCENTS[marks[0]]}{{{letter}}}"
    return f"U+{ord(sign):04X}"


def row(cells: Sequence[str]) -> str:
    """Cells that are LaTeX already, as one line of a tabular."""
    # A line that begins with a bracket would be read as an argument of the line break before it.
    first, *rest = cells
    return " & ".join(["{}" + first if first.startswith("[") else first, *rest]) + r" \\"
