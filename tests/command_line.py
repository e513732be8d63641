"""Run a command of `procap` in this process."""

from __future__ import annotations

import pytest

from benchmarks.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Return the exit code of a command and what it printed to standard output and standard error."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
