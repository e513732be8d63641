"""`procap clean`: delete caches that later commands make again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import command, switch
from benchmarks.console.output import columns, note, show, show_json
from procap.errors import check_names
from shards.default_paths import cache_home

CACHES = {
    "features": "image features that runs have stored",
    "mirrors": "copies of data sets behind a URL",
    "compiled": "kernels that torch has compiled",
}
"""Folders of the cache by name. Packed data, results and records of devices are none of them."""


@command("procap clean", "procap clean features --yes")
def clean(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help=f"{', '.join(CACHES)}")] = None,
    yes: Annotated[bool, switch("--yes", "delete them; without it they are listed")] = False,
) -> int:
    """List the caches that later commands make again, with their sizes, and delete them with --yes.

    Packed data sets, results and downloaded weights stay.
    """
    check_names("cache", names or (), CACHES)
    folders = {name: cache_home() / name for name in names or CACHES}
    files = {name: filter(Path.is_file, folder.rglob("*")) for name, folder in folders.items() if folder.is_dir()}
    sizes = {name: sum(file.lstat().st_size for file in found) for name, found in files.items()}
    rows = [(name, f"{size / 1e6:,.1f} MB", str(folders[name]), CACHES[name]) for name, size in sizes.items()]
    show(columns(("cache", "size", "folder", "what"), rows))
    if yes:
        # The folder itself stays: it may be a link to another disk.
        for path in (path for name in sizes for path in folders[name].iterdir()):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    total = f"{sum(sizes.values()) / 1e6:,.1f} MB"
    note(f"{total} deleted" if yes else f"{total} in all; nothing was deleted: repeat with --yes")
    show_json({"deleted": yes, "bytes": sizes, "folders": {name: str(folders[name]) for name in sizes}})
    return 0
