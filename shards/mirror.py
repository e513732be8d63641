"""Mirror a data root behind a URL in a local folder of the same layout, which is filled with files as needed.

The manifest is downloaded when a data set is opened, its index when that is read, and a shard when its first image is
read: a few-shot run downloads few. No file is used before it has the SHA-256 of the manifest; one that differs is
downloaded again. The server is not trusted: names that would leave the folder of the data set are refused.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path

from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards.files import file_lock, open_regular, read_regular, write_file
from shards.hash_cache import HashCache
from shards.manifest import FILE, MANIFEST_LIMIT, MIRROR_FILE, Shard, convention_texts, is_mirror, parse_manifest
from shards.names import NAME
from shards.remote import download, read_bytes
from shards.urls import cache_name, canonical, is_url, join, local_path, redact

CHECKED_FILE = ".checked"
"""A file whose modification time is that of the last check of the server's manifest."""
# Seconds for which a manifest is not checked again, because one command opens a data set several times.
FRESH = 10.0


def mirror_root(url: str, cache: Path) -> Path:
    """Return the folder that stands for the data root at `url`, created if needed; for file:// the folder itself.

    A password or a signature of the URL is kept in the environment of this process and those it starts, on no disk.
    """
    url = canonical(url)
    folder = local_path(url)
    if folder is not None:
        return folder
    root, public = cache / "mirrors" / cache_name(url), redact(url)
    if public != url:
        os.environ[_variable(root)] = url
    content = json.dumps({"url": public} | ({"secret": True} if public != url else {})) + "\n"
    try:
        with suppress(FileNotFoundError):
            if (root / MIRROR_FILE).read_text(encoding="utf-8") == content:
                return root
        # Data behind a password are readable by this user only.
        root.mkdir(parents=True, exist_ok=True, mode=0o777 if public == url else 0o700)
        write_file(root / MIRROR_FILE, content)
    except OSError as error:
        reason = f"({error.strerror}); choose another cache with PROCAP_HOME"
        raise UserError(f"{root} cannot be written {reason}") from error
    return root


def mirrored_url(root: Path) -> str:
    """Return the URL that a mirror stands for. Raises UserError for a broken mirror.json or an unknown password."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads((root / MIRROR_FILE).read_text(encoding="utf-8"))
        url = content["url"]
        if isinstance(url, str) and is_url(url):
            if not content.get("secret"):
                return url
            if known := os.environ.get(_variable(root)):
                return known
            raise UserError(
                f"{root} mirrors {redact(url)} with a password or signature: name the whole URL with --data"
            )
    raise UserError(f"{root / MIRROR_FILE} does not name the URL that it mirrors; delete {root}")


def _variable(root: Path) -> str:
    """Return the name of the environment variable with the URL of a mirror, if that holds a secret."""
    return f"PROCAP_MIRROR_{root.name[-16:].upper()}"


def refuse_packing(root: Path) -> None:
    """Raise UsageError for a mirror: what is packed there would not reach the server."""
    if is_mirror(root):
        raise UsageError(f"{redact(mirrored_url(root))} can only be read; pack into a folder and upload that")


def refresh(root: Path, name: str) -> None:
    """Update the manifest of a mirrored data set; does nothing in a data root that is no mirror.

    While the server cannot be reached the last manifest is used, with a warning.
    """
    if not is_mirror(root):
        return
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' cannot be the name of a data set")
    folder, url = root / name, join(mirrored_url(root), f"{name}/{FILE}")
    # A copy on a read-only disk has no writers to wait for.
    with file_lock(root / f".{name}.lock", required=False):
        last = None
        with suppress(OSError, ValueError):
            last = read_regular(folder, FILE, MANIFEST_LIMIT).decode()
        with suppress(OSError):
            if last is not None and 0 <= time.time() - (folder / CHECKED_FILE).stat().st_mtime < FRESH:
                return
        try:
            text = read_bytes(url, MANIFEST_LIMIT, retry=last is None).decode(errors="replace")
        except Unreachable as error:
            if last is None:
                raise
            warnings.warn(f"{error}; the copy of '{name}' in {folder} is used", stacklevel=3)
        except NotFound as error:
            raise NotFound(f"no shards of '{name}' at {redact(mirrored_url(root))}: {error}") from error
        else:
            if text != last:
                manifest = parse_manifest(text, redact(url), name, "report it to the publisher of the data")
                try:
                    # What any reader of the convention needs beside the shards; the manifest last.
                    for file, content in convention_texts(manifest).items():
                        write_file(folder / file, content)
                    write_file(folder / FILE, text)
                except OSError as error:
                    raise UserError(f"{folder} cannot be written ({error.strerror or error})") from error
        with suppress(OSError):
            (folder / CHECKED_FILE).touch()


def fetch_file(folder: Path, file: str, sha256: str, size: int | None = None) -> os.stat_result | None:
    """Download a file of a mirrored data set unless it is there with that SHA-256; does nothing elsewhere."""
    if not is_mirror(folder.parent):
        return None
    url = join(mirrored_url(folder.parent), f"{folder.name}/{file}")
    return download(url, folder / file, sha256=sha256, size=size)


def open_shard(folder: Path, shard: Shard) -> int:
    """Return a descriptor of a shard of a mirror, which is downloaded first unless it is there and verified."""
    cache = HashCache(folder)
    if not cache.has_shard(shard):
        stat = fetch_file(folder, shard.file, shard.sha256, shard.size)
        # A mirror on a read-only disk is hashed by every process.
        with file_lock(folder / ".verified.lock", required=False):
            cache = HashCache(folder)
            cache.add_shard(shard, stat)
            cache.save()
    descriptor = open_regular(folder, shard.file)
    # The open file is checked, not its name: another version of the data set may take the name at any time.
    if not cache.has_shard(shard, os.fstat(descriptor)):
        os.close(descriptor)
        reason = "changed while it was opened, because its data set was packed again; try again"
        raise UserError(f"{folder / shard.file} {reason}")
    return descriptor
