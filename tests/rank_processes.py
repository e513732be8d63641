"""Run a function of a test module in N processes with the environment of a launcher, and kill those still running.

Importing torch takes seconds, forking a process nothing. Therefore one server process without threads, which has
imported torch and the runner, forks all ranks of a test run, also where several workers of pytest share its tests.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, TextIO

import psutil
from filelock import FileLock
from ports import free_port

ROOT = Path(__file__).resolve().parents[1]
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Before any test changes it: one server serves all tests, in any order.
ENVIRONMENT = {**os.environ, **THREADS}
PRELOADED = (
    "torch._dynamo", "pytest", "runner.train", "runner.evaluate", "runner.distributed.connect",
    "benchmarks.cli.app", "benchmarks.cli.train", "benchmarks.cli.eval",
)  # fmt: skip
SECONDS = 900.0
"""Longer than any rank takes on a busy machine, including the start of the server."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended. code: its exit code, negative for a signal."""

    code: int
    out: str
    err: str


class Processes:
    """`size` ranks that run function(*arguments), a function at the top of a module in `tests`; killed at the end.

    Arguments must be JSON. environ: additions for all ranks. to_the_end: end the interpreter normally, which takes a
    second and may fail; otherwise a rank exits when the function returns.
    """

    def __init__(self, size, function, *arguments, environ=None, to_the_end=False):
        self.size = size
        self._task = [Path(function.__code__.co_filename).stem, function.__name__, list(arguments)]
        self._environ = dict(environ or {})
        self._how = {"to_the_end": to_the_end}

    def __enter__(self) -> Processes:
        self._folder = TemporaryDirectory()
        self._began = time.monotonic()
        shared = {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(self.size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **master, **self._environ}
            _ask_server({"place": str(self._place(rank)), "environ": own, "task": self._task, **self._how})
        return self

    def __exit__(self, *error: object) -> None:
        for rank in range(self.size):
            self.kill(rank)
        self._folder.cleanup()

    def pid(self, rank: int) -> int:
        return int(_read(self._place(rank).with_suffix(".pid"), self._time_left(SECONDS)))

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a rank, unless it has ended."""
        if not self._place(rank).with_suffix(".code").exists():
            # It may have ended without its exit code being written yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid(rank), signum)
            if signum == signal.SIGKILL:
                self.code(rank)

    def code(self, rank: int, seconds: float = SECONDS) -> int:
        """Return the exit code of a rank; fails the test with the output of all if it runs longer than `seconds`."""
        try:
            return int(_read(self._place(rank).with_suffix(".code"), self._time_left(seconds)))
        except TimeoutError:
            outputs = {each: self.output(each) + self.output(each, "err") for each in range(self.size)}
            raise AssertionError(f"rank {rank} did not end in {seconds} seconds: {outputs}") from None

    def output(self, rank: int, stream: str = "out") -> str:
        file = self._place(rank).with_suffix(f".{stream}")
        return file.read_text() if file.exists() else ""

    def wait(self, seconds: float = SECONDS) -> list[Ended]:
        """Wait for all ranks; returns how each ended."""
        codes = [self.code(rank, seconds) for rank in range(self.size)]
        return [Ended(code, self.output(rank), self.output(rank, "err")) for rank, code in enumerate(codes)]

    def _place(self, rank: int) -> Path:
        return Path(self._folder.name) / str(rank)

    def _time_left(self, seconds: float) -> float:
        return self._began + seconds - time.monotonic()


def run_ranks(size: int, function: Callable[..., None], *arguments: Any, seconds=SECONDS, **how: Any) -> list[Ended]:
    """Run `Processes` with these arguments; returns how each rank ended."""
    with Processes(size, function, *arguments, **how) as processes:
        return processes.wait(seconds)


def _read(file: Path, seconds: float) -> str:
    """Wait for a file that another process writes and return its text."""
    deadline = time.monotonic() + max(seconds, 5.0)
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(file)
        time.sleep(0.01)
    return file.read_text()


def _ask_server(request: dict[str, Any]) -> None:
    _server().write(json.dumps(request) + "\n")
    _server().flush()


@functools.cache
def _server() -> TextIO:
    """Open the pipe to the server of this test run, which the first of its processes that asks for a rank starts."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    pipe = Path(gettempdir()) / f"ranks-{owner}-{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')}"
    with FileLock(f"{pipe}.lock"):
        if not pipe.exists():
            os.mkfifo(pipe)
            command = [sys.executable, __file__, str(pipe), str(owner)]
            subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, start_new_session=True)
    return pipe.open("w")


def _serve(pipe: Path, owner: int) -> int:
    """Fork a rank for every line of the pipe until the process `owner`, of the test run, ends; then end all ranks."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for name in PRELOADED:
        importlib.import_module(name)
    # Reading the vocabulary takes a rank half as long as a short training.
    importlib.import_module("procap.tokenizer").simple_tokenizer()
    tasks = len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 1
    assert tasks == 1, f"{tasks} threads: forked processes would lack all but one"
    # Exclude existing objects from the garbage collection of every rank.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Read the descriptor: the buffer of a file object would be copied into every rank.
    requests, rest = os.open(pipe, os.O_RDWR), b""
    while psutil.pid_exists(owner):
        if not select.select([requests], [], [], 0.2)[0]:
            continue
        *lines, rest = (rest + os.read(requests, 65536)).split(b"\n")
        for line in lines:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request = json.loads(line)
                rank = os.fork()
                if rank == 0:
                    return _run_rank(request)
                _record_end(rank, Path(request["place"]))
                os._exit(0)
    pipe.unlink()
    Path(f"{pipe}.lock").unlink(missing_ok=True)
    os.killpg(0, signal.SIGKILL)
    return 1


def _record_end(rank: int, place: Path) -> None:
    """Write the process id of a rank and, when it has ended, its exit code."""
    _write(place.with_suffix(".pid"), rank)
    _write(place.with_suffix(".code"), os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))


def _write(file: Path, number: int) -> None:
    partial = file.with_suffix(f"{file.suffix}.partial")
    partial.write_text(str(number))
    partial.rename(file)


def _run_rank(request: dict[str, Any]) -> int:
    """Run the requested function; an error of the user ends the process with one line, as on the command line."""
    place = Path(request["place"])
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environ"])
    import torch

    from procap.errors import UserError

    torch.set_num_threads(1)
    module, function, arguments = request["task"]
    code = 1
    try:
        getattr(importlib.import_module(module), function)(*arguments)
        code = 0
    except UserError as error:
        print(f"procap: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    if request["to_the_end"]:
        # Otherwise libraries report objects that are not freed at the end.
        gc.unfreeze()
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(_serve(Path(sys.argv[1]), int(sys.argv[2])))
