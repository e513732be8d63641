"""Locate the cache folder of this program, and the folder of packed data sets."""

from __future__ import annotations

import os
from pathlib import Path

from procap.errors import UsageError
from shards.urls import is_url

# Folders of the operating system, and places in them that hold other data.
SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
OTHER_FOLDERS = ("/dev/shm", "/usr/local", "/usr/share", "/usr/src")


def cache_home() -> Path:
    """Return the cache folder: `$PROCAP_HOME`, else `$XDG_CACHE_HOME/procap`, else `~/.cache/procap`."""
    if home := os.environ.get("PROCAP_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "procap"


def data_root(given: str = "") -> Path:
    """Return the folder of packed data sets: `--data`, else `$PROCAP_DATA`, else `data` in the cache; mirrors a URL."""
    text = given or os.environ.get("PROCAP_DATA") or str(cache_home() / "data")
    option = "--data" if given else "$PROCAP_DATA ="
    if is_url(text):
        # Imported here: every command calls this function, and the import takes a fifth of a second.
        from shards.mirror import mirror_root

        folder = mirror_root(text, cache_home())
    else:
        folder = Path(text).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder} is a file; name a folder")
    refuse_system_folder(option, folder)
    return folder


def refuse_system_folder(option: str, folder: Path) -> None:
    """Raise UsageError if a folder of the operating system would be written to with the rights of root."""
    real = Path(os.path.realpath(folder))
    inside = any(map(real.is_relative_to, SYSTEM_FOLDERS)) and not any(map(real.is_relative_to, OTHER_FOLDERS))
    if os.geteuid() == 0 and (inside or real == Path("/")):
        raise UsageError(f"{option} {folder} is a folder of the system, and this is root; name another folder")
