"""Make URLs of MLflow's pages for several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

COMPARED = 10
"""MLflow's comparison has a column for each run, and its address the id of each: the charts show more runs."""


def charts_page(server: str, experiment_id: str, where: str) -> str:
    """Return the URL of the charts of the runs that match the search `where`."""
    return f"{server}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&searchFilter={quote(where)}"


def compare_page(server: str, experiment_id: str, run_ids: Sequence[str]) -> str | None:
    """Return the URL that compares runs side by side; None for one run, or more than COMPARED."""
    if not 2 <= len(run_ids) <= COMPARED:
        return None
    runs, experiments = quote(json.dumps([*run_ids])), quote(json.dumps([experiment_id]))
    return f"{server}/#/compare-runs?runs={runs}&experiments={experiments}"
