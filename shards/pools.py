"""Run tasks in threads or processes that end with what started them, or at least do not delay its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

from procap.errors import UserError

LEAVE_SECONDS = 1.0

Item = TypeVar("Item")
Started = TypeVar("Started")


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


def prefetch(items: Iterable[Item], start: Callable[[Item], Started], ahead: int) -> Generator[Started, None, None]:
    """Call `start` of every item up to `ahead` items before its turn, and yield the results in order.

    An error of `items` or `start` is raised when it occurs, so up to `ahead` items before its turn. Closing this closes
    `items`.
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
    """Yield `function(task)` of each task in the order of the tasks, computed by up to `workers` processes.

    With one worker everything runs in this process. Several workers are spawned processes: `function` must be defined
    in a module, and tasks and results must be picklable. An error of a task is raised at its turn. The processes end
    after an error, when the iterator is closed, on an interrupt, and when this process ends or is killed. Raises
    UserError when one of them is killed.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    # Workers end when this process closes its end of the pipe, which the system does if it is killed.
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(reader,))

    def submit(task: Item) -> Future[Started]:
        # Workers inherit that SIGINT is blocked: Ctrl-C goes to all processes of a terminal, and this one handles it.
        # The resource tracker is started first, because its start would unblock SIGINT again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(function, task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        for future in prefetch(tasks, submit, 2 * workers):
            yield future.result()
    except BrokenProcessPool:
        hint = "was there too little memory? Fewer workers need less"
        raise UserError(f"a worker process was killed; {hint}; what is finished is kept, so start again") from None
    finally:
        writer.close()
        pool.shutdown(cancel_futures=True)
        reader.close()


class _WithoutTorch(MetaPathFinder):
    """Make `import torch` fail: webdataset and SciPy work without it, and it takes ten times as long as all else."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch":
            raise ModuleNotFoundError("torch is not used by these processes", name="torch")


def _start_worker(pipe: Connection) -> None:
    sys.meta_path.insert(0, _WithoutTorch())

    def wait() -> None:
        pipe.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
