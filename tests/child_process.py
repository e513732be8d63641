"""Start a command as a child process and kill all that is left of it when the test ends."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import psutil


@contextmanager
def start_process(command, **more):
    """Start `subprocess.Popen(command, **more)` in its own session, and kill all its processes after the block."""
    with subprocess.Popen(command, start_new_session=True, **more) as process:
        try:
            yield process
        finally:
            _kill_all_of(process)


def _kill_all_of(process):
    # Launchers give their workers sessions of their own.
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    deadline = time.monotonic() + 600
    while any(map(_is_alive, below)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    # An orphan may stay a zombie if the process that inherits it never waits for it.
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
