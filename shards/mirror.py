"""Mirror a data root behind a URL in a local folder of the same layout, which is filled with files as needed.

The manifest is downloaded when a data set is opened, the lists of a split when they are read, and all its shards when
the split is opened, except under `--no-cache`: 16 random images per class lie in nearly every shard. A downloaded file
has the SHA-256 of the manifest, and appears whole or not at all. The server is not trusted: the manifest allows no name
outside the folder.

<mirror>/<name>/manifest.json    the last manifest
<mirror>/<digest>/<name>/        the files of the manifest with that digest: a command that has opened an earlier one
                                 keeps its files when the server changes
"""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path

from procap.errors import Unreachable, UsageError
from shards.files import explain_writing, write_file
from shards.index import INDEX_FILE, PATHS_FILE
from shards.manifest import MANIFEST_FILE, MIRROR_FILE, SplitEntry, is_mirror, parse_manifest
from shards.names import NAME
from shards.remote import download, read_file
from shards.urls import cache_name, canonical, join, local_path, redact

LIST_BYTES, MANIFEST_BYTES = 4096, 2**28
"""Most bytes of an image's entry in the lists of a split, and of a manifest: servers can send without end."""


def mirror_root(url: str, cache: Path) -> Path:
    """Return the folder that stands for the data root at `url`, created if needed; for file:// the folder itself."""
    url = canonical(url)
    if (folder := local_path(url)) is not None:
        return folder
    if redact(url) != url:
        reason = "a password or signature would be stored with it: put it into ~/.netrc instead"
        raise UsageError(f"{redact(url)}: {reason}")
    root = cache / "mirrors" / cache_name(url)
    if not is_mirror(root):
        with explain_writing(root, "set PROCAP_HOME to a folder for the files of URLs"):
            write_file(root / MIRROR_FILE, json.dumps({"url": url}) + "\n")
    return root


def mirrored_url(root: Path) -> str:
    """Return the URL that a data root stands for, "" if it is no mirror."""
    return str(json.loads((root / MIRROR_FILE).read_bytes())["url"]) if is_mirror(root) else ""


def refuse_packing(root: Path) -> None:
    """Raise UsageError for a mirror, from which nothing would reach the server."""
    if url := mirrored_url(root):
        raise UsageError(f"{redact(url)} can only be read; pack into a folder and upload that")


@functools.cache
def refresh(root: Path, name: str) -> Path:
    """Update the manifest of a mirrored data set; return the folder of its files, in any data root.

    A server is asked once in a command, which `refresh.cache_clear` begins. While it is out of reach the last is used.
    """
    if not (root_url := mirrored_url(root)):
        return root / name
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' cannot be the name of a data set")
    file, url = root / name / MANIFEST_FILE, join(root_url, f"{name}/{MANIFEST_FILE}")
    try:
        content = read_file(url, MANIFEST_BYTES)
    except Unreachable as error:
        if not file.is_file():
            raise
        warnings.warn(f"{error}; the copy of '{name}' in {root} is used", stacklevel=3)
        content = file.read_bytes()
    # First, as a server may send an error page as a file.
    text = content.decode(errors="replace")
    manifest = parse_manifest(text, redact(url), name, "report it to the publisher of the data")
    version = root / manifest.digest
    mirror = (root / MIRROR_FILE).read_bytes()
    copies = {version / MIRROR_FILE: mirror, version / name / MANIFEST_FILE: content, file: content}
    for copy, expected in copies.items():
        if not copy.is_file() or copy.read_bytes() != expected:
            write_file(copy, expected)
    return version / name


def fetch_lists(folder: Path, split: str, entry: SplitEntry) -> None:
    """Download index and paths of a split of a mirrored data set; does nothing elsewhere."""
    for name, sha256 in ((INDEX_FILE, entry.index_sha256), (PATHS_FILE, entry.paths_sha256)):
        _fetch(folder, f"{split}/{name}", sha256, LIST_BYTES * (entry.count + 1))


def fetch_shards(folder: Path, entry: SplitEntry) -> None:
    """Download the shards of a split of a mirrored data set that are not there with their size; nothing elsewhere."""
    for shard in entry.shards:
        file = folder / shard.file
        # The size is enough, because `download` shows a file only after its SHA-256 was compared.
        if not (file.is_file() and file.stat().st_size == shard.size):
            _fetch(folder, shard.file, shard.sha256, shard.size)


def _fetch(folder: Path, file: str, sha256: str, limit: int) -> None:
    if url := mirrored_url(folder.parent):
        download(join(url, f"{folder.name}/{file}"), folder / file, sha256=sha256, limit=limit)
