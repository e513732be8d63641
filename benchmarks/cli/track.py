"""`procap track sync`: export to MLflow what its store lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import note, plural, show, show_json
from procap.errors import UserError
from runner.environment import library_defaults

if TYPE_CHECKING:
    from benchmarks.cli.ui import RunFilter
    from runner.remote_results import RemoteResults


def track_sync(results: str, tracking: str, log_checkpoints: bool, dry_run: bool, output: OutputFlags) -> int:
    """Exit code 3 when some runs could not be read and 1 when none could; see `procap track sync --help`."""
    from runner.tracking.export import sync

    library_defaults()

    def on_run(run: str, sent: bool) -> None:
        note(f"{'sent' if sent else 'was there'}: {run}")

    with _results(results, weights=log_checkpoints) as store:
        summary = sync(
            store.local,
            tracking or None,
            log_checkpoints=log_checkpoints,
            dry_run=dry_run,
            on_run=None if dry_run else on_run,
        )
    for run, reason in summary.failed:
        note(f"procap: failed: {run}: {reason}")
    if dry_run:
        for run in summary.sent:
            show(run)
    what = "to send" if dry_run else "sent"
    show(f"{_count(summary.sent)} {what} to {summary.destination}, {summary.up_to_date} up to date")
    if output.json:
        document = {"sent": summary.sent, "up_to_date": summary.up_to_date, "failed": dict(summary.failed)}
        show_json({"destination": summary.destination, "dry_run": dry_run, **document})
    if not summary.failed:
        return 0
    return 3 if summary.sent or summary.up_to_date else 1


def open_ui(results: str, tracking: str, port: int, open_browser: bool, wanted: RunFilter) -> int:
    """See `procap ui --help`."""
    from benchmarks.cli.ui import ui

    library_defaults()
    with _results(results) as store:
        ui(store.local, tracking or None, port, open_browser, wanted)
    return 0


def _count(paths: list[str]) -> str:
    """How many of `paths` are runs, and how many are suites or sweeps."""
    from runner.collection import COLLECTIONS

    parents = sum(path.startswith(f"{COLLECTIONS}/") for path in paths)
    more = f" and {plural(parents, 'suite')} or sweep{'s' * (parents > 1)}" if parents else ""
    return f"{plural(len(paths) - parents, 'run')}{more}"


@contextmanager
def _results(given: str, *, weights: bool = False) -> Iterator[RemoteResults]:
    """The folder of the results, up to date with their URL, if any."""
    from runner.remote_results import RemoteResults, results_root
    from shards.home import cache_home

    root, url = results_root(given, cache_home())
    store = RemoteResults(url, root)
    store.pull_all(weights=weights)
    if not root.is_dir():
        raise UserError(f"no results folder at {root}; name one with --results, or make one with `procap demo`")
    yield store
