"""The names of things elsewhere: what counts as a URL, how one is shown, and how a file below one is named."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from shards.errors import DataUsageError

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|pipe:")
HUB_PAGE = re.compile(
    r"(?P<repository>https?://huggingface\.co/datasets/[^/?#]+/[^/?#]+)"
    r"(/(tree|blob|raw|resolve)/(?P<branch>[^/?#]+))?(?=[/?#]|$)"
)


def is_url(text: str) -> bool:
    """Whether `text` names something by a scheme (https://, gs://, file://, pipe:) and not by a plain path."""
    return URL.match(text) is not None


def scheme(url: str) -> str:
    return url.partition(":")[0].lower() if is_url(url) else ""


def tells_absence(url: str) -> bool:
    """Whether what opens a URL says that a file is not there; a command that fails says nothing about why."""
    return scheme(url) not in ("pipe", "hf")


def canonical(url: str) -> str:
    """The same place in one spelling: no trailing slash, and the files of a Hugging Face repository, not its pages.

    Raises DataUsageError for what cannot be a URL.
    """
    if scheme(url) in ("", "pipe"):
        return url
    hub = HUB_PAGE.match(url)
    if hub:
        url = f"{hub['repository']}/resolve/{hub['branch'] or 'main'}{url[hub.end() :]}"
    if scheme(url) not in ("http", "https"):
        return url.rstrip("/")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise DataUsageError(f"{shown(url)} is not a usable URL") from None
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), parts.query, ""))


def join(root: str, name: str) -> str:
    """The URL of the file `name` (with forward slashes) below `root`; a query, such as a signature, stays behind it."""
    if scheme(root) in ("http", "https"):
        parts = urlsplit(root)
        return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/{quote(name)}", parts.query, ""))
    return f"{root.rstrip('/')}/{name}"


def shown(url: str) -> str:
    """How messages name a URL: without what may be secret in it (user, password, query, the arguments of a command)."""
    if scheme(url) == "pipe":
        return f"pipe:{(url[5:].split() or [''])[0]} ..."
    if not is_url(url):
        return url
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    except ValueError:
        return f"{scheme(url)}://..."


def has_secrets(url: str) -> bool:
    """Whether `shown` leaves something of a URL out."""
    return shown(url) != url


def folder_name(url: str) -> str:
    """A name for what is kept of a URL: host or scheme for people, a hash so that no two URLs share a folder."""
    url = canonical(url)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", shown(url).partition("://")[2].partition("/")[0])[:80] if "://" in url else ""
    return f"{host or scheme(url) or 'folder'}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def local_path(url: str) -> Path | None:
    """The file that a plain path or a file:// URL names; None for another scheme.

    Raises DataUsageError for a file:// URL of another machine.
    """
    if not is_url(url):
        return Path(url)
    if scheme(url) != "file":
        return None
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost"):
        raise DataUsageError(f"{url} names another machine; a file:// URL has three slashes: file:///path")
    return Path(unquote(slash + path))
