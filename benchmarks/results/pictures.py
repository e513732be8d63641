"""`pictures.json`: pictures that a suite made of more than its results, of which runs, and what making them took.

    runs          of the suite's plan, as it was when they were made
    seconds       of making them, in `environment`
    pictures      caption and description (`alt`) of each, by the name of its files

A suite adds the data that its pictures show.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.results.suite import SuiteResults

FILE = "pictures.json"


def planned_paths(suite: SuiteResults) -> list[str]:
    """List the runs of the plan in order, without duplicates; the order decides which runs the pictures show."""
    return list(dict.fromkeys(run.path for run in suite.runs))


def read_pictures(suite: SuiteResults) -> dict[str, Any]:
    """Read the record of pictures made of exactly these runs; empty if there is no readable one."""
    try:
        record = json.loads((suite.folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("runs") == planned_paths(suite) else {}
