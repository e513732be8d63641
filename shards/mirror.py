"""A data root behind a URL, kept in a local folder that every reader of a data root works on.

The manifest is fetched when a data set is opened, its index when that is asked for, and a shard when its first image
is read: a few-shot run fetches few. Nothing is used before it has the SHA-256 of the manifest, and what does not have
it is fetched again. A server is not trusted: a name that leaves the folder of its data set is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shards.errors import DataError, DataUsageError
from shards.fetch import alone, download
from shards.hash_cache import Stamps
from shards.manifest import FILE, MIRROR_FILE, Manifest, Shard, convention_texts, is_mirror, parse_manifest, write_text
from shards.remote import NotThere, Unreachable, open_url
from shards.tar import file_sha256
from shards.urls import canonical, folder_name, has_secrets, is_url, join, local_path, shown, tells_absence

ASKED_FILE = ".asked"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
MANIFEST_LIMIT = 2**26
# Seconds for which a manifest counts as fresh: one command opens a data set several times.
FRESH = 10.0


def mirror_root(url: str, cache: Path) -> Path:
    """The folder that stands for the data root at `url`, made when there is none; a file:// URL's own folder.

    Nothing is fetched yet. Raises DataUsageError for what is no URL, DataError when the cache cannot be written.
    """
    if not is_url(url):
        raise DataUsageError(f"{url} is not a URL")
    url = canonical(url)
    folder = local_path(url)
    if folder is not None:
        return folder
    root = cache / "mirrors" / folder_name(url)
    try:
        if not is_mirror(root):
            # A password or a signature in the URL is nobody else's business.
            root.mkdir(parents=True, exist_ok=True, mode=0o700 if has_secrets(url) else 0o777)
            write_text(root / MIRROR_FILE, json.dumps({"url": url}) + "\n")
    except OSError as error:
        reason = f"({error.strerror}); choose another cache with PROCAP_HOME"
        raise DataError(f"{root} cannot be written {reason}") from error
    return root


def mirrored_url(root: Path) -> str:
    """The URL that a mirror stands for. Raises DataError when its mirror.json is broken."""
    try:
        url = json.loads((root / MIRROR_FILE).read_text(encoding="utf-8"))["url"]
        if isinstance(url, str) and is_url(url):
            return url
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{root / MIRROR_FILE} does not name the URL that it mirrors; delete {root}")


def refuse_packing(root: Path) -> None:
    """Raises DataUsageError for a mirror: what is packed there would never reach the server."""
    if is_mirror(root):
        raise DataUsageError(f"{shown(mirrored_url(root))} can only be read; pack into a folder and upload that")


def has_dataset(root: Path, name: str) -> bool:
    """Whether the server of a mirror, or the mirror while the server is away, has a data set of that name.

    A broken one counts. Raises Unreachable when the mirror has none and the server does not answer.
    """
    if not NAME.fullmatch(name):
        return False
    try:
        refresh(root, name)
    except NotThere:
        return False
    except Unreachable:
        raise
    except DataError:
        return True
    return True


def refresh(root: Path, name: str) -> None:
    """Bring the manifest of a mirrored data set up to date; does nothing in a data root that is no mirror.

    While the server cannot be reached the manifest of the last time is used, with a warning. Raises DataError when
    there is none, or when the server's is not usable: the one of the last time then stays.
    """
    if not is_mirror(root):
        return
    if not NAME.fullmatch(name):
        raise DataUsageError(f"'{name}' cannot be the name of a data set")
    folder = root / name
    with alone(folder.with_name(f".{name}.lock")):
        kept = (folder / FILE).read_text(encoding="utf-8") if (folder / FILE).is_file() else None
        note = _asked_lately(folder) if kept is not None else None
        if note is None:
            note = _ask(folder, name, kept)
    if note:
        warnings.warn(note, stacklevel=3)


def _ask(folder: Path, name: str, kept: str | None) -> str:
    root = mirrored_url(folder.parent)
    url = join(root, f"{name}/{FILE}")
    note = ""
    try:
        with open_url(url, retry=kept is None) as stream:
            data = stream.read(MANIFEST_LIMIT + 1)
    except Unreachable as error:
        if kept is None and tells_absence(url):
            raise
        if kept is None:
            raise NotThere(f"no shards of '{name}' at {shown(root)}, or it cannot be read: {error}") from error
        note = f"{error}; the copy of '{name}' in {folder} is used"
    except NotThere as error:
        raise NotThere(f"no shards of '{name}' at {shown(root)}: {error}") from error
    else:
        text, manifest = _parsed(data, url, name)
        if text != kept:
            _keep(folder, text, manifest)
    with suppress(OSError):
        write_text(folder / ASKED_FILE, note)
    return note


def _asked_lately(folder: Path) -> str | None:
    """What came of asking the server a moment ago (a note, or nothing to note); None when that is too long ago."""
    with suppress(OSError):
        if 0 <= time.time() - (folder / ASKED_FILE).stat().st_mtime < FRESH:
            return (folder / ASKED_FILE).read_text(encoding="utf-8")
    return None


def _parsed(data: bytes, url: str, name: str) -> tuple[str, Manifest]:
    hint = "tell who packed it"
    if len(data) > MANIFEST_LIMIT:
        raise DataError(f"{shown(url)} is too long for a manifest; {hint}")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise DataError(f"{shown(url)} is not a manifest (not UTF-8); {hint}") from None
    manifest = parse_manifest(text, shown(url), hint)
    if manifest.dataset != name:
        raise DataError(f"{shown(url)} is of the data set '{manifest.dataset:.80}', not of '{name}'; {hint}")
    for split, entry in manifest.splits.items():
        files = [shard.file for shard in entry.shards]
        hashes = [entry.index_sha256, entry.paths_sha256, *(shard.sha256 for shard in entry.shards)]
        strange = [file for file in files if not re.fullmatch(rf"{re.escape(split)}/[0-9]{{1,9}}\.tar", file)]
        strange += [text for text in hashes if not SHA256.fullmatch(text)]
        if not NAME.fullmatch(split):
            strange.append(split)
        if strange or len(set(files)) != len(files):
            what = f"split {split!r:.80} has {(strange or files)[0]!r:.80}"
            raise DataError(f"{shown(url)} is not to be trusted ({what}); {hint}")
    return text, manifest


def _keep(folder: Path, text: str, manifest: Manifest) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, entry in manifest.splits.items():
            (folder / split).mkdir(exist_ok=True)
            write_text(folder / split / "nshards.txt", f"{len(entry.shards)}\n")
        for file, content in convention_texts(manifest).items():
            write_text(folder / file, content)
        write_text(folder / FILE, text)
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror or error})") from error


def provide(folder: Path, file: str, sha256: str) -> None:
    """Fetch a file of a mirrored data set unless it is there with that SHA-256; nothing to do elsewhere."""
    if not is_mirror(folder.parent):
        return
    with suppress(OSError):
        if file_sha256(folder / file) == sha256:
            return
    download(join(mirrored_url(folder.parent), f"{folder.name}/{file}"), folder / file, sha256=sha256)


@dataclass(frozen=True)
class MirroredShards:
    """The shards of a split of a mirrored data set, each fetched when it is first opened; small enough to be sent."""

    folder: Path
    shards: tuple[Shard, ...]

    def open(self, number: int) -> int:
        """A descriptor of a shard whose every byte is proven. Raises DataError naming what the server has instead."""
        shard = self.shards[number]
        descriptor = self._proven(shard)
        if descriptor is None:
            url = join(mirrored_url(self.folder.parent), f"{self.folder.name}/{shard.file}")
            download(url, self.folder / shard.file, sha256=shard.sha256, size=shard.size)
            descriptor = self._proven(shard)
        if descriptor is None:
            reason = "changed while it was opened: its data set was packed anew; try again"
            raise DataError(f"{self.folder / shard.file} {reason}")
        return descriptor

    def _proven(self, shard: Shard) -> int | None:
        file = self.folder / shard.file
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # Of the open file and not of its name, which another version of the data set may take at any time.
            if self._vouched(descriptor, shard) or self._hashed(descriptor, shard):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _vouched(self, descriptor: int, shard: Shard) -> bool:
        with suppress(OSError):
            # In this order: a name that points here after the look at its stamp did so before.
            known = Stamps(self.folder).vouches(shard)
            return known and os.path.samestat(os.fstat(descriptor), (self.folder / shard.file).stat())
        return False

    def _hashed(self, descriptor: int, shard: Shard) -> bool:
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != shard.sha256:
                return False
        with suppress(OSError), alone(self.folder / ".verified.lock"):
            stamps = Stamps(self.folder)
            stamps.add(shard)
            if os.path.samestat(os.fstat(descriptor), (self.folder / shard.file).stat()):
                stamps.save()
        return True


def mirrored_shards(folder: Path, shards: tuple[Shard, ...]) -> MirroredShards | None:
    """How the shards of a split are opened in a mirror; None in a data root that is no mirror."""
    return MirroredShards(folder, shards) if is_mirror(folder.parent) else None


def present(folder: Path, shard: Shard) -> bool:
    """Whether a shard is there to be checked: in a mirror some may not have been fetched yet."""
    return not is_mirror(folder.parent) or (folder / shard.file).exists()
