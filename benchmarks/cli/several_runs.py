"""Plan, show and execute several runs in one command, and collect failures."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.console.output import columns, note, note_trace, plural, show, show_json
from benchmarks.console.preconditions import list_needs
from runner.config import RuntimeConfig
from runner.devices import own_device, resolve_device
from runner.distributed.ranks import ranks_from_environment
from runner.results import describe_failure
from runner.run_state import RunSpec, RunState
from runner.session import Session
from runner.stop_signals import Interrupted

if TYPE_CHECKING:
    from runner.distributed.collectives import ProcessGroup

Planned = TypeVar("Planned")


class Failures:
    """Collect the failed runs of a command; the remaining runs are still executed.

    A command of one run, and a process group, whose processes would wait for the failed one, raise the error.
    """

    def __init__(self, runs: int, group: ProcessGroup | None = None) -> None:
        self.raises = runs == 1 or (group is not None and group.size > 1)
        self.reasons: dict[str, str] = {}

    @contextmanager
    def collect(self, name: str) -> Iterator[None]:
        """Record an error of the block as the failure of run `name`. Signals are raised."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            if self.raises:
                raise
            self.reasons[name] = describe_failure(error).removeprefix(name.partition(" on ")[0]).lstrip(": ")
            note(f"procap: failed: {name}")
            note_trace(traceback.format_exc())


@contextmanager
def process_group(
    runtime: RuntimeConfig, plan: Callable[[Session], Planned], *, on_first: bool
) -> Iterator[tuple[Session, Planned]]:
    """Initialize the process group that torchrun announced; yields a session in it, and what `plan` has returned.

    One process plans before it imports torch, which takes seconds. Several do inside the group, so that an error of one
    host alone, such as missing data, reaches the others; on_first: rank 0 alone, which has the results.
    """
    ranks = ranks_from_environment()
    planned = plan(Session(runtime)) if ranks.size == 1 else None
    from runner.distributed.connect import init_process_group

    device = own_device(resolve_device(runtime.device), ranks)
    with init_process_group(ranks, device, runtime.timeout) as group:
        session = Session(replace(runtime, device=str(device)), group)
        if planned is None:
            planned = group.call_on_first(lambda: plan(session)) if on_first else plan(session)
        yield session, planned


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
