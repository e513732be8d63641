"""Many jobs on a Ray cluster: each is one trial of Ray Tune, placed as a whole or not at all.

Ray Tune is told nothing that it would have to remember: a trial that is started again finds on disk what it had done,
so that a lost process, node or driver costs the seconds since the last saved state.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.job import Job, Report
from cluster.paths import StoragePaths
from cluster.ray_cluster import Resources, nodes, processes_held, require_own_node
from procap.errors import UserError

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a job is started that loses its processes; one whose data or settings are wrong fails at once."""
LOOK_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
"""For lost nodes to come back, where no others are started in their place."""
WORDS = 240
"""Characters that are told of an error of Ray, which can be a page."""

_RAISED = re.compile(r".*^([A-Za-z_][\w.]*(?:: .*|\Z))", re.MULTILINE | re.DOTALL)
"""The end of a traceback: the name of the last exception and what it says, which may be several lines."""

JobOf = Callable[[Mapping[str, Any]], Job]


class Listener(Protocol):
    """Hears of everything that happens to the trials, in the driver."""

    def started(self, trial: str, config: Mapping[str, Any]) -> None: ...

    def reported(self, trial: str, config: Mapping[str, Any], report: Report) -> None: ...

    def ended(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        """`report` has the state "done" or "failed", or "running" where a scheduler or a budget ended the trial."""
        ...


@dataclass(frozen=True)
class Search:
    """What Ray Tune is to do with a space that is no mere list."""

    space: Mapping[str, Any]
    trials: int = 1
    searcher: Any = None
    scheduler: Any = None
    seconds: float | None = None


def carry_out(
    jobs: Sequence[Job],
    places: StoragePaths,
    share: Resources,
    listener: Listener,
    *,
    at_once: int,
    growing: bool = False,
) -> None:
    """Do `jobs`, `at_once` together, earlier ones first but for a few places; the listener hears of each by number."""
    from ray import tune

    search = Search({"number": tune.grid_search(list(range(len(jobs))))})
    run_trials(search, lambda config: jobs[config["number"]], places, share, listener, at_once, growing=growing)


def run_trials(
    search: Search,
    job_of: JobOf,
    places: StoragePaths,
    share: Resources,
    listener: Listener,
    at_once: int,
    *,
    growing: bool = False,
) -> None:
    """Let Ray Tune draw configurations from `search`, and carry out the job of each.

    at_once: trials that run together at most, or ask for room beyond what is there, where nodes come for that.
    growing: they do. Raises UserError where they do not, and so many were lost for so long that nothing can run.
    """
    from ray import tune
    from ray.tune import FailureConfig, TuneConfig, TuneError, Tuner
    from ray.tune import RunConfig as TuneRun

    # As many groups wait for room as may run: with fewer, short runs end before the next node has been asked.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, at_once))
    # The process of a group's coordinator computes nothing, and its bundle asks for nothing.
    each = {"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})}
    bundles = [each] if share.processes == 1 else [{}, *[each] * share.processes]

    def trial(config: dict[str, Any]) -> None:
        from cluster.trial import perform

        perform(job_of(config), places, share, lambda report: tune.report(report.flat()))

    # A trial that failed is told by its report, and a lost one is started again: neither needs a page of frames.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    # A process that is being ended may still write there while it is removed.
    with tempfile.TemporaryDirectory(prefix="procap-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = Tuner(
            tune.with_resources(trial, tune.PlacementGroupFactory(bundles, strategy="PACK")),
            param_space=dict(search.space),
            tune_config=TuneConfig(
                num_samples=search.trials,
                search_alg=search.searcher,
                scheduler=search.scheduler,
                max_concurrent_trials=at_once,
                time_budget_s=search.seconds,
                reuse_actors=share.processes == 1,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
            ),
            run_config=TuneRun(
                name="trials",
                storage_path=scratch,
                callbacks=[_heard_by(listener, StallDetector(share, growing))],
                failure_config=FailureConfig(max_failures=ATTEMPTS - 1),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except TuneError:
            # What a callback raises arrives as the text of its frames.
            require_own_node()
            raise


def given_up(errors: str) -> str:
    """Why a run is not started again, in one line; `errors` is what Ray Tune has written down of all its attempts."""
    last = errors.rpartition("Failure # ")[2].strip()
    raised = _RAISED.search(last)
    if raised and "The actor " not in last:
        said, hint = f"the last one failed with {_shortened(raised[1])}", ""
    else:
        # Of a process that is gone Ray tells which it was, and last of all why.
        why = _shortened(last.splitlines()[-1]) if last else ""
        said = f"the last one lost its process{f' ({why})' if why else ''}"
        hint = " for who ended it (often: out of memory)"
    return f"given up after {ATTEMPTS} attempts: {said}; see the logs of Ray on the nodes{hint}"


def _shortened(text: str) -> str:
    return textwrap.shorten(text.rstrip(". "), WORDS, placeholder=" ...")


class StallDetector:
    """With nodes that hold no run any more, for which Ray itself waits in silence and without end."""

    def __init__(self, share: Resources, growing: bool) -> None:
        self._share, self._growing = share, growing
        self._looked = time.monotonic()
        self._since: float | None = None

    def look(self, trials: Iterable[Any]) -> None:
        """Say once what is waited for, if nothing runs for want of room. Raises UserError when that was long enough."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if any(trial.status == "RUNNING" for trial in trials):
            self._since = None
            return
        there = nodes()
        if processes_held(there, self._share) >= self._share.processes:
            self._since = None
            return
        up = f"{len(there)} node{'s' * (len(there) != 1)}"
        what = f"a run that asks for {self._share} does not fit on the {up} that the cluster has now"
        if self._since is None:
            self._since = now
            logger.warning("waiting: %s", what)
        elif not self._growing and now - self._since >= PATIENCE_SECONDS:
            raise UserError(
                f"{what}, for {PATIENCE_SECONDS / 60:g} minutes already; start nodes and repeat the command to go on "
                "from the states that are kept, or ask for less"
            )


def _heard_by(listener: Listener, patience: StallDetector) -> Any:
    """A callback of Ray Tune that hands everything on."""
    from ray.tune import Callback

    last: dict[str, Report] = {}

    class Ears(Callback):
        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            listener.started(trial.trial_id, trial.config)

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            report = Report.of_flat(result)
            last[trial.trial_id] = report
            if report.state in ("running", "waiting"):
                listener.reported(trial.trial_id, trial.config, report)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            listener.ended(trial.trial_id, trial.config, last.pop(trial.trial_id, Report()))

        def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
            patience.look(trials)

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            # Else every run would be lost five times within seconds, and none of them by a fault of its own.
            require_own_node()

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            file = Path(trial.error_file or "")
            said = file.read_text(errors="replace") if file.is_file() else ""
            listener.ended(trial.trial_id, trial.config, Report(state="failed", why=given_up(said)))

        def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
            # Tune pickles its callbacks for a restoring that nobody does; a listener has bars and locks.
            return Callback, ()

    return Ears()
