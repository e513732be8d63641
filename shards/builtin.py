"""Data sets that need nobody's files are packed when they are first needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def make_ready(names: Iterable[str], data_root: Path) -> None:
    """Draw or unpack the generated and the bundled sets among `names` that are not packed in `data_root` yet.

    Those behind a URL and those whose raw files only the user has are left as they are. Raises DataError where the
    folder cannot be written.
    """
    from shards.mirror import is_mirror
    from shards.pack import pack_source
    from shards.resolve import is_packed, resolve_dataset
    from shards.sources import builtin_source

    if is_mirror(data_root):
        return
    for name in dict.fromkeys(names):
        if not is_packed(data_root, name) and (dataset := resolve_dataset(name, data_root)).source != "folder":
            pack_source(builtin_source(dataset), data_root)
