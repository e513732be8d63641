"""Run the ranks of a training as processes that can be observed from outside and killed at a chosen moment.

A process that imports torch costs seconds, one that is forked nothing: a server of `multiprocessing` imports once and
forks every rank. A rank writes its stage into shared memory, which a kill leaves readable.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.console.errors import explain
from runner.config import RunConfig, RuntimeConfig, Target
from runner.run_folders import RunFolder

STAGES = ("start-up", "joining", "loading", "steps", "writing a state", "finishing", "evaluating", "the end")
START_UP, JOINING, LOADING, STEPS, WRITING, FINISHING, EVALUATING, THE_END = range(len(STAGES))

# Many processes on few cores: a second thread in each would only wait.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True)
class ObservedRun:
    """The work of all ranks: train `config` and evaluate on `targets`; every part can be repeated.

    every: seconds between states. timeout: seconds that ranks wait for each other.
    """

    config: RunConfig
    targets: tuple[Target, ...]
    data: Path
    results: Path
    steps: int
    every: float
    timeout: float

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.results / self.config.path)

    @property
    def place(self) -> RuntimeConfig:
        return RuntimeConfig(
            self.data,
            self.results,
            device="cpu",
            tracking_uri="off",
            quiet=True,
            checkpoint_seconds=self.every,
            timeout=self.timeout,
        )


@dataclass(frozen=True)
class Signs:
    """Shared memory. stages: the current stage of each rank; ticks: when each step was done, 0.0 for never."""

    stages: Any
    ticks: Any

    def reached(self) -> int:
        """Return the last step that was done, 0 for none."""
        return max((step for step, moment in enumerate(self.ticks) if moment), default=0)

    def resumed_from(self) -> int | None:
        """Return the step before the first step of this attempt, None if no step was done."""
        return next((step - 1 for step, moment in enumerate(self.ticks) if moment), None)


class Attempt:
    """Run `size` ranks on a run until they end or the block ends."""

    def __init__(self, run: ObservedRun, size: int) -> None:
        self.run, self.size = run, size

    def __enter__(self) -> Attempt:
        context = _context()
        self._folder = TemporaryDirectory(prefix="ranks-")
        self.signs = Signs(context.RawArray("i", self.size), context.RawArray("d", self.run.steps + 1))
        port = _free_port()
        self._processes = [
            context.Process(target=_work, args=(self.run, rank, self.size, port, str(self._file(rank)), self.signs))
            for rank in range(self.size)
        ]
        for process in self._processes:
            process.daemon = True
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.alive():
            self.signal(rank, signal.SIGKILL)
        self._folder.cleanup()

    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.exitcode is None]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal; after SIGKILL wait until the rank has ended."""
        process = self._processes[rank]
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join()

    def wait(self, seconds: float, look: Callable[[], None]) -> bool:
        """Wait until all ranks have ended and call `look` now and then; False if some have not after `seconds`."""
        deadline = time.monotonic() + seconds
        while alive := self.alive():
            if time.monotonic() > deadline:
                return False
            look()
            self._processes[alive[0]].join(0.03)
        look()
        return True

    def code(self, rank: int) -> int | None:
        """Return the exit code, negative for a signal, None while the rank runs."""
        return self._processes[rank].exitcode

    def stderr(self, rank: int) -> str:
        file = self._file(rank)
        return file.read_text() if file.exists() else ""

    def stage(self, rank: int) -> int:
        """Return the current stage of a rank, an index of `STAGES`."""
        stage: int = self.signs.stages[rank]
        if stage != LOADING:
            return stage
        reached = self.signs.reached()
        if reached and any(self.run.folder.state.glob(".*.tmp")):
            return WRITING
        return FINISHING if reached == self.run.steps else STEPS if reached else LOADING

    def _file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.txt"


def _work(run: ObservedRun, rank: int, size: int, port: int, output: str, signs: Signs) -> None:
    """Run one rank; like the command line it prints one line if something fails."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1")
    code = 0
    try:
        _train_and_count(run, rank, signs)
    except Exception as error:
        message, code = explain(error)
        print(f"procap: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)


def _train_and_count(run: ObservedRun, rank: int, signs: Signs) -> None:
    import torch

    from runner.distributed.process_group import init_process_group
    from runner.distributed.ranks import ranks_from_environment
    from runner.evaluate import evaluate
    from runner.train import train

    signs.stages[rank] = JOINING
    with init_process_group(ranks_from_environment(), torch.device("cpu"), run.timeout) as group:
        signs.stages[rank] = LOADING
        with _ticking(signs):
            train(run.config, run.place, group=group)
        signs.stages[rank] = EVALUATING
        for target in run.targets:
            evaluate(run.config, target, run.place, group=group)
        signs.stages[rank] = THE_END


@contextmanager
def _ticking(signs: Signs) -> Iterator[None]:
    """Write the time of every counted step into `signs`."""
    from runner.checkpoint import TrainState

    count = TrainState.count

    def counted(state: TrainState, *what: Any) -> None:
        count(state, *what)
        signs.ticks[state.step] = time.time()

    with patch.object(TrainState, "count", counted):
        yield


@functools.cache
def _context() -> ForkServerContext:
    """Start the server that ranks are forked from; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "runner.train", "runner.evaluate", "runner.distributed.process_group", __name__]
    )
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
