"""`procap track` and `procap ui`: what MLflow has got of the results, and a look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import columns, note, plural, quoted, show, show_json
from procap.errors import UserError
from runner.environment import library_defaults

if TYPE_CHECKING:
    from benchmarks.cli.ui import Wanted
    from runner.remote_results import RemoteResults


def sync(results: str, tracking: str, output: OutputFlags) -> int:
    """Exit code 3 when some runs could not be read and 1 when none could; see `procap track sync --help`."""
    from runner.tracking.outbox import TRACKING
    from runner.tracking.tracker import sync_all

    library_defaults()
    with _results(results) as store:

        def told(run: str, sent: bool) -> None:
            note(f"{'sent' if sent else 'was there'}: {run}")
            store.push_run(run, only=TRACKING)

        summary = sync_all(store.local, tracking or None, on_run=told)
    for run, why in summary.failed:
        note(f"procap: failed: {run}: {why}")
    show(f"{_counted(summary.sent)} sent to {summary.destination}, {summary.up_to_date} up to date")
    if output.json:
        document = {"sent": summary.sent, "up_to_date": summary.up_to_date, "failed": dict(summary.failed)}
        show_json({"destination": summary.destination, **document})
    if not summary.failed:
        return 0
    return 3 if summary.sent or summary.up_to_date else 1


def status(results: str, tracking: str, output: OutputFlags) -> int:
    """See `procap track status --help`."""
    from runner.tracking.tracker import pending

    with _results(results) as store:
        missing = pending(store.local, tracking or None)
    broken = [m for m in missing if m.unreadable]
    to_send = [m for m in missing if not m.unreadable]
    for m in broken:
        note(f"procap: cannot be sent: {m}")
    if to_send:
        show(columns(("run", "epochs", "files"), [(m.run, m.epochs, ", ".join(m.files) or "-") for m in to_send]))
        note(f"{_counted([m.run for m in to_send])} to send: procap track sync --results {quoted(results)}")
    elif not broken:
        show("everything was sent")
    if output.json:
        rows = [{"run": m.run, "epochs": m.epochs, "files": list(m.files), "unreadable": m.unreadable} for m in missing]
        show_json(rows)
    return 0


def ui(results: str, tracking: str, port: int, open_browser: bool, wanted: Wanted) -> int:
    """See `procap ui --help`."""
    from benchmarks.cli.ui import ui as serve

    library_defaults()
    with _results(results) as store:
        serve(store.local, tracking or None, port, open_browser, wanted)
    return 0


def _counted(names: list[str]) -> str:
    """How many of `names` are runs, and how many are suites or sweeps."""
    from runner.collection import COLLECTIONS

    above = sum(name.startswith(f"{COLLECTIONS}/") for name in names)
    parents = f" and {plural(above, 'suite')} or sweep{'s' * (above > 1)}" if above else ""
    return f"{plural(len(names) - above, 'run')}{parents}"


@contextmanager
def _results(given: str) -> Iterator[RemoteResults]:
    """The results, up to date in their folder; what was noted there of what was sent is noted at their URL, if any."""
    from runner.remote_results import RemoteResults, results_root
    from shards.home import cache_home

    root, url = results_root(given, cache_home())
    store = RemoteResults(url, root)
    # With the weights: a tracker keeps a copy of them.
    store.pull_all(weights=True)
    if not root.is_dir():
        raise UserError(f"no results folder at {root}; name one with --results, or make one with `procap demo`")
    try:
        yield store
    except BaseException:
        store.try_push_all()
        raise
    store.push_all()
