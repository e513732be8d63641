"""Find free ports for the servers that tests start."""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle

FIRST, LAST = 20_000, 32_000
"""Outside the ranges from which the system gives ports to connections, and Ray to its workers."""
MOST_WORKERS = 4
"""Processes of pytest-xdist that share the ports."""


def free_port() -> int:
    """Return a port that is not in use, and that no other process which calls this will return soon.

    Ray binds some ports many seconds after it was started with them. Therefore a port is returned again only after all
    others, and each worker of pytest-xdist has ports of its own.
    """
    for port in _candidates():
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port
    raise AssertionError


@functools.cache
def _candidates() -> Iterator[int]:
    """Yield the ports of this process in random order, for ever: another pytest starts with other ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    ports = list(range(FIRST + worker, LAST, MOST_WORKERS))
    random.SystemRandom().shuffle(ports)
    return cycle(ports)


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server accepts connections at `host:port`."""
    with socket.socket() as connection:
        return connection.connect_ex((host, port)) == 0
