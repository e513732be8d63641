"""Many tasks over several processes: results in the order of the tasks, progress on the way, nothing left behind.

Processes are started afresh (spawned), so that threads and open files of this one do no harm there. They end with this
process however it ends: a process that is killed leaves none of its workers at work.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from shards.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

# Called by a task with how much of it is done.
Report = Callable[[int], None]

# Seconds between two reports of a worker: often enough for a progress bar, too rarely to cost anything.
REPORT_EVERY = 0.1


def in_order(
    function: Callable[[Task, Report], Result],
    tasks: Iterable[Task],
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Result]:
    """`function(task, report)` of each task, in the order of the tasks; `on_progress(number of the task, done)`.

    With one worker everything runs in this process. With more, `function` is one of a module, tasks and results can be
    pickled, and `on_progress` is called here. What a task raises is raised here and ends the others at once, as does
    closing the iterator or an interrupt. Raises DataError when a process is killed.
    """
    report = on_progress or (lambda number, done: None)
    if workers <= 1:
        for number, task in enumerate(tasks):
            yield function(task, partial(report, number))
        return
    crew: dict[Connection, SpawnProcess] = {}
    try:
        _start(crew, function, workers)
        yield from _gather(crew, iter(enumerate(tasks)), report)
    finally:
        for process in crew.values():
            process.kill()
        for pipe, process in crew.items():
            process.join()
            process.close()
            pipe.close()


def _start(crew: dict[Connection, SpawnProcess], function: Callable[..., Any], workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches every process of a terminal. This one answers it; workers that are starting would print a
    # traceback, so they inherit that it is blocked. The tracker would unblock it here if it were not running yet.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            process.start()
            crew[ours] = process
            theirs.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _gather(
    crew: dict[Connection, SpawnProcess], tasks: Iterator[tuple[int, Any]], report: Callable[[int, int], None]
) -> Iterator[Any]:
    busy: dict[Connection, int] = {}
    finished: dict[int, Any] = {}
    due = 0

    def assign(pipe: Connection) -> None:
        number, task = next(tasks, (None, None))
        if number is not None:
            busy[pipe] = number
            with _alive(crew[pipe]):
                pipe.send(task)

    for pipe in crew:
        assign(pipe)
    while busy:
        for ready in connection.wait(list(busy)):
            assert isinstance(ready, Connection)
            with _alive(crew[ready]):
                kind, value = ready.recv()
            if kind == "failed":
                raise value
            if kind == "finished":
                finished[busy.pop(ready)] = value
                assign(ready)
            else:
                report(busy[ready], value)
        while due in finished:
            yield finished.pop(due)
            due += 1


@contextmanager
def _alive(process: SpawnProcess) -> Iterator[None]:
    """Around talking to a worker: one that was killed is said to be so."""
    try:
        yield
    except (EOFError, ConnectionError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = "; was there too little memory? Fewer workers need less" if code == -signal.SIGKILL else ""
        raise DataError(f"a worker process {how}{cause}; what is finished is kept, so start again") from None


def _serve(pipe: Connection, function: Callable[[Any, Report], Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while True:
            told = _Told(pipe)
            try:
                answer = "finished", function(pipe.recv(), told.report)
                told.flush()
            except EOFError:
                return
            except Exception as error:
                answer = "failed", error
            try:
                pipe.send(answer)
            except (TypeError, AttributeError, ValueError, pickle.PicklingError):
                pipe.send(("failed", RuntimeError(repr(answer[1]))))
    except ConnectionError:
        # The parent is gone or has closed the pipe; the watching thread ends this process.
        return


class _Told:
    """What the parent knows of a task; it is told not more often than every `REPORT_EVERY` seconds, and at the end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._time, self._done, self._sent = pipe, time.monotonic(), 0, 0

    def report(self, done: int) -> None:
        self._done = done
        if time.monotonic() - self._time >= REPORT_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._done != self._sent:
            self._time, self._sent = time.monotonic(), self._done
            self._pipe.send(("progress", self._done))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
