"""Save the states of the trainings of a driver on Ray before Ray kills their processes.

Ray kills the processes of a driver within 0.2 s after it disconnects. A driver that is stopped therefore first writes
the key `stop` into the key-value store of the cluster. Every training polls that key; it has a key of its own there,
which it deletes after it has saved.

Ray has no public interface for either. The store lives on the head node, so losing another node does not lose the
request. There is no public way to unblock `tune.report` after the driver disconnects.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL_SECONDS = 0.3
SAVE_SECONDS = 10.0
"""How long a driver waits for states: that of a few steps."""


@contextmanager
def watch_stop_request() -> Iterator[Callable[[], int | None] | None]:
    """Watch for `request_stop` of the driver; yields a function that a training calls at every step, None without Ray.

    The function returns SIGINT after a request, else None. It does not block, even if the head node is lost.
    """
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        yield None
        return
    steps, ended, stop = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        from ray.experimental import internal_kv as store
        from ray.train._internal.session import get_session

        own = _key(f"training/{socket.gethostname()}/{os.getpid()}")
        # If the head node is lost or the driver has disconnected, the calls raise exceptions of several types.
        with suppress(Exception):
            while not ended.wait(POLL_SECONDS):
                if steps.is_set():
                    store._internal_kv_put(own, b"")
                if not stop.is_set() and store._internal_kv_exists(_key("stop")):
                    stop.set()
                    # A training that reports a metric to Ray Tune waits for the driver, which does not reply any more.
                    if session := get_session():
                        session.continue_lock.release()
        with suppress(Exception):
            store._internal_kv_del(own)

    def requested() -> int | None:
        steps.set()
        return signal.SIGINT if stop.is_set() else None

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield requested
    finally:
        ended.set()


def request_stop() -> None:
    """Request that all trainings of this driver save and stop; wait for them, `SAVE_SECONDS` at most."""

    def request() -> None:
        from ray.experimental import internal_kv as store

        with suppress(Exception):
            store._internal_kv_put(_key("stop"), b"")
            while store._internal_kv_list(_key("training/")):
                time.sleep(0.1)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(SAVE_SECONDS)


def _key(name: str) -> str:
    import ray

    return f"procap/{ray.get_runtime_context().get_job_id()}/{name}"
