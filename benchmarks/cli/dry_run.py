"""Print the runs of a command with what exists of them, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.console.output import columns, plural, show, show_json
from runner.run_state import RunSpec, RunState


def show_plan(
    runs: Sequence[RunSpec],
    states: Mapping[str, RunState],
    needs: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Print each run with its state and, if any run has some, its targets; returns the exit code.

    needs: what runs that are not finished lack, by path.
    """
    rows, listed, shown = [], [], 3 if any(run.targets for run in runs) or needs is not None else 2
    for run in runs:
        state = states[run.path]
        targets = {target: target not in state.open for target in run.targets}
        names = " ".join(f"{target}=finished" if finished else target for target, finished in targets.items())
        lacks = [] if needs is None else [*needs.get(run.path, ())]
        rows.append((state.status, run.path, names or "; ".join(lacks) or "-")[:shown])
        entry = {"run": run.path, "state": state.status, "targets": targets}
        listed.append(entry if needs is None else entry | {"needs": lacks})
    show(columns(("state", "run", "targets" if needs is None else "needs")[:shown], rows))
    finished = sum(states[run.path].is_finished for run in runs)
    show(f"\n{plural(len(runs), 'run')}, {finished} finished. Nothing was written.")
    show_json({"runs": listed})
    return 0
