"""URLs as text: recognize, normalize, join and print them, and name their local copies."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from procap.errors import UsageError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(text: str) -> bool:
    """Whether `text` begins with a scheme (https://, gs://, file://) and is not a plain path."""
    return URL.match(text) is not None


def require_location(text: str) -> None:
    """Raise UsageError for a URL that would be read as the name of a folder, such as s3:/bucket/path."""
    # Libraries for paths make one slash of two. Other machines would never see that folder.
    if not is_url(text) and (match := re.match(r"[A-Za-z][A-Za-z0-9+.-]+:[/:]", text)):
        example = "a URL has two slashes there, as s3://bucket/path; a folder of that name is written with ./ in front"
        raise UsageError(f"{match[0]}... is no URL: {example}")


def scheme(url: str) -> str:
    """Return the scheme in lower case, empty for a path."""
    return url.partition(":")[0].lower() if is_url(url) else ""


def canonical(url: str) -> str:
    """Return the one spelling of a URL: no trailing slash and no fragment."""
    # In object stores # can be part of a name.
    if scheme(url) not in ("http", "https"):
        return url.rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UsageError(f"{redact(url)} is not a usable URL") from None
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), parts.query, ""))


def join(root: str, name: str) -> str:
    """Return the URL of the file `name` (with forward slashes) below `root`, with the query of `root`."""
    if scheme(root) in ("http", "https"):
        parts = urlsplit(root)
        return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(name)}", parts.query, ""))
    # Object stores take names as they are, without percent signs for special characters.
    return f"{root.rstrip('/')}/{name}"


def redact(url: str) -> str:
    """Return a URL for messages: without user, password and query, which may be secret."""
    if scheme(url) in ("", "file"):
        return url
    try:
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        # In abfs://container@account.dfs.core.windows.net/path no user is named.
        is_container = scheme(url) in ("abfs", "abfss") and user and ":" not in user
        return f"{parts.scheme}://{parts.netloc if is_container else host}{parts.path}"
    except ValueError:
        return f"{scheme(url)}://..."


def cache_name(url: str) -> str:
    """Return a folder name for the local copy of a URL: its host, and a hash so that no two URLs share a folder."""
    url = canonical(url)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", redact(url).partition("://")[2].partition("/")[0])[:80] if is_url(url) else ""
    return f"{host or scheme(url) or 'folder'}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def local_path(url: str) -> Path | None:
    """Return the file that a plain path or a file:// URL of this machine names; None for another scheme."""
    if not is_url(url):
        return Path(url)
    if scheme(url) != "file":
        return None
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise UsageError(f"{url} names another machine; a file:// URL has three slashes: file:///path")
    return Path(unquote(slash + path))
