"""`procap track sync`: export missing results to MLflow."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cli.flags import DryRun, LogCheckpoints, OutputFlags, Results, Tracking, command
from benchmarks.console.output import SOME_FAILED, note, plural, show, show_json
from benchmarks.results.frame import open_results
from runner.environment import library_defaults
from runner.run_collection import COLLECTIONS
from runner.tracking import export
from runner.tracking.store import TrackingStore


@command("procap track sync --results demo/results", "procap track sync --dry-run")
def sync(
    output: OutputFlags,
    results: Results = "results",
    tracking: Tracking = "",
    log_checkpoints: LogCheckpoints = False,
    dry_run: DryRun = False,
) -> int:
    """Export to MLflow what its store lacks. Repeating it sends nothing twice."""
    library_defaults()

    def on_run(run: str, sent: bool) -> None:
        if sent:
            note(f"sent: {run}")

    store = TrackingStore.choose(open_results(results, weights=log_checkpoints), tracking or None)
    on_sent = None if dry_run else on_run
    summary = export.sync(store, log_checkpoints=log_checkpoints, dry_run=dry_run, on_run=on_sent)
    for run, reason in summary.failed:
        note(f"procap: failed: {run}: {reason}")
    if dry_run:
        for run in summary.sent:
            show(run)
    sent = f"{_count(summary.sent)} {'to send' if dry_run else 'sent'}"
    show(f"{sent} to {store.describe(results)}, {_count(summary.up_to_date)} up to date")
    if output.json:
        document = {"sent": summary.sent, "up_to_date": len(summary.up_to_date), "failed": dict(summary.failed)}
        show_json({"destination": store.address, "dry_run": dry_run, **document})
    return 0 if not summary.failed else SOME_FAILED if summary.sent or summary.up_to_date else 1


def _count(paths: Sequence[str]) -> str:
    """Count paths below the results: "19 runs and 1 suite or sweep"."""
    collections = sum(path.startswith(f"{COLLECTIONS}/") for path in paths)
    more = f" and {plural(collections, 'suite')} or sweep{'s' * (collections > 1)}" if collections else ""
    return f"{plural(len(paths) - collections, 'run')}{more}"
