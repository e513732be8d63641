"""Resolve the address of a Ray cluster and its token, before Ray is imported: Ray reads the environment only once."""

from __future__ import annotations

import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from procap.errors import UsageError

LOCAL = "local"
"""A cluster of this machine that ends with the command."""

_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])"


def ray_address(address: str = "") -> str:
    """Find the address for `ray.init`: `address`, else $RAY_ADDRESS, which Ray sets in a job, else "auto".

    This is a cluster that `ray start` made on this machine. Raises UsageError for the address of a dashboard.
    """
    text = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    if text != "auto" and not re.fullmatch(rf"{_HOST}:\d{{1,5}}", text):
        raise UsageError(
            f"{'--address' if address else '$RAY_ADDRESS'} {text} is not that of `ray start --head`: HOST:6379 or auto "
            "would work; to run a command behind a dashboard: procap submit --address http://HOST:8265 -- COMMAND"
        )
    return text


def set_auth_mode(*, private: bool = False) -> None:
    """Set $RAY_AUTH_MODE, which Ray otherwise guesses differently in every command; a value set by the user is kept.

    A token that is set is used. private: this process starts the cluster for itself; it gets its own token,
    because some of Ray's ports listen on every network of the machine.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return
    assert "ray" not in sys.modules, "Ray was imported before its authentication was set up"
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN"))
    if not has_token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
        with suppress(OSError, ValueError, RuntimeError):
            has_token = bool(path.expanduser().read_text(encoding="utf-8").strip())
    if private and not has_token:
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token" if private or has_token else "disabled"
