"""Open what a URL names as a stream of bytes whose every failure is one line that names the URL.

Plain paths and file:// are read directly, http(s):// by the standard library, hf:// as the webdataset library opens it
and other schemes (s3://, gs://) through fsspec. `pipe:` runs a command of the URL's own and is refused unless
PROCAP_ALLOW_PIPE=1.
"""

from __future__ import annotations

import base64
import io
import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException, InvalidURL, responses
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shards.errors import DataError, DataUsageError, NotThere, Unreachable
from shards.objects import Blocks, ask, failure, filesystem, translated, version
from shards.urls import canonical, local_path, scheme, shown

# Seconds without a byte before a server counts as gone, and the waits before asking it again.
TIMEOUT = 30.0
WAITS = (0.3, 1.0, 2.0)

T = TypeVar("T")


def open_url(url: str, *, retry: bool = True) -> BinaryIO:
    """The bytes that a URL or a path names, as a stream to be closed by the caller.

    Raises DataError naming the URL, also while reading; `Unreachable` when asking again later may help. A stream that
    ends early is an error, never a short file. retry: ask a silent server a few times before giving up.
    """
    url = canonical(url)
    body = persist(lambda: open_body(url)) if retry else open_body(url)
    return cast(BinaryIO, io.BufferedReader(body, 2**16))


def persist(attempt: Callable[[], T]) -> T:
    """What `attempt` returns, made again after short waits while a server does not answer."""
    for wait in WAITS:
        try:
            return attempt()
        except Unreachable:
            time.sleep(wait)
    return attempt()


class Body(io.RawIOBase):
    """The bytes of a response, whose errors are `DataError`s that name the URL.

    start: where in the file they begin. length: how many there are, where that is known. tag: the file's version.
    failure: says in one line what went wrong while reading.
    """

    def __init__(
        self,
        url: str,
        stream: Any,
        start: int = 0,
        length: int | None = None,
        tag: str = "",
        failure: Callable[[str, Exception], DataError] | None = None,
    ) -> None:
        self.url, self.start, self.length, self.tag = url, start, length, tag
        self._failure = failure or _unreachable
        self._stream, self._left, self._ended = stream, length, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._ended:
            return 0
        try:
            data = self._stream.read(len(buffer))
            if not data:
                # Only closing tells whether the command behind a pipe succeeded.
                self._stream.close()
                self._ended = True
        # Any error: the classes of the clouds' libraries are not known here.
        except Exception as error:
            raise self._failure(self.url, error) from error
        if self._left is not None:
            self._left -= len(data)
            if not data and self._left > 0:
                raise Unreachable(f"{shown(self.url)} was cut short ({self._left} bytes are missing); try again")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        with suppress(Exception):
            self._stream.close()
        super().close()


def open_body(url: str, start: int = 0, tag: str = "") -> Body:
    """The bytes of a canonical URL; from `start` on when the server can and its file still is the version `tag`."""
    path = local_path(url)
    if path is not None:
        return _open_file(path)
    if scheme(url) in ("http", "https"):
        return _open_http(url, start, tag)
    return _open_by_webdataset(url) if scheme(url) in ("pipe", "hf") else _open_object(url, start, tag)


def _open_file(path: Path) -> Body:
    try:
        stream = path.open("rb")
        return Body(str(path), stream, length=os.fstat(stream.fileno()).st_size)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotThere(f"{path} is not there") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


class _ToTheWebOnly(HTTPRedirectHandler):
    def redirect_request(self, request: Request, *answer: Any) -> Request | None:
        to = answer[-1]
        if scheme(to) not in ("http", "https"):
            raise DataError(f"{shown(request.full_url)} sends on to {shown(to)}, which is not followed")
        return super().redirect_request(request, *answer)


def _open_http(url: str, start: int, tag: str) -> Body:
    headers = {"User-Agent": "procap", "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": tag}
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        path, query = (quote(text, safe="/%:@!$&'()*+,;=?~") for text in (parts.path, parts.query))
        request = Request(urlunsplit((parts.scheme, host, path, query, "")), headers=headers)
        if parts.username:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            # Unredirected: a password is for this server and for none that it points to.
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(secret.encode()).decode()}")
        response = build_opener(_ToTheWebOnly).open(request, timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:
            return _open_http(url, 0, "")
        raise _refused(url, error.code) from None
    except (OSError, HTTPException, ValueError) as error:
        raise _unreachable(url, error) from error
    etag = response.headers.get("ETag", "")
    version = response.headers.get("Last-Modified", "") if not etag or etag.startswith("W/") else etag
    where = response.headers.get("Content-Range", "")
    resumed = response.status == 206 and where.startswith(f"bytes {start}-") and version == tag
    if response.status != 200 and not resumed:
        response.close()
        if start:
            return _open_http(url, 0, "")
        raise _refused(url, response.status)
    return Body(url, response, start if resumed else 0, response.length, version)


def _refused(url: str, status: int) -> DataError:
    words = f"{status} {responses.get(status, '')}".strip()
    if status in (404, 410):
        return NotThere(f"{shown(url)} is not there ({words}); check the address")
    if status in (401, 403, 407):
        return NotThere(f"{shown(url)} is not open to everyone ({words}); download it by hand and give the folder")
    if status == 429 or status >= 500:
        return Unreachable(f"{shown(url)} cannot be had now, the server answers {words}; try again later")
    return DataError(f"{shown(url)} cannot be had, the server answers {words}")


def _unreachable(url: str, error: Exception) -> DataError:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        problem = f"the certificate of its server is not valid ({reason.verify_message})"
        return DataError(f"{shown(url)} is not trusted: {problem}")
    if isinstance(reason, ValueError | InvalidURL):
        return DataUsageError(f"{shown(url)} is not a usable URL")
    if isinstance(reason, TimeoutError):
        return Unreachable(f"{shown(url)} cannot be reached (no answer for {TIMEOUT:g} s); try again later")
    # The text of an error may hold the arguments of a command, but only where there is one.
    words = getattr(reason, "strerror", None) or (str(reason) if scheme(url) in ("http", "https") else "it failed")
    return Unreachable(f"{shown(url)} cannot be reached ({words}); try again later")


def _open_object(url: str, start: int, tag: str) -> Body:
    with translated(url):
        files, path = filesystem(url)
        facts = ask(files, "info", path)
        if facts["type"] == "directory":
            raise NotThere(f"{shown(url)} is a folder and not a file; check the address")
        size, found = facts["size"], version(facts)
        begin = start if start and tag and found == tag and start <= size else 0
    return Body(url, Blocks(files, path, begin, size, found), begin, size - begin, found, failure)


def _open_by_webdataset(url: str) -> Body:
    if scheme(url) == "pipe" and os.environ.get("PROCAP_ALLOW_PIPE") != "1":
        raise DataUsageError(f"{shown(url)} would run a command: if it is yours, set PROCAP_ALLOW_PIPE=1")
    try:
        from webdataset.gopen import gopen
    except ImportError:
        raise DataError(f"{shown(url)}: pipe: and hf:// need webdataset: pip install webdataset") from None
    try:
        return Body(url, gopen(url, "rb"))
    # Any error of the hub's library, whose classes are not known here.
    except Exception as error:
        raise Unreachable(f"{shown(url)} cannot be opened (webdataset: {type(error).__name__})") from error
