"""Complete the names of methods, data sets and runs in the shell; `procap --install-completion` switches it on.

Imports are in the functions: help needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def complete_methods(incomplete: str) -> list[str]:
    from procap.methods import method_groups, method_paths

    return _complete_list(incomplete, lambda: ("all", "table1", *method_groups(), *method_paths()))


def complete_datasets(incomplete: str) -> list[str]:
    from shards.catalogue import CATALOGUE, GROUPS
    from shards.default_paths import data_root
    from shards.resolve import packed_names

    return _complete_list(incomplete, lambda: dict.fromkeys((*GROUPS, *CATALOGUE, *packed_names(data_root("")))))


def complete_runs(incomplete: str) -> list[str]:
    """Complete the folders of runs below the folder `results`, the default of `--results`."""
    from runner.run_folders import find_runs

    paths = (folder.path.as_posix() for folder in find_runs(Path("results")))
    return [path for path in paths if path.startswith(incomplete)]


def _complete_list(incomplete: str, known: Callable[[], Iterable[str]]) -> list[str]:
    """Complete the last name of a comma list; the shell replaces the whole word."""
    earlier, comma, last = incomplete.rpartition(",")
    return [f"{earlier}{comma}{name}" for name in known() if name.startswith(last)]
