"""Locate the cache folder of this program, and the folder of packed data sets."""

from __future__ import annotations

import os
from pathlib import Path

from procap.errors import UsageError
from shards.urls import is_url, require_location


def cache_home() -> Path:
    """Return the cache folder: `$PROCAP_HOME`, else `$XDG_CACHE_HOME/procap`, else `~/.cache/procap`."""
    if home := os.environ.get("PROCAP_HOME"):
        return Path(home).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "procap"
    except RuntimeError:
        raise UsageError("this user has no home folder: set PROCAP_HOME to a folder for the cache, or HOME") from None


def data_root(location: str = "") -> Path:
    """Return the folder of packed data sets: `--data`, else `$PROCAP_DATA`, else `data` in the cache; mirrors a URL."""
    text = location or os.environ.get("PROCAP_DATA") or str(cache_home() / "data")
    if is_url(text):
        # Imported here: every command calls this function, and the import takes a fifth of a second.
        from shards.mirror import mirror_root

        return mirror_root(text, cache_home())
    require_location(text)
    return Path(text).expanduser()
