"""A trial of Ray Tune, on the machine where Ray placed it: one process, or the coordinator of a group of them."""

from __future__ import annotations

from cluster.job import Job
from cluster.paths import StoragePaths
from cluster.ray_cluster import Resources
from cluster.work import Tell, Work, attempt
from runner.environment import library_defaults


def perform(job: Job, places: StoragePaths, share: Resources, tell: Tell) -> None:
    """Do `job` and tell how it goes, last of all how it ended; raises where Ray Tune should start the trial again."""
    library_defaults()
    if share.processes == 1:
        report = attempt(lambda: Work(job, places.here(), tell).do())
    else:
        from ray.exceptions import RayError

        from cluster.distributed_trial import perform_together

        report = attempt(lambda: perform_together(job, places, share, tell), lost=(RayError,))
    tell(report)
