"""List the suites by name, one file each: the experiments of the paper, and further ones.

A user's own suite is a file that defines `SUITE`, given by its path: `procap bench my_suite.py`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from procap.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from benchmarks.experiment.suite import Suite

PAPER_SUITES: dict[str, str] = {
    "base-to-novel": "benchmarks.suites.base_to_novel",
    "stability": "benchmarks.suites.stability",
    "cross-dataset": "benchmarks.suites.cross_dataset",
    "domain-generalization": "benchmarks.suites.domain_generalization",
    "few-shot": "benchmarks.suites.few_shot",
    "ablation": "benchmarks.suites.ablation",
    "prompt-length": "benchmarks.suites.prompt_length",
    "sensitivity": "benchmarks.suites.sensitivity",
    "duration": "benchmarks.suites.duration",
    "runtime": "benchmarks.runtime.runtime_suite",
    "qualitative": "benchmarks.qualitative.qualitative_suite",
}
"""The experiments of the paper in its order, each in its module, which is imported only when it is used."""

SUITES = PAPER_SUITES | {
    "open-world": "benchmarks.suites.open_world",
    "imbalance": "benchmarks.suites.imbalance",
}
"""Those of the paper, and further ones."""

ALL = "all"
"""The name of all suites of the paper together on the command line."""


def load_suite(name: str) -> Suite:
    """Load the suite of that name, or of the file `name`; UsageError for an unknown name or an invalid suite."""
    from benchmarks.experiment.suite import Suite

    suite = getattr(_load_module(name), "SUITE", None)
    if not isinstance(suite, Suite):
        raise UsageError(f"suite '{name}': SUITE is no benchmarks.experiment.suite.Suite")
    if name not in SUITES and suite.name in (*SUITES, ALL):
        raise UsageError(f"suite '{name}' is called '{suite.name}' like one of ours, whose tables it would replace")
    if name in SUITES:
        return suite
    return replace(suite, source=f"{Path(name).name} ({hashlib.sha256(Path(name).read_bytes()).hexdigest()[:8]})")


def suite_help(name: str) -> str:
    """Return the docstring of the suite's file in paragraphs, of which the first is true for any options."""
    text = inspect.getdoc(_load_module(name)) or name
    # A backspace character (Click's syntax) keeps the line breaks of a paragraph in a help text.
    return "\n\n".join(f"\b\n{part}" if part.startswith(" ") else part for part in text.split("\n\n"))


def _load_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _load_file(Path(name))
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return importlib.import_module(SUITES[name])


@functools.cache
def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}; a suite of your own is a Python file with a SUITE in it")
    spec = importlib.util.spec_from_file_location(f"procap_suite_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} cannot be read as a suite: {type(error).__name__}: {error}") from error
    return module
