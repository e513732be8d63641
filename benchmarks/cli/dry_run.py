"""Print the runs of a command with what exists of them and what they need, for `--dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.console.output import columns, plural, show, show_json
from benchmarks.suites.preconditions import list_needs
from runner.run_state import RunSpec, RunState


def show_plan(runs: Sequence[RunSpec], states: Mapping[str, RunState], data: Path | None = None) -> int:
    """Print each run with its state and its targets, else with what it needs; returns the exit code.

    data: the folder of data sets, to list what runs that are not finished lack; below the runs if these have targets.
    """
    needs = {run.path: list_needs(run, data) for run in runs if data and not states[run.path].is_finished}
    has_targets = any(run.targets for run in runs)
    rows, listed = [], []
    for run in runs:
        state = states[run.path]
        targets = {target: target not in state.open for target in run.targets}
        names = " ".join(f"{target}=finished" if finished else target for target, finished in targets.items())
        lacks = needs.get(run.path, [])
        rows.append((state.status, run.path, names if has_targets else "; ".join(lacks) or "-"))
        entry = {"run": run.path, "state": state.status, "targets": targets}
        listed.append(entry | {"needs": lacks} if data else entry)
    show(columns(("state", "run", "targets" if has_targets else "needs"), rows))
    finished = sum(states[run.path].is_finished for run in runs)
    show(f"\n{plural(len(runs), 'run')}, {finished} finished. Nothing was written.")
    if has_targets:
        for need, number in Counter(need for lacks in needs.values() for need in lacks).items():
            show(f"{plural(number, 'run')} {'needs' if number == 1 else 'need'} {need}")
    show_json({"runs": listed})
    return 0
