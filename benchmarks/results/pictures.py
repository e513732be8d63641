"""`pictures.json`: which pictures a suite has made of more than its results, of which runs, and what that took.

    runs          of the suite's plan, as it was when they were made
    seconds       of making them, in the `environment` where that was
    pictures      caption and description (`alt`) of each, by the name of its files

A suite adds whatever else its pictures are made of.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from runner.collection import COLLECTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.results.suite import SuiteResults

FILE = "pictures.json"


def folder_of(done: SuiteResults) -> Path:
    """Where the suite's tables, figures and pictures lie."""
    return done.results / COLLECTIONS / "suite" / done.suite.name


def planned_runs(done: SuiteResults) -> list[str]:
    """The runs of the plan in its order, each once: what pictures are of depends on which come first."""
    return list(dict.fromkeys(entry.path for entry in done.runs))


def pictures_of(done: SuiteResults) -> dict[str, Any]:
    """The record of pictures that were made of these very runs; empty where there is none that can be read."""
    try:
        said = json.loads((folder_of(done) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) and said.get("runs") == planned_runs(done) else {}
