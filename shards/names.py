"""Names from outside that become folders, lines or terminal output: which of them are accepted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from procap.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of data sets and splits; they become folders."""
PACKED_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
"""Names that users give to their data sets: lower case."""
# Items of a list that a message names.
MAX_NAMED = 3
# Control characters, line ends of Unicode, and halves of surrogate pairs, which no file can store as UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def has_control(text: str) -> bool:
    """Whether `text` holds a character that ends a line, controls a terminal or is no character."""
    return _CONTROL.search(text) is not None


def require_text(folder: Path) -> None:
    """Raise UsageError unless the path of a folder, which stands in files, is UTF-8 without control characters."""
    if has_control(path := str(folder.absolute())):
        raise UsageError(f"{path}: rename this folder, its path must be UTF-8 without control characters")


def unsafe_path(path: str) -> str:
    """Explain why a relative path is refused; "" for a plain path that stays inside its folder."""
    if not path or path.startswith("/"):
        return "is not a relative path"
    if has_control(path):
        return "holds characters that do not belong in a path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "is not a plain path inside the folder of the images"
    return ""


def unfit_texts(classnames: Iterable[str], templates: Iterable[str]) -> Iterator[str]:
    """Explain why class names or templates cannot be stored as lines; equal names are allowed."""
    for label, name in enumerate(classnames):
        # Underscores become blanks in prompts, so a name of underscores alone would leave no word.
        if has_control(name) or name != name.strip() or not name.replace("_", " ").strip():
            yield f"class name {label} is {name!r:.200}"
    for template in templates:
        if has_control(template) or template != template.strip():
            yield f"the template is {template!r:.200}"
        # Prompts are made by `str.format`, which reads all other braces as fields.
        elif template.count("{}") != 1 or "{" in template.replace("{}", "") or "}" in template.replace("{}", ""):
            yield f"the template {template!r:.200} must hold one {{}} and no other brace"


def first_few(names: Sequence[str]) -> str:
    """Format the first of many names in ASCII, and how many more there are."""
    return join_first([ascii(name) for name in names])


def join_first(texts: Sequence[str], limit: int = MAX_NAMED) -> str:
    """Join the first of many texts, and say how many more there are."""
    more = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
