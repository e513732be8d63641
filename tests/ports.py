"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody listens on, of those that neither connections nor Ray's workers are given by themselves.

    Ray binds some of its ports many seconds after it was told of them.
    """
    while True:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", random.randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])
