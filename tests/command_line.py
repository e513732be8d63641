"""Run a command of `procap` in this process, and read what it left."""

import json
from contextlib import redirect_stdout
from io import StringIO

from benchmarks.cli import main
from cluster.sweep_record import SweepSettings


def run(capsys, *words):
    """Return the exit code of a command and what it printed to standard output and standard error."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan_sweep(*words):
    """Return the settings of a sweep, from its dry run."""
    with redirect_stdout(StringIO()) as out:
        assert main(["sweep", *words, "--dry-run", "--json"]) == 0
    return SweepSettings.model_validate(json.loads(out.getvalue().splitlines()[-1])["sweep"])


def read_files(folder):
    """Every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
