"""A Markdown table that is one in its source too."""

from __future__ import annotations

from collections.abc import Sequence


def pipes(headers: Sequence[str], body: Sequence[Sequence[str]], *, left: int) -> str:
    """`left` columns of text, the rest numbers, padded so that the source reads as a table too."""
    widths = [max(3, *(len(line[i]) for line in [headers, *body])) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(headers), f"| {' | '.join(rule)} |", *map(line, body)])
