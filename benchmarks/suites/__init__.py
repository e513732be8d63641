"""List the experiments of the paper by name, one file each.

A user's own suite is a file that defines `SUITE`, given by its path (`procap bench my_suite.py`), or is registered
by a package in the entry-point group "procap.suites": a name and `module:SUITE`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from procap.errors import UsageError, unknown_name
from procap.methods.plugins import SUITES_GROUP, find_plugins

if TYPE_CHECKING:
    from benchmarks.experiment.suite import Suite

SUITES: dict[str, str] = {
    "base-to-novel": "benchmarks.suites.base_to_novel:SUITE",
    "stability": "benchmarks.suites.stability:SUITE",
    "cross-dataset": "benchmarks.suites.cross_dataset:SUITE",
    "domain-generalization": "benchmarks.suites.domain_generalization:SUITE",
    "few-shot": "benchmarks.suites.few_shot:SUITE",
    "ablation": "benchmarks.suites.ablation:SUITE",
    "prompt-length": "benchmarks.suites.prompt_length:SUITE",
    "sensitivity": "benchmarks.suites.sensitivity:SUITE",
    "duration": "benchmarks.suites.duration:SUITE",
    "runtime": "benchmarks.runtime.experiment:SUITE",
    "qualitative": "benchmarks.qualitative.experiment:SUITE",
}
"""The experiments of the paper in its order, as `module:attribute`, so that each is imported only when it is used."""

ALL = "all"
"""The name of all suites of the paper together on the command line."""


def suite_paths() -> dict[str, str]:
    """List name and `module:attribute` of every suite, ours first; a plug-in cannot replace one of ours."""
    return SUITES | {name: point.value for name, point in find_plugins(SUITES_GROUP).items() if name not in SUITES}


def load_suite(name: str) -> Suite:
    """Load the suite of that name, or of the file `name`; UsageError for an unknown name or an invalid suite."""
    from benchmarks.experiment.suite import Suite

    module, attribute = _find_module(name)
    suite = getattr(module, attribute, None)
    if not isinstance(suite, Suite):
        raise UsageError(f"suite '{name}': {attribute} is no benchmarks.experiment.suite.Suite")
    if name not in SUITES and suite.name in (*SUITES, ALL):
        raise UsageError(f"suite '{name}' is called '{suite.name}' like one of ours, whose tables it would replace")
    return suite


def load_installed_suite(name: str) -> Suite:
    """Load a suite by a name that results contain, which may be the name of a file: code of others is never run."""
    if name not in suite_paths():
        raise unknown_name("suite", name, suite_paths())
    return load_suite(name)


def suite_titles() -> dict[str, str]:
    """List the title of every suite by name; for a plug-in that cannot be used, the reason."""
    titles = {}
    for name in suite_paths():
        try:
            titles[name] = load_suite(name).title
        except UsageError as error:
            titles[name] = str(error)
    return titles


def suite_help(name: str) -> str:
    """Return the docstring of the suite's file in paragraphs, of which the first is true for any options."""
    text = inspect.getdoc(_find_module(name)[0]) or name
    # A backspace character (Click's syntax) keeps the line breaks of a paragraph in a help text.
    return "\n\n".join(f"\b\n{part}" if part.startswith(" ") else part for part in text.split("\n\n"))


def _find_module(name: str) -> tuple[ModuleType, str]:
    if name.endswith(".py"):
        return _load_file(Path(name)), "SUITE"
    paths = SUITES if name in SUITES else suite_paths()
    if name not in paths:
        raise unknown_name("suite", name, paths)
    module, _, attribute = paths[name].partition(":")
    try:
        return importlib.import_module(module), attribute
    except (Exception, SystemExit) as error:
        # The import of a plug-in may raise anything.
        if name in SUITES:
            raise
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"suite '{name}' is a plug-in that cannot be loaded from {module}: {why}") from error


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
