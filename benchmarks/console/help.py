"""Format the help of commands."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def examples(*lines: str) -> dict[str, Any]:
    """Make the typer settings of a command whose help ends in example lines."""
    return {"epilog": "\b\nexamples:\n" + "\n".join(f"  {line}" for line in lines), "context_settings": HELP_NAMES}
