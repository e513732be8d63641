"""`procap track sync`: upload missing results to MLflow."""

from __future__ import annotations

from benchmarks.cli.flags import OutputFlags, Results, Tracking, command
from benchmarks.console.output import SOME_FAILED, note, plural, show, show_json
from benchmarks.results.frame import open_results
from runner.environment import library_defaults
from runner.run_collection import COLLECTIONS
from runner.tracking import sync as tracking_sync
from runner.tracking.store import TrackingStore


@command("procap track sync --results demo/results")
def sync(
    output: OutputFlags,
    results: Results = "results",
    tracking: Tracking = "",
) -> int:
    """Upload missing results to MLflow. Repeating it sends nothing twice."""
    library_defaults()
    store = TrackingStore.choose(open_results(results), tracking or None)
    summary = tracking_sync.sync(store)
    for run, reason in summary.failed:
        note(f"procap: failed: {run}: {reason}")
    for run in summary.sent:
        note(run)
    runs = [path for path in summary.sent if not path.startswith(f"{COLLECTIONS}/")]
    sent = f"{plural(len(runs), 'run')} and {plural(len(summary.sent) - len(runs), 'collection')}"
    show(f"{sent} sent to {store.address}, {len(summary.up_to_date)} up to date")
    if output.json:
        document = {"sent": summary.sent, "up_to_date": len(summary.up_to_date), "failed": dict(summary.failed)}
        show_json({"destination": store.address, **document})
    return 0 if not summary.failed else SOME_FAILED if summary.sent or summary.up_to_date else 1
