"""`runtime.json`, as which a contest of runtime is kept: its version, and those that lie below a results folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = 2
"""What an older version of this program measured is measured again."""


def contests(results: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every contest of this version, with its file; what is none is left out, whoever measures writes it anew."""
    for file in sorted((results / "runtime").glob("*/runtime.json")):
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(said, dict) and said.get("schema") == SCHEMA and {"backbone", "rows"} <= said.keys():
            yield file, said
