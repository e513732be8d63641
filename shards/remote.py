"""Remote files through fsspec: read, download, list, write and delete.

A location is a URL (http(s)://, s3://, gs://, abfs://, hf://, and whatever else fsspec opens), a file:// URL or a path.
Object stores take credentials from the environment and the configuration files that their own tools read, and their
drivers retry. Every failure is a UserError of one line that names the URL without its secrets.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards.files import file_lock, file_sha256, replace_at_end
from shards.urls import canonical, is_url, join, local_path, redact, scheme

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "az", "oss", "memory")
"""Stores without folders; elsewhere the folder of a file is made before the file."""
SOCKET_SECONDS = 30.0
"""Time without a byte after which a web server counts as unreachable."""
BLOCK = 2**23
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def filesystem(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a location, without a cache of listings, and the path in it."""
    import fsspec

    url = canonical(location)
    path = local_path(url)
    if path is not None:
        return fsspec.filesystem("file"), str(path)
    if scheme(url) in ("http", "https"):
        import aiohttp

        # aiohttp's default would end every download after five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SOCKET_SECONDS, sock_read=SOCKET_SECONDS)
        # A server that compresses would send sizes and ranges that are not those of the file.
        headers = {"User-Agent": "procap", "Accept-Encoding": "identity"}
        # By default aiohttp reads neither the proxy variables nor ~/.netrc.
        client = {"timeout": timeout, "headers": headers, "trust_env": True}
        return fsspec.filesystem("http", client_kwargs=client), url
    if redact(url) != url:
        reason = "a name, a password or a key in it would end up in logs: put credentials into the environment"
        raise UsageError(f"{redact(url)}: {reason} instead")
    try:
        # Otherwise what other machines write after the first listing would stay invisible to this process.
        files, inner = fsspec.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened ({error})") from error
    return files, inner.rstrip("/")


def read_file(location: str, limit: int | None = None) -> bytes:
    """Read a whole file of at most `limit` bytes; errors as `read_blocks`."""
    return b"".join(read_blocks(location, limit))


