"""`procap track sync`: upload missing results to MLflow."""

from __future__ import annotations

from benchmarks.cli.flags import Results, Tracking, command
from benchmarks.console.output import SOME_FAILED, note, plural, show, show_json
from benchmarks.results.frame import open_results
from runner.run_collection import COLLECTIONS
from runner.tracking.store import TrackingStore
from runner.tracking.store import sync as sync_runs


@command("procap track sync --results demo/results")
def sync(results: Results = "results", tracking: Tracking = "") -> int:
    """Upload missing results to MLflow. Repeating it sends nothing twice."""
    store = TrackingStore.choose(open_results(results), tracking or None)
    failed: dict[str, str] = {}
    sent = list(sync_runs(store, lambda path, error: failed.update({path: str(error)})))
    for run, reason in failed.items():
        note(f"procap: failed: {run}: {reason}")
    for run in sent:
        note(run)
    runs = [path for path in sent if not path.startswith(f"{COLLECTIONS}/")]
    counts = f"{plural(len(runs), 'run')} and {plural(len(sent) - len(runs), 'collection')}"
    show(f"{counts} sent to {store.address}")
    show_json({"destination": store.address, "sent": sent, "failed": failed})
    return SOME_FAILED if failed else 0
