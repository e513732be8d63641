"""Remote files through fsspec: read, download, list, upload and delete.

A location is a URL (http(s)://, s3://, gs://, abfs://, hf://, and whatever else fsspec opens), a file:// URL or a path.
Object stores take credentials from the environment and the configuration files that their own tools read, and their
drivers retry. Every failure is a UserError of one line that names the URL without its secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards.files import file_lock, file_sha256, replace_at_end
from shards.tasks import thread_pool
from shards.urls import canonical, is_url, join, local_path, redact, scheme

T = TypeVar("T")

WEB = ("http", "https")
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory")
"""Stores without folders; elsewhere the folder of a file is made before the file."""
LOGGING_DRIVERS = dict.fromkeys(("gs", "gcs"), ("gcsfs", "google")) | dict.fromkeys(
    ("abfs", "abfss", "az"), ("azure", "adlfs")
)
"""Loggers of drivers that log what their errors say, with tracebacks, by scheme."""
CONNECT_SECONDS, SOCKET_SECONDS = 8.0, 30.0
"""Times without an answer, and without a byte of it, after which a web server counts as unreachable."""
ATTEMPTS = 3
"""How often an answer is asked for that ends early."""
CUT = ("ClientPayloadError", "FlexibleChecksumError", "IncompleteReadError", "ResponseStreamingError")
"""Names of the drivers' errors for an answer that is not whole."""
BLOCK = 2**23
DOCUMENT_BYTES, DOCUMENTS_AT_ONCE = 2**28, 32
"""Most bytes of a document of results, as servers can send without end, and how many are read at a time."""


ResolvedPath = tuple[Any, str]
"""A file system of fsspec, and a path in it."""


def filesystem(location: str) -> ResolvedPath:
    """Return the fsspec file system of a location, without listings of earlier calls, and the path in it."""
    import fsspec

    url = canonical(location)
    if (path := local_path(url)) is not None:
        return fsspec.filesystem("file"), str(path)
    if scheme(url) in WEB:
        import aiohttp

        # aiohttp's default would end every download after five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SOCKET_SECONDS)
        # A server that compresses would send sizes and ranges that are not those of the file.
        headers = {"User-Agent": "procap", "Accept-Encoding": "identity"}
        # By default aiohttp reads neither the proxy variables nor ~/.netrc.
        client = {"timeout": timeout, "headers": headers, "trust_env": True}
        return fsspec.filesystem("http", client_kwargs=client), url
    if redact(url) != url:
        reason = "a name, a password or a key in it would end up in logs: put credentials into the environment"
        raise UsageError(f"{redact(url)}: {reason} instead")
    for driver in LOGGING_DRIVERS.get(scheme(url), ()):
        logging.getLogger(driver).setLevel(logging.CRITICAL)
    try:
        files, path_there = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened ({error})") from error
    # Otherwise what other machines write after the first listing would stay invisible to this process.
    files.invalidate_cache()
    if scheme(url) in ("s3", "s3a"):
        # botocore repeats requests itself: five times as often, a server that never answers takes seven minutes.
        files.retries = 1
    return files, path_there.rstrip("/")


class CutAnswer(Unreachable):
    """An answer that ended early, or whose bytes are not those that its sender names."""


def repeat_cut(read: Callable[[], T]) -> T:
    """Call `read` up to `ATTEMPTS` times, until its answer is whole."""
    for _ in range(ATTEMPTS - 1):
        with suppress(CutAnswer):
            return read()
    return read()


def read_file(location: str, limit: int | None = None, resolved: ResolvedPath | None = None) -> bytes:
    """Read a whole file of at most `limit` bytes; the rest as in `read_blocks`."""
    return repeat_cut(lambda: b"".join(read_blocks(location, limit, resolved=resolved)))


def read_blocks(
    location: str,
    limit: int | None = None,
    *,
    start: int = 0,
    headers: Mapping[str, str] = {},
    resolved: ResolvedPath | None = None,
) -> Iterator[bytes]:
    """Yield the content of a file in blocks; errors as `translate_errors`.

    limit: raises UserError for a longer file, as a server can send without end.
    start, headers: for a web server, the first byte to yield and what to send with the request; aiohttp drops
        Authorization where it is redirected to a different host.
    resolved: what `filesystem` returns, given by threads: fsspec makes a file system for each.
    """
    ranges = {"Range": f"bytes={start}-"} if start else {}
    with translate_errors(location), _open(location, {**headers, **ranges}, resolved) as (read, response):
        # Some servers send every file from its beginning.
        end = start if start and response.status == 206 else 0
        while block := read():
            begin, end = end, end + len(block)
            if limit is not None and end > limit:
                raise UserError(f"{redact(location)} is not the expected file: it has more than {limit:,} bytes")
            yield block[max(0, start - begin) :]


def file_size(url: str) -> int | None:
    """Ask a web server for the size of a file; None if it does not say."""
    with translate_errors(url), _open(url) as (_, response):
        size: int | None = response.content_length
        return size


