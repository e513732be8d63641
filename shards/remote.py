"""Remote files through fsspec: open, download, list, read, write and delete.

A location is a URL (http(s)://, s3://, gs://, abfs://, hf://, and whatever else fsspec opens), a file:// URL or a path.
Object stores take credentials from the environment and the configuration files that their own tools read. Every
failure is a UserError of one line that names the URL without its secrets.
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards.files import file_lock, file_sha256, replace_at_end, require_regular
from shards.urls import canonical, is_url, join, local_path, redact, scheme

# Extra packages by scheme, for the message if one is missing.
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oss": "ossfs"}
# Stores in which an upload becomes visible as a whole; elsewhere files are uploaded under another name and renamed.
OBJECT_STORES = (*PACKAGES, "memory")

SOCKET_SECONDS = 30.0
"""Time without a byte after which a web server counts as unreachable."""
CALL_SECONDS = 300.0
"""Limit of a whole call to an object store, because some of their clients have no timeout while they wait."""
STALL_SECONDS = 10.0
"""Time without an answer or progress after which a warning names the server that is waited for."""
RETRY_WAITS = (0.5, 2.0, 5.0)
BLOCK = 2**23
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

T = TypeVar("T")


def filesystem(location: str) -> tuple[Any, str]:
    """Return the fsspec file system of a location, without a cache of listings, and the path in it."""
    import fsspec

    url = canonical(location)
    path, name = local_path(url), scheme(url)
    if path is not None:
        return fsspec.filesystem("file"), str(path)
    if name not in fsspec.available_protocols():
        raise UsageError(f"{redact(url)}: {name}:// is not an address that can be opened; use https:// or s3://")
    if name in ("http", "https"):
        import aiohttp

        # aiohttp's default would end every download after five minutes.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SOCKET_SECONDS, sock_read=SOCKET_SECONDS)
        headers = {"User-Agent": "procap", "Accept-Encoding": "identity"}
        client = {"timeout": timeout, "headers": headers, "trust_env": True}
        return fsspec.filesystem("http", client_kwargs=client), url
    if redact(url) != url:
        reason = "a name, a password or a key in it would end up in logs: put credentials into the environment"
        raise UsageError(f"{redact(url)}: {reason} instead")
    if name in PACKAGES and not re.match(r"[^/]+://[^/]", url):
        raise UsageError(f"{redact(url)} names no bucket; for example {name}://bucket/folder")
    try:
        files, inner = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        hint = f"pip install {PACKAGES[name]}" if name in PACKAGES else _first_line(error)
        raise UserError(f"{redact(url)} needs a package that is not installed here: {hint}") from error
    return files, inner.rstrip("/")


def open_stream(location: str, *, retry: bool = True) -> BinaryIO:
    """Open a location as an uncached stream of bytes to read from start to end, in a block of `translate_errors`.

    retry: try again a few times while the server does not answer.
    """

    def start(_: Callable[[], None]) -> BinaryIO:
        path = local_path(canonical(location))
        if path is not None:
            require_regular(path)
            return path.open("rb")
        files, name = filesystem(location)
        # For HTTP: one streaming GET. Passing any size avoids a request for the size.
        how = {"block_size": 0, "size": 1} if scheme(location) in ("http", "https") else {"block_size": BLOCK}
        return io.BufferedReader(files.open(name, "rb", **how), 2**20)

    return _attempt(location, start, retry)


def read_bytes(location: str, limit: int, *, retry: bool = True) -> bytes:
    """Read a small file. Raises UserError, also when it is longer than `limit` bytes."""
    with translate_errors(location), open_stream(location, retry=retry) as stream, reach(location):
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{redact(location)} is too long ({limit} bytes are the limit)")
    return data


def download(
    location: str, target: Path, *, sha256: str | None = None, size: int | None = None, replace: bool = False
) -> os.stat_result:
    """Download a file to `target`; it appears there whole and verified or not at all. A valid one is kept.

    Of several processes or threads of a machine one downloads and the others wait. replace: download again what exists.
    Returns the facts about the file that was verified.
    """
    from fsspec.callbacks import Callback

    def receive(alive: Callable[[], None]) -> None:
        def report(total: int | None, value: int, **_: Any) -> None:
            alive()
            if size is not None and max(value, total or 0) > size:
                raise UserError(f"{redact(location)} is not the expected file: it has more than {size} bytes")

        files, path = filesystem(location)
        files.get_file(path, str(temporary), callback=Callback(hooks={"report": report}))

    try:
        # Before the lock too: a copy on a read-only disk needs none.
        if not replace and (stat := _find_valid(target, sha256, size)):
            return stat
        with file_lock(target.with_name(f".{target.name}.lock"), remove=True):
            if not replace and (stat := _find_valid(target, sha256, size)):
                return stat
            with replace_at_end(target) as temporary:
                _attempt(location, receive)
                if problem := _find_problem(temporary, sha256, size):
                    raise UserError(f"{redact(location)} is not the expected file: {problem}; nothing of it was kept")
            return target.stat()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{target} cannot be written ({reason}); free some space or choose another folder") from error


def _find_valid(file: Path, sha256: str | None, size: int | None) -> os.stat_result | None:
    # Before the file is hashed, so that a file that replaces it then has other facts.
    stat = file.stat() if file.is_file() else None
    return stat if stat and not _find_problem(file, sha256, size) else None


def _find_problem(file: Path, sha256: str | None, size: int | None) -> str:
    found = file.stat().st_size
    if size is not None and found != size:
        return f"it has {found} bytes, not {size}"
    if sha256 is not None and (digest := file_sha256(file)) != sha256:
        return f"its SHA-256 is {digest}, not {sha256}"
    return ""


@dataclass(frozen=True)
class RemoteFolder:
    """The files below a URL by relative name with forward slashes; hidden ones, which begin with a dot, are left out.

    Methods raise NotFound if bucket or permission are missing, Unreachable if trying again may help.
    """

    url: str

    def list(self, below: str = "") -> dict[str, str]:
        """List every file below the folder `below`: its name relative to that folder, and its version."""
        root = join(self.url, below) if below else self.url
        with reach(root):
            files, path = filesystem(root)
            found = _call(files, "find", path, detail=True)
        names = {name.removeprefix(f"{path}/"): version(facts) for name, facts in found.items() if name != path}
        # An empty part, as in `folder//etc/x`, would make a path that begins at the root.
        return {name: tag for name, tag in names.items() if all(part[:1] not in ("", ".") for part in name.split("/"))}

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Read many small files at once; those that do not exist are left out."""
        with reach(self.url):
            files, root = filesystem(self.url)
            paths = {f"{root}/{name}": name for name in names}
            found = _call(files, "cat", list(paths), on_error="return") if paths else {}
        contents = {}
        for path, content in found.items():
            if isinstance(content, bytes):
                contents[paths[path]] = content
            elif not isinstance(content, FileNotFoundError):
                raise _translate(join(self.url, paths[path]), content)
        return contents

    def write(self, name: str, content: bytes | Path) -> None:
        """Write bytes or the content of a local file; the remote file becomes visible as a whole."""
        with reach(join(self.url, name)):
            files, root = filesystem(self.url)
            path = temporary = f"{root}/{name}"
            if scheme(self.url) not in OBJECT_STORES:
                folder, _, last = path.rpartition("/")
                files.makedirs(folder, exist_ok=True)
                temporary = f"{folder}/.{last}.{os.getpid()}-{threading.get_ident()}.tmp"
            try:
                if isinstance(content, Path):
                    _call(files, "put_file", str(content), temporary)
                else:
                    _call(files, "pipe_file", temporary, content)
                if temporary != path:
                    files.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    if temporary != path:
                        files.rm_file(temporary)
                raise

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with reach(join(self.url, name)), suppress(FileNotFoundError):
            files, root = filesystem(self.url)
            _call(files, "rm_file", f"{root}/{name}")


