"""The command line `procap`: one file per command, with its flags and its implementation."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command line with `argv` (default: the arguments of this process) and return the exit code."""
    from benchmarks.console.output import open_streams

    open_streams()
    from benchmarks.cli.app import run

    return run(argv)
