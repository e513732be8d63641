"""A folder that is written whole or not at all, in the place of an older one of its kind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from procap.errors import UsageError, UserError

HEAD = 2000
"""Characters of a page in which its mark stands."""


def check_replaceable(folder: Path, mark: str) -> None:
    """Raise UsageError unless `folder` is absent, empty or an old report: its page has `mark` at its beginning."""
    page = folder / "index.html"
    if folder.is_dir() and any(folder.iterdir()):
        head = page.read_text(encoding="utf-8", errors="replace")[:HEAD] if page.is_file() else ""
        if mark not in head:
            raise UsageError(f"{folder} is not empty and no report: name another folder with --out")
    elif folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder with --out")


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then put it in the place of `folder`. Raises UserError where it cannot."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            fill(fresh)
            fresh.chmod(0o755)
            if folder.exists():
                os.replace(folder, fresh.with_suffix(".old"))
                os.replace(fresh, folder)
                # Also what one left that was killed here.
                for replaced in folder.parent.glob(f".{folder.name}.*.old"):
                    shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; name another --out") from error
