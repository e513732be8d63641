"""Object stores and other file systems behind a URL (s3://, gs://, abfs://, ...), through fsspec.

Who may read and write there is said by the environment and the configuration of this machine, as the provider's own
tools read them; a URL with a password in it is refused, and no message repeats a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shards.errors import DataError, DataUsageError, NotThere, Unreachable
from shards.urls import has_secrets, scheme, shown

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oss": "ossfs"}
OBJECT_STORES = (*PACKAGES, "memory")
"""Schemes where a name appears with its whole content or not at all, and where folders need not be made."""

ANSWER_SECONDS = 60.0
# Bytes that are asked of a store at once.
BLOCK = 2**23

# What differs between two contents of one name, most telling first.
VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, which remembers no listing, and the path in it.

    Raises DataUsageError for a scheme that nothing opens or a URL with secrets, DataError where a package is missing.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import available_protocols

    name = scheme(url)
    if name not in available_protocols() or name in ("http", "https", "pipe"):
        raise DataUsageError(f"{shown(url)}: {name}:// is not an address that can be opened; use s3:// or gs://")
    if has_secrets(url):
        told = "a name, a password or a key in it would end up in logs: put credentials into the environment"
        raise DataUsageError(f"{shown(url)}: {told} instead")
    if not re.match(r"[^/]+://[^/]", url) and name in PACKAGES:
        raise DataUsageError(f"{shown(url)} names no bucket; for example {name}://bucket/folder")
    try:
        files, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = PACKAGES.get(name)
        how = f"pip install {package}" if package else _first_line(error)
        raise DataError(f"{shown(url)} needs a package that is not installed here: {how}") from error
    return files, path.rstrip("/")


def ask(files: Any, what: str, *words: Any, seconds: float | None = None, **more: Any) -> Any:
    """`files.what(*words, **more)`, of which no store is waited for longer than so many seconds.

    The stores' own limits are for single messages and not for all kinds of them: a server that takes what it is sent
    and stays silent would never be given up.
    """
    if getattr(files, "async_impl", False):
        more["timeout"] = seconds or ANSWER_SECONDS
    return getattr(files, what)(*words, **more)


class Blocks:
    """Reads a file from `start` to its end, `size`, block by block; `close` finds out whether it was one version."""

    def __init__(self, files: Any, path: str, start: int, size: int, tag: str) -> None:
        self._files, self._path, self._at, self._size, self._tag = files, path, start, size, tag
        self._block = memoryview(b"")
        self._doubtful = size - start > BLOCK

    def read(self, most: int) -> bytes:
        if not self._block and self._at < self._size:
            end = min(self._at + BLOCK, self._size)
            self._block = memoryview(ask(self._files, "cat_file", self._path, start=self._at, end=end))
            self._at = end if self._block else self._size
        data, self._block = bytes(self._block[:most]), self._block[most:]
        return data

    def close(self) -> None:
        if self._doubtful and self._at == self._size:
            self._doubtful = False
            if version(ask(self._files, "info", self._path)) != self._tag:
                raise OSError("it changed while it was read")


def version(facts: Mapping[str, Any]) -> str:
    """What the store calls this content of a name; another content of it has another one."""
    found = next((facts[key] for key in VERSIONS if facts.get(key)), "")
    # One moment is printed in several zones.
    moment = found.timestamp() if hasattr(found, "timestamp") else found
    return f"{moment}-{facts.get('size')}"


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Every failure inside as a DataError that names `url`."""
    try:
        yield
    except DataError:
        raise
    # Any error: those of the clouds' libraries have no class in common.
    except Exception as error:
        raise failure(url, error) from error


def failure(url: str, error: Exception) -> DataError:
    """One line about what a file system raised; `Unreachable` where asking again may help."""
    kind = type(error).__name__
    if kind == "FSTimeoutError":
        return Unreachable(f"{shown(url)} cannot be reached (no answer in time); try again later")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotThere(f"{shown(url)} is not there; check the address")
    if isinstance(error, PermissionError):
        return NotThere(f"{shown(url)} is not open to the credentials of this machine ({_first_line(error)})")
    if re.search("Credential|Profile|Token|Auth", kind):
        return DataError(f"{shown(url)} needs credentials, and this machine has none that work ({kind})")
    return Unreachable(f"{shown(url)} cannot be reached ({_first_line(error)}); try again later")


def _first_line(error: Exception) -> str:
    # A signature is in the query of an address.
    text = re.sub(r"\?\S+", "", str(error).strip().partition("\n")[0])[:200].rstrip(". ")
    return text or type(error).__name__
