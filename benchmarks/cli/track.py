"""`procap track sync`: upload missing results to MLflow."""

from __future__ import annotations

from benchmarks.cli.flags import OutputFlags, Results, Tracking, command
from benchmarks.console.output import SOME_FAILED, note, plural, show, show_json
from benchmarks.results.frame import open_results
from runner.environment import library_defaults
from runner.run_collection import COLLECTIONS
from runner.tracking.store import TrackingStore
from runner.tracking.store import sync as sync_runs


@command("procap track sync --results demo/results")
def sync(output: OutputFlags, results: Results = "results", tracking: Tracking = "") -> int:
    """Upload missing results to MLflow. Repeating it sends nothing twice."""
    library_defaults()
    store = TrackingStore.choose(open_results(results), tracking or None)
    summary = sync_runs(store)
    for run, reason in summary.failed.items():
        note(f"procap: failed: {run}: {reason}")
    for run in summary.sent:
        note(run)
    runs = [path for path in summary.sent if not path.startswith(f"{COLLECTIONS}/")]
    sent = f"{plural(len(runs), 'run')} and {plural(len(summary.sent) - len(runs), 'collection')}"
    show(f"{sent} sent to {store.address}")
    if output.json:
        show_json({"destination": store.address, "sent": list(summary.sent), "failed": summary.failed})
    return SOME_FAILED if summary.failed else 0
