"""Set up the authentication of Ray before it is imported: Ray reads the environment only once."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

LOCAL = "local"
"""A cluster of this machine that ends with the command."""


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
