"""Run tasks in threads that do not hold up the end of what started them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

LEAVE_SECONDS = 1.0


@contextmanager
def thread_pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a pool of so many threads called `name`, None without workers; its tasks end or are cancelled at the end.

    A thread that waits for a server that does not answer is left behind after `LEAVE_SECONDS`.
    """
    if not workers:
        yield None
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    try:
        yield pool
    finally:
        # The end of the interpreter has waited for the threads already, and starts no new ones.
        if not sys.is_finalizing():
            ending = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
            ending.start()
            ending.join(LEAVE_SECONDS)