def version(facts: Mapping[str, Any]) -> str:
    """Return a token that changes when the store's file changes, from the metadata that the store gives."""
    keys = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "created")
    found = next((facts[key] for key in keys if facts.get(key)), "")
    # A timestamp, because a store can give the same time in several time zones.
    moment = found.timestamp() if hasattr(found, "timestamp") else found
    return f"{moment}-{facts.get('size')}"


def _call(files: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    if getattr(files, "async_impl", False):
        kwargs["timeout"] = CALL_SECONDS
    return getattr(files, method)(*args, **kwargs)


def _attempt(location: str, action: Callable[[Callable[[], None]], T], retry: bool = True) -> T:
    """Run `action` with a function to call on progress, again after short waits while the server does not answer."""
    waits = RETRY_WAITS if retry else ()
    for number in range(len(waits) + 1):
        try:
            with reach(location, f", attempt {number + 1} of {len(waits) + 1}") as alive:
                return action(alive)
        except Unreachable:
            if number == len(waits):
                raise
            time.sleep(waits[number])
    raise AssertionError


@contextmanager
def reach(location: str, what: str = "") -> Iterator[Callable[..., None]]:
    """Translate errors, and warn as `warn_of_stall` does."""
    with warn_of_stall(location, what) as alive, translate_errors(location):
        yield alive


@contextmanager
def warn_of_stall(location: str, what: str = "") -> Iterator[Callable[..., None]]:
    """Warn once after `STALL_SECONDS` without progress.

    The block gets a function to call on progress; after `alive(waiting=False)` no answer is expected until the next
    call.
    """
    latest: float | None = time.monotonic()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(STALL_SECONDS / 10):
            if latest is not None and time.monotonic() - latest >= STALL_SECONDS:
                warnings.warn(f"waiting for {redact(location)}{what}", stacklevel=1)
                return

    def alive(waiting: bool = True) -> None:
        nonlocal latest
        latest = time.monotonic() if waiting else None

    if is_url(location):
        threading.Thread(target=watch, daemon=True, name="stall").start()
    try:
        yield alive
    finally:
        done.set()


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Turn every error inside into a UserError that names the location."""
    try:
        yield
    except UserError:
        raise
    # Any class: the clients of the stores have none in common.
    except Exception as error:
        raise _translate(location, error) from error


def _translate(location: str, error: Exception) -> UserError:
    """Describe in one line what a file system raised; Unreachable if trying again may help."""
    name, kind, reason = redact(location), type(error).__name__, _first_line(error)
    # aiohttp's errors carry the status; their text would repeat the URL with its secrets.
    status = getattr(error, "status", None) or 0
    if status:
        reason = f"the server answers {status} {getattr(error, 'message', '')}".strip()
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return UserError(
            f"{name} does not fit on the disk ({error.strerror}); free some space or choose another folder"
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        return NotFound(f"{name} is not there{'; check the address' if is_url(location) else ''}")
    if not is_url(location):
        return UserError(f"{name} cannot be read ({getattr(error, 'strerror', None) or reason})")
    if isinstance(error, PermissionError) or status in (401, 403, 407):
        return NotFound(f"{name} is not open to this machine ({reason}); check the credentials")
    if re.search("Credential|Profile|Token|Auth", kind):
        return UserError(f"{name} needs credentials, and this machine has none that work ({kind})")
    # The text of errors of addresses is the URL with its secrets.
    if re.search("Redirect|url|URL", kind):
        return UserError(f"{name} is no usable http(s):// address, or redirects too often ({kind})")
    if "Certificate" in kind or (status and status != 429 and status < 500):
        return UserError(f"{name} cannot be read ({reason})")
    if isinstance(error, TimeoutError):
        reason = "no answer in time"
    elif kind == "ClientPayloadError":
        reason = "the answer was cut short"
    return Unreachable(f"{name} cannot be reached ({reason}); try again later")


def _first_line(error: Exception) -> str:
    # The query of an address may hold a signature.
    text = re.sub(r"\?\S+", "", str(error).strip().partition("\n")[0])[:200].rstrip(". ")
    return text or type(error).__name__