def read_blocks(location: str, limit: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file in blocks; errors as `translate_errors`.

    limit: raises UserError for more bytes, as a server can send without end.
    """
    size = 0
    with translate_errors(location):
        files, name = filesystem(location)
        # For HTTP: one streaming GET. Passing any size avoids a request for the size.
        options = {"block_size": 0, "size": 1} if scheme(location) in ("http", "https") else {"block_size": BLOCK}
        with files.open(name, "rb", **options) as stream:
            while block := stream.read(BLOCK):
                size += len(block)
                if limit is not None and size > limit:
                    raise UserError(f"{redact(location)} is not the expected file: it has more than {limit:,} bytes")
                yield block


def download(
    location: str, target: Path, *, sha256: str | None = None, replace: bool = False, limit: int | None = None
) -> None:
    """Download a file to `target`; it appears there whole and verified or not at all. A valid one is kept.

    Of several processes or threads of a machine one downloads and the others wait. replace: download again what exists.
    limit: most bytes.
    Raises OSError if `target` cannot be written.
    """
    # Before the lock too: a copy on a read-only disk needs none.
    if not replace and _is_valid(target, sha256):
        return
    with file_lock(target.with_name(f".{target.name}.lock"), remove=True):
        if not replace and _is_valid(target, sha256):
            return
        with replace_at_end(target) as temporary:
            with temporary.open("wb") as out:
                out.writelines(read_blocks(location, limit))
            if not _is_valid(temporary, sha256):
                raise UserError(f"{redact(location)} is not the expected file: its SHA-256 is not {sha256}")


def _is_valid(file: Path, sha256: str | None) -> bool:
    return file.is_file() and sha256 in (None, file_sha256(file))


def file_size(url: str) -> int | None:
    """Ask a web server for the size of a file; None if it does not say."""
    with translate_errors(url):
        files, name = filesystem(url)
        with files.open(name, "rb", block_size=0, size=1) as stream:
            size: int | None = stream.r.content_length
            return size


def resume_download(
    url: str, target: Path, size: int | None, on_progress: Callable[[int], None], headers: Mapping[str, str]
) -> None:
    """Download a file of a web server to `target`, where it is continued after the bytes that are there.

    A server that does not continue files, or a file without a known size, begins again. on_progress: called with bytes.
    headers: of the request; aiohttp drops Authorization where it is redirected to a different host.
    Raises Unreachable for an answer that ends early.
    """
    done = target.stat().st_size if target.is_file() and size else 0
    if size and done == size:
        return
    if size and done > size:
        # Bytes of an earlier version: servers refuse (416) to continue behind the end.
        done = 0
    ranges = {"Range": f"bytes={done}-"} if done else {}
    with translate_errors(url):
        files, name = filesystem(url)
        stream = files.open(name, "rb", block_size=0, size=1, headers={**headers, **ranges})
        with stream, target.open("ab" if done and stream.r.status == 206 else "wb") as out:
            while block := stream.read(BLOCK):
                out.write(block)
                on_progress(out.tell())
    if size is not None and target.stat().st_size < size:
        raise Unreachable(f"{redact(url)} ended after {target.stat().st_size:,} of {size:,} bytes; try again later")


@dataclass(frozen=True)
class RemoteFolder:
    """The files below a URL by relative name with forward slashes; hidden ones, which begin with a dot, are left out.

    Methods raise NotFound if bucket or permission are missing, Unreachable if trying again may help.
    """

    url: str

    def list(self, below: str = "") -> list[str]:
        """List the names of all files below the folder `below`, relative to that folder."""
        root = join(self.url, below) if below else self.url
        with translate_errors(root):
            files, path = filesystem(root)
            names = [file.removeprefix(f"{path}/") for file in files.find(path) if file != path]
        # An empty part, as in `folder//etc/x`, would make a path that begins at the root.
        return [name for name in names if all(part[:1] not in ("", ".") for part in name.split("/"))]

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read many small files at once; those that do not exist are left out."""
        with translate_errors(self.url):
            files, root = filesystem(self.url)
            # One `cat` of all paths, which the drivers of object stores read concurrently.
            paths = {f"{root}/{name}": name for name in names}
            answers = files.cat(list(paths), on_error="return") if paths else {}
        contents = {}
        for path, content in answers.items():
            if isinstance(content, bytes):
                contents[paths[path]] = content
            elif not isinstance(content, FileNotFoundError):
                raise _translate(join(self.url, paths[path]), content)
        return contents

    def write(self, name: str, content: bytes | Path) -> None:
        """Write bytes or the content of a local file; object stores show the file only when it is whole."""
        with translate_errors(join(self.url, name)):
            files, root = filesystem(self.url)
            path = f"{root}/{name}"
            if scheme(self.url) not in OBJECT_STORES:
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, Path):
                files.put_file(str(content), path)
            else:
                files.pipe_file(path, content)

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        # `suppress` comes second, so that it sees the error before it is translated.
        with translate_errors(join(self.url, name)), suppress(FileNotFoundError):
            files, root = filesystem(self.url)
            files.rm_file(f"{root}/{name}")


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Turn every error inside into a UserError that names the location, except those of a full disk."""
    try:
        yield
    # Any class: the clients of the stores have none in common.
    except Exception as error:
        if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_FULL:
            raise
        raise _translate(location, error) from error


def _translate(location: str, error: Exception) -> UserError:
    """Describe in one line what a file system raised; Unreachable if trying again may help."""
    name, answer = redact(location), getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        return NotFound(f"{name} is not there{'; check the address' if is_url(location) else ''}")
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    if scheme(location) in ("http", "https"):
        # The text of aiohttp's errors repeats the URL with its secrets.
        reason = f"the server answers {status}" if status else type(error).__name__
    if isinstance(error, PermissionError) or status in (401, 403, 407):
        return NotFound(f"{name} is not open to this machine ({reason}); check the credentials")
    return Unreachable(f"{name} cannot be reached ({reason}); try again later")
