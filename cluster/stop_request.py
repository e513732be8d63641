"""Ask the trainings of a command on Ray to save their states before Ray ends their processes.

Ray kills the processes of a driver that disconnects within 0.2 s. Therefore a driver that is stopped writes a key into
the key-value store of the cluster first, which every training polls; the keys of trainings show it who is still saving.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL_SECONDS = 0.3
SAVE_SECONDS = 10.0
"""How long a driver waits for states: that of a few steps."""


@contextmanager
def watch_stop_request() -> Iterator[Callable[[], int | None]]:
    """Watch for `request_stop` of the driver; yields a function that a training calls at every step.

    It returns the signal that asks to stop, else None. It never blocks, also while the head of the cluster is away.
    """
    steps, ended, stop = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        from ray.experimental import internal_kv as store
        from ray.train._internal.session import get_session

        own = _key(f"training/{socket.gethostname()}/{os.getpid()}")
        # A head that is away or a driver that has disconnected ends the calls with several kinds of exceptions.
        with suppress(Exception):
            while not ended.wait(POLL_SECONDS):
                if steps.is_set():
                    store._internal_kv_put(own, b"")
                if not stop.is_set() and store._internal_kv_exists(_key("stop")):
                    stop.set()
                    # A report waits for the driver, which answers none any more.
                    if session := get_session():
                        session.continue_lock.release()
        with suppress(Exception):
            store._internal_kv_del(own)

    def asked() -> int | None:
        steps.set()
        return signal.SIGINT if stop.is_set() else None

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield asked
    finally:
        ended.set()


def request_stop() -> None:
    """Ask all trainings of this driver to save and stop, and wait until they have, `SAVE_SECONDS` at most."""

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
