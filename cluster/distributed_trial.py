"""Train one trial with several processes: an actor for each rank in the bundles of the trial's placement group.

Ray reserves all bundles at once or none, so that two trials never hold half of each other's resources. If a process
or its node is lost, the trial fails with it, and Ray Tune places the whole group again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty
from typing import Any

from cluster.executor import ReportTo, RunExecutor, TrialWork, attempt
from cluster.trial import TrialReport
from runner.devices import own_device, resolve_device
from runner.distributed.connect import LOST, init_process_group
from runner.distributed.ranks import Ranks, ranks_from_environment
from runner.environment_defaults import set_environment_defaults
from runner.session import Session

POLL_SECONDS = 1.0
START_SECONDS = 120.0
"""Timeout for starting all processes of a group, whose resources are already reserved."""


class Rank:
    """One process of a process group; an actor that ends with the trial."""

    def __init__(self) -> None:
        self._port = socket.socket()

    def locate(self) -> tuple[str, str, int]:
        """Return the node, its address, and a free port of it, reserved until the process group is initialized."""
        import ray

        self._port.bind(("", 0))
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return node, address, int(self._port.getsockname()[1])

    def execute(
        self, drawn: Mapping[str, Any], work: TrialWork, environment: Mapping[str, str], queue: Any
    ) -> TrialReport:
        """Execute the trial as the rank set by `environment`; rank 0 puts its reports into `queue`."""
        set_environment_defaults()
        os.environ.update(environment)

        def execute() -> TrialReport:
            runtime, ranks = work.paths.local_runtime(), ranks_from_environment()
            device = resolve_device(runtime.device)
            # Ray sets CUDA_VISIBLE_DEVICES, so an actor's only GPU is always number 0.
            device = resolve_device("cuda:0") if device.type == "cuda" else own_device(device, ranks)
            # Released only now, so that no other process can bind the port before the process group does.
            self._port.close()
            with init_process_group(ranks, device, runtime.timeout) as group:
                session = Session(replace(runtime, device=str(device)), group)
                return RunExecutor(session, work.runs_of(drawn, runtime), queue.put, work.halving).execute()

        return attempt(execute)


def execute_in_group(drawn: Mapping[str, Any], work: TrialWork, report_to: ReportTo) -> TrialReport:
    """Execute a trial with `work.resources.processes` processes; raises RayError if one of them was lost."""
    import ray
    from ray.util import get_current_placement_group
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Ray leaves the trial's own empty bundle out of the group, so that rank r has bundle r.
    placement = get_current_placement_group()
    assert placement is not None
    actors: list[Any] = [
        ray.remote(Rank)
        .options(
            num_cpus=work.resources.cpus,
            num_gpus=work.resources.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=number),
        )
        .remote()
        for number in range(work.resources.processes)
    ]
    # By default an actor needs a CPU to be placed, and the ranks hold all of those in the placement group.
    queue = Queue(actor_options={"num_cpus": 0})
    try:
        locations = ray.get([actor.locate.remote() for actor in actors], timeout=START_SECONDS)
        environments = rank_environments(locations)
        order = sorted(range(len(actors)), key=lambda index: int(environments[index]["RANK"]))
        refs = [actors[index].execute.remote(drawn, work, environments[index], queue) for index in order]
        pending = refs
        while pending:
            # `put` returns when the queue has the report, so the last pass of this loop misses none.
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
            with suppress(Empty):
                while True:
                    report_to(queue.get_nowait())
            # Raises for a lost process: the others would wait for it until their timeout.
            ray.get(ended)
        reports: list[TrialReport] = ray.get(refs)
    finally:
        for actor in actors:
            # A rank that waits for a lost one does not end by itself.
            ray.kill(actor)
        queue.shutdown(force=True)
    # A rank that only lost the connection to another one does not know the reason.
    failures = sorted((report for report in reports if report.state == "failed"), key=lambda report: LOST in report.why)
    return failures[0] if failures else reports[0]


def rank_environments(locations: Sequence[tuple[str, str, int]]) -> list[dict[str, str]]:
    """Make the environment variables of processes at (node, address, free port); ranks of a node are consecutive."""
    hosts = [node for node, _, _ in locations]
    order = sorted(range(len(locations)), key=lambda index: hosts.index(hosts[index]))
    _, master, port = locations[order[0]]
    environments: list[dict[str, str]] = [{} for _ in locations]
    for rank, index in enumerate(order):
        ranks = Ranks(rank, len(locations), hosts[:index].count(hosts[index]), hosts.count(hosts[index]))
        environments[index] = ranks.environment(master, port)
    return environments
