"""Execute trials here or by Ray Tune, which places each as a whole and restarts it when its processes are lost.

Tune's own state is not restored: a trial resumes from the saved states of its runs, at most seconds old.
"""

from __future__ import annotations

import logging
import os
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cluster.executor import ReportTo, RunExecutor, TrialWork, attempt
from cluster.ray_cluster import Capacity, nodes, require_own_node
from cluster.trial import TrialReport
from runner.backbones import Backbones
from runner.environment_defaults import set_environment_defaults
from runner.session import Session
from shards.mirror import refresh

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts of a trial that loses its processes; wrong data or settings fail at once."""


class TrialListener(Protocol):
    """Callbacks in the driver; a trial that is restarted starts again.

    drawn: what Ray Tune drew for the trial, without Ray the launcher: the index of its run, or the values of the fields
    that a sweep varies.
    """

    def started(self, trial: str, drawn: Mapping[str, Any]) -> object: ...

    def reported(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> object: ...

    # The last report's state is "finished", "failed", or another one if Tune stopped the trial before its end.
    def ended(self, trial: str, drawn: Mapping[str, Any], report: TrialReport) -> object: ...


def run_trials(
    space: Mapping[str, Any], work: TrialWork, capacity: Capacity, listener: TrialListener, **tune_config: Any
) -> None:
    """Execute the trials that Ray Tune draws from `space`. tune_config: of `ray.tune.TuneConfig`."""
    from ray import tune
    from ray.tune import FailureConfig, TuneConfig, TuneError, Tuner
    from ray.tune import RunConfig as TuneRun

    resources = work.resources
    # Allow as many pending placement groups as concurrent trials: with fewer, an autoscaler starts nodes too late.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(max(1, capacity.max_concurrent))
    bundle = {"CPU": resources.cpus, **({"GPU": resources.gpus} if resources.gpus else {})}
    # With several processes the trial itself only coordinates, so its bundle reserves no resources.
    bundles = [bundle] if resources.processes == 1 else [{}, *[bundle] * resources.processes]

    # Every worker gets a copy of this function, which it calls for each of its trials.
    backbones = Backbones()

    def trial(config: dict[str, Any]) -> None:
        def report_to(report: TrialReport) -> None:
            tune.report(report.to_result())

        report_to(execute_trial(config, work, report_to, backbones))

    # Failed trials report their error and lost ones are restarted: Tune's tracebacks would only repeat that.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    # A worker that is being stopped may still write there while the folder is removed, so ignore cleanup errors.
    with tempfile.TemporaryDirectory(prefix="procap-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = Tuner(
            tune.with_resources(trial, tune.PlacementGroupFactory(bundles, strategy="PACK")),
            param_space=dict(space),
            tune_config=TuneConfig(
                # A reused worker keeps its backbones. With several processes the trial's own process loads nothing.
                reuse_actors=resources.processes == 1,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
                **tune_config,
            ),
            run_config=TuneRun(
                name="trials",
                storage_path=scratch,
                callbacks=[make_callback(listener, capacity)],
                failure_config=FailureConfig(max_failures=ATTEMPTS - 1),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except TuneError:
            # Tune wraps an exception of a callback in TuneError as text; raise the specific error again if it was that.
            require_own_node(nodes())
            raise


def execute_trial(drawn: Mapping[str, Any], work: TrialWork, report_to: ReportTo, backbones: Backbones) -> TrialReport:
    """Execute a trial here, or on the node that Ray chose; returns its report, raises if Ray Tune should restart it."""
    set_environment_defaults()
    # A worker executes many trials; each asks the server of its data again.
    refresh.cache_clear()
    if work.resources.processes > 1:
        from cluster.distributed_trial import execute_in_group

        return execute_in_group(drawn, work, report_to)

    def execute() -> TrialReport:
        session = Session(work.paths.local_runtime(), backbones=backbones)
        return RunExecutor(session, work.runs_of(drawn, session.runtime), report_to, work.halving).execute()

    return attempt(execute)


def make_callback(listener: TrialListener, capacity: Capacity) -> Any:
    """Make the callback of Ray Tune that forwards events to `listener` and detects that trials cannot be placed."""
    from ray.tune import Callback

    class TuneCallback(Callback):
        is_stalled = False

        def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            listener.started(trial.trial_id, trial.config)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
            report = TrialReport.from_result(result)
            # The final report reaches the listener once, by `on_trial_complete`.
            if report.state in ("running", "waiting"):
                listener.reported(trial.trial_id, trial.config, report)

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            listener.ended(trial.trial_id, trial.config, TrialReport.from_result(trial.last_result))

        def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
            # Ray would wait silently for nodes on which a trial fits.
            resources = capacity.resources
            running = any(trial.status == "RUNNING" for trial in trials)
            cluster = [] if running else nodes()
            if not running:
                require_own_node(cluster)
            # Tune calls this in every step of its loop; the warning is printed once until a trial fits again.
            was_stalled = self.is_stalled
            fits = sum(node.count(resources) for node in cluster)
            self.is_stalled = not running and fits < resources.processes
            if self.is_stalled and not was_stalled:
                needed = f"a run that asks for {resources} does not fit on the nodes of the cluster now"
                logger.warning("waiting: %s: %d; start nodes", needed, len(cluster))

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            # If the driver's node is lost, every trial would use up its attempts within seconds.
            require_own_node(nodes())

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            file = Path(trial.error_file or "")
            lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
            # A traceback ends with the error; for a lost process Ray writes several lines, the reason last.
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it was lost")
            last = textwrap.shorten(last.rstrip(". "), 240, placeholder=" ...")
            hint = "see the logs of Ray on the nodes (often: out of memory)"
            why = f"given up after {ATTEMPTS} attempts: {last}; {hint}"
            listener.ended(trial.trial_id, trial.config, TrialReport(state="failed", why=why))

        def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
            # Tune pickles its callbacks for a restore that never happens; a listener with locks cannot be pickled.
            return Callback, ()

    return TuneCallback()
