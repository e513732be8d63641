"""Ports for servers that tests start."""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle

FIRST, LAST, WORKERS = 20_000, 32_000, 4
"""Of those that neither connections nor Ray's workers are given by themselves; how many processes share them."""


def free_port() -> int:
    """A port that nobody listens on, nor is about to: another worker of pytest has others, and this one tries all.

    Ray binds some of its ports many seconds after it was told of them.
    """
    for port in _untried():
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))
            return port
    raise AssertionError


@functools.cache
def _untried() -> Iterator[int]:
    """The ports of this process, each once before any comes again; not those first that another pytest begins with."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    ports = list(range(FIRST + worker, LAST, WORKERS))
    random.SystemRandom().shuffle(ports)
    return cycle(ports)
