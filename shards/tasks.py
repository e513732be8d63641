"""Run tasks ahead of their use, in threads or processes that end with what started them."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from procap.errors import UserError

Item = TypeVar("Item")
Started = TypeVar("Started")


@contextmanager
def thread_pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor | None]:
    """Yield a pool of so many threads called `name`, None without workers; waiting tasks are cancelled at the end."""
    if not workers:
        yield None
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def prefetch(items: Iterable[Item], start: Callable[[Item], Started], ahead: int) -> Generator[Started, None, None]:
    """Call `start` of every item up to `ahead` items before its turn, and yield the results in order.

    An error of `items` or `start` is raised when it occurs, before its turn. Closing this closes `items`.
    """
    begun: deque[Started] = deque()
    try:
        for item in items:
            begun.append(start(item))
            if len(begun) > ahead:
                yield begun.popleft()
        while begun:
            yield begun.popleft()
    finally:
        # Release unused results now; the traceback of an error would keep this frame and them alive.
        begun.clear()
        if callable(close := getattr(items, "close", None)):
            close()


def map_in_order(function: Callable[[Item], Started], tasks: Iterable[Item], workers: int = 1) -> Iterator[Started]:
    """Yield `function(task)` of each task in the order of the tasks, computed by up to `workers` spawned processes.

    With one worker everything runs in this process; else `function` must be defined in a module, tasks and results be
    picklable. An error of a task is raised at its turn. Raises UserError when a worker is killed.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    # A forked process would inherit locks that threads of this one hold, such as those of torch or a progress bar.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        # A second task for each worker waits in the queue, and few results wait for their turn.
        for future in prefetch(tasks, lambda task: pool.submit(function, task), 2 * workers):
            yield future.result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed; was there too little memory? Fewer workers need less") from None
    finally:
        pool.shutdown(cancel_futures=True)
