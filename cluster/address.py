"""Resolve addresses of Ray clusters and their token. Used before Ray is imported, which reads the environment once."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from procap.errors import UsageError

LOCAL = "local"
"""A cluster of this machine that ends with the command."""

DASHBOARD_PORT = 8265
HERE = f"http://127.0.0.1:{DASHBOARD_PORT}"
DASHBOARD_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(:(?P<port>\d{1,5}))?")


class Dashboard(NamedTuple):
    """The URL that jobs are submitted to, and the flag or variable that named it."""

    url: str
    origin: str

    def __str__(self) -> str:
        return f"{self.url} ({self.origin})" if self.origin.startswith("$") else self.url


def dashboard(given: str = "") -> Dashboard:
    """Find the URL of a cluster's dashboard: `given`, else $RAY_API_SERVER_ADDRESS, else $RAY_ADDRESS, else localhost.

    $RAY_ADDRESS usually has the port for nodes and drivers; the dashboard is then expected at its default
    port of the same host. Raises UsageError for an invalid address.
    """
    if given:
        return Dashboard(_dashboard_url(given, "--address"), "--address")
    for name in DASHBOARD_VARIABLES:
        if text := os.environ.get(name):
            return Dashboard(_dashboard_url(text, f"${name}", whose_port=name != "RAY_ADDRESS"), f"${name}")
    return Dashboard(HERE, "this machine")


def ray_address(given: str = "") -> str:
    """Find the address for `ray.init`: `given`, else $RAY_ADDRESS, which Ray sets in a job, else `LOCAL`.

    "auto" is a cluster that `ray start` made on this machine. Raises UsageError for the address of a dashboard.
    """
    text = given or os.environ.get("RAY_ADDRESS", "") or LOCAL
    origin = "--address" if given else "$RAY_ADDRESS"
    if text in (LOCAL, "auto"):
        return text
    if text.startswith(("http://", "https://")):
        raise UsageError(
            f"{origin} {text} is a dashboard, which takes submitted commands: put `procap submit --address {text} --` "
            "before this one, or name the port of `ray start --head`, as in HOST:6379"
        )
    if text.startswith("ray://"):
        raise UsageError(f"{origin} {text}: Ray Client is not supported; use HOST:6379 on a node of the cluster")
    found = _ADDRESS.fullmatch(text)
    if found is None or found["port"] is None:
        raise UsageError(f"{origin} {text} is no address; HOST:6379, auto or local would work")
    return text


def settle_auth(*, private: bool = False) -> None:
    """Set $RAY_AUTH_MODE, which Ray otherwise guesses differently in every command; a value set by the user is kept.

    A token that is set is used. private: this process starts the cluster for itself; it gets a token of its own,
    because some of Ray's ports listen on every network of the machine.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return
    assert "ray" not in sys.modules, "Ray was imported before its authentication was set up"
    found = _has_token()
    if private and not found:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token" if private or found else "disabled"


def _has_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
    try:
        return bool(path.expanduser().read_text(encoding="utf-8").strip())
    except (OSError, ValueError, RuntimeError):
        return False


def _dashboard_url(text: str, origin: str, *, whose_port: bool = True) -> str:
    if text in (LOCAL, "auto"):
        return HERE
    scheme, separator, rest = text.rpartition("://")
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(text)
            fine = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            fine = False
        if not fine or parts.query:
            raise UsageError(f"{origin} is no address; http://HOST:{DASHBOARD_PORT} would work")
        if parts.username or parts.password:
            raise UsageError(f"{origin} holds a password; set RAY_AUTH_TOKEN_PATH to a file with the cluster's token")
        return text.rstrip("/")
    found = _ADDRESS.fullmatch(rest.rstrip("/"))
    if found is None or (separator and scheme != "ray"):
        raise UsageError(f"{origin} {text} is no address of a dashboard; http://HOST:{DASHBOARD_PORT} would work")
    port = found["port"] if found["port"] and whose_port and scheme != "ray" else DASHBOARD_PORT
    return f"http://{found['host']}:{port}"
