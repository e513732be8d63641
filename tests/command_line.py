"""Run a command of `procap` in this process, and read what it left."""

from benchmarks.cli import main


def run(capsys, *words):
    """Return the exit code of a command and what it printed to standard output and standard error."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read_files(folder):
    """Every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
