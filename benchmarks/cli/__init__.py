"""The command line `procap`: one file per command, with its flags and its implementation."""

from __future__ import annotations

import os
import threading

EXIT_SECONDS = 2.0
"""How long after a signal the interpreter may wait for threads and exports, of which some wait for a server."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line with `argv` (default: the arguments of this process) and return the exit code."""
    from benchmarks.cli.app import run

    code = run(argv)
    # With `argv` the caller's process goes on after the command.
    if argv is None and code > 128:
        timer = threading.Timer(EXIT_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
    return code
