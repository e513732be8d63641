"""Replace a folder as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from procap.errors import UsageError, UserError

HEAD = 2000
"""Characters of a page that contain its mark."""


def check_replaceable(folder: Path, mark: str) -> None:
    """Raise UsageError unless `folder` is absent, empty, or an old report: its page has `mark` near its beginning."""
    page = folder / "index.html"
    if folder.is_dir() and any(folder.iterdir()):
        head = page.read_text(encoding="utf-8", errors="replace")[:HEAD] if page.is_file() else ""
        if mark not in head:
            raise UsageError(f"{folder} is not empty and no report: name another folder with --out")
    elif folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: name a folder with --out")


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then rename it to `folder`. Raises UserError if that is not possible."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            fill(fresh)
            fresh.chmod(0o755)
            if folder.exists():
                os.replace(folder, fresh.with_suffix(".old"))
                os.replace(fresh, folder)
                # Includes folders left by a process that was killed at this point.
                for replaced in folder.parent.glob(f".{folder.name}.*.old"):
                    shutil.rmtree(replaced, ignore_errors=True)
            else:
                os.replace(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; name another --out") from error
