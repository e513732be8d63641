"""Make URLs of MLflow's pages for the runs of a suite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from runner.run_collection import Collection
from runner.tracking.store import TrackingError, TrackingStore

COMPARED = 40
"""MLflow's comparison draws one line and one column per run; more than these cannot be read."""


def charts_page(server: str, experiment_id: str, where: str) -> str:
    """Return the URL of the charts of the runs that match the search `where`."""
    return f"{server}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&searchFilter={quote(where)}"


def compare_page(server: str, experiment_id: str, run_ids: Sequence[str]) -> str | None:
    """Return the URL that compares runs side by side; None for one run, or more than COMPARED."""
    if not 2 <= len(run_ids) <= COMPARED:
        return None
    runs, experiments = quote(json.dumps([*run_ids])), quote(json.dumps([experiment_id]))
    return f"{server}/#/compare-runs?runs={runs}&experiments={experiments}"


def find_links(collection: Collection, results: Path, tracking: str) -> list[tuple[str, str]]:
    """List titles and URLs of the pages with the suite and its runs on the MLflow server at `tracking`."""
    store = TrackingStore.choose(results, tracking or None)
    if not store.is_server:
        return []
    try:
        store.open()
    except TrackingError:
        if tracking:
            raise
        return []
    server, experiment = store.address.rstrip("/"), store.experiment_id
    parents = store.search(f"tags.`procap.collection` = '{collection.tag}'")
    pages = [("the suite", f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}") for run in parents]
    where = f"tags.`{collection.tag}` = 'yes'"
    run_ids = [run.info.run_id for run in store.search(where)]
    if run_ids:
        pages.append((f"charts of {len(run_ids)} runs", charts_page(server, experiment, where)))
    if side_by_side := compare_page(server, experiment, run_ids):
        pages.append((f"{len(run_ids)} runs side by side", side_by_side))
    return pages