@contextmanager
def _open(
    location: str, headers: Mapping[str, str] = {}, resolved: ResolvedPath | None = None
) -> Iterator[tuple[Callable[[], bytes], Any]]:
    """Open a file to read it once, from start to end; yields what reads a block, and the answer of a web server."""
    from fsspec.asyn import sync

    files, name = resolved or filesystem(location)
    if scheme(location) in WEB:
        # One streaming GET. Passing any size avoids a request for the size.
        with files.open(name, "rb", block_size=0, size=1, headers=headers) as stream:
            yield lambda: stream.read(BLOCK), stream.r
    elif scheme(location) in ("s3", "s3a"):
        # One streaming GET as well: `open` would read whole whatever a server sends for a part of the file.
        stream = sync(files.loop, files.open_async, name)
        try:
            yield lambda: sync(files.loop, stream.read, BLOCK), None
        finally:
            if stream.r is not None:
                # In the thread of the loop, whose connections and buffers no other thread may touch.
                files.loop.call_soon_threadsafe(stream.r.close)
    else:
        with files.open(name, "rb", block_size=BLOCK) as stream:
            yield lambda: stream.read(BLOCK), None


def download(location: str, target: Path, *, sha256: str | None = None, limit: int | None = None) -> None:
    """Download a file of at most `limit` bytes to `target`, whole and verified or not at all; a valid one is kept.

    Of several processes or threads of a machine one downloads. Raises OSError if `target` cannot be written.
    """
    # Before the lock too: a copy on a read-only disk needs none.
    if _is_valid(target, sha256):
        return
    with file_lock(target.with_name(f".{target.name}.lock"), remove=True):
        if _is_valid(target, sha256):
            return
        with replace_at_end(target) as temporary:

            def write() -> None:
                with temporary.open("wb") as out:
                    out.writelines(read_blocks(location, limit))
                if not _is_valid(temporary, sha256):
                    raise CutAnswer(f"{redact(location)} is not the expected file: its SHA-256 is not {sha256}")

            repeat_cut(write)


def _is_valid(file: Path, sha256: str | None) -> bool:
    return file.is_file() and sha256 in (None, file_sha256(file))


def resume_download(
    url: str, target: Path, size: int | None, on_progress: Callable[[int], None], headers: Mapping[str, str]
) -> None:
    """Download a file to `target`, where it is continued if its `size` is known. headers: as in `read_blocks`.

    on_progress: called with the bytes that are there. Raises Unreachable for an answer that ends early.
    """
    done = target.stat().st_size if target.is_file() else 0
    if size and done == size:
        return
    # More bytes are those of an earlier version: servers refuse (416) to continue behind the end.
    start = done if size and done < size else 0
    with target.open("ab" if start else "wb") as out:
        for block in read_blocks(url, size, start=start, headers=headers):
            out.write(block)
            on_progress(out.tell())
    if size and target.stat().st_size < size:
        raise Unreachable(f"{redact(url)} ended after {target.stat().st_size:,} of {size:,} bytes; try again later")


def list_files(root: str) -> list[str]:
    """List the names of all files below a folder, relative to it; hidden ones, which begin with a dot, are left out."""
    with translate_errors(root):
        files, path = filesystem(root)
        names = [file.removeprefix(f"{path}/") for file in files.find(path) if file != path]
    # An empty part, as in `folder//etc/x`, would make a path that begins at the root.
    return [name for name in names if all(part[:1] not in ("", ".") for part in name.split("/"))]


def read_files(root: str, names: Iterable[str]) -> dict[str, bytes]:
    """Read many documents below a folder at once; those that do not exist are left out."""
    with translate_errors(root):
        files, folder = filesystem(root)

    def read(name: str) -> bytes | None:
        try:
            return read_file(join(root, name), DOCUMENT_BYTES, (files, f"{folder}/{name}"))
        except NotFound as error:
            # A permission that is missing is an error.
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    with thread_pool(DOCUMENTS_AT_ONCE, "documents") as pool:
        assert pool
        contents = {name: pool.submit(read, name) for name in names}
        return {name: data for name, future in contents.items() if (data := future.result()) is not None}


def upload(content: bytes | Path, location: str) -> None:
    """Write bytes or a local file to a location; object stores show the file only when it is whole."""
    with translate_errors(location):
        files, path = filesystem(location)
        if scheme(location) not in OBJECT_STORES:
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(content, Path):
            files.put_file(str(content), path)
        else:
            files.pipe_file(path, content)


def delete(location: str) -> None:
    """Delete a file if it exists."""
    # `suppress` comes second, so that it sees the error before it is translated.
    with translate_errors(location), suppress(FileNotFoundError):
        files, path = filesystem(location)
        files.rm_file(path)


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Turn every error inside into a UserError of one line that names the location.

    NotFound if the file, a bucket or a permission is missing, Unreachable if trying again may help.
    """
    try:
        yield
    except UserError:
        raise
    # Any class: the clients of the stores have none in common.
    except Exception as error:
        name, response = redact(location), getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
            advice = "; check the address" if is_url(location) else ""
            raise NotFound(f"{name} is not there{advice}") from error
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        if scheme(location) in WEB:
            # The text of aiohttp's errors repeats the URL with its secrets.
            system = getattr(error, "strerror", None)
            reason = f"the server answers {status}" if status else system or type(error).__name__
        if isinstance(error, PermissionError) or status in (401, 403, 407):
            raise NotFound(f"{name} is not open to this machine ({reason}); check the credentials") from error
        failure = CutAnswer if type(error).__name__ in CUT else Unreachable
        remedy = "check the credentials" if "credential" in reason.lower() else "try again later"
        raise failure(f"{name} cannot be reached ({reason}); {remedy}") from error
