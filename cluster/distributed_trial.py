"""Several processes for one run: an actor for each rank in the bundles of the trial's placement group.

Ray reserves the bundles all at once or not at all, so that two runs can never hold half of each other's room. When a
process or its node is lost, the trial is, and Ray Tune places the whole group anew.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from queue import Empty
from typing import Any

from cluster.job import Job, Report
from cluster.paths import StoragePaths
from cluster.ray_cluster import Resources
from cluster.work import Tell, Work, attempt
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks, ranks_from_environment
from runner.environment import library_defaults, own_device, resolve_device

ASK_SECONDS = 1.0
MEETING_SECONDS = 120.0
"""Within which all processes of a group have to be running: their room is reserved already."""


class Rank:
    """One process of a group; an actor, whose process ends with the job."""

    def __init__(self) -> None:
        self._port = socket.socket()

    def where(self) -> tuple[str, str, int]:
        """The node, its address, and a port of it that nobody else gets."""
        import ray

        self._port.bind(("", 0))
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return node, address, int(self._port.getsockname()[1])

    def work(self, job: Job, places: StoragePaths, environment: Mapping[str, str], mailbox: Any) -> Report:
        """Do the job as the rank that `environment` says; the first one puts its reports into `mailbox`."""
        library_defaults()
        os.environ.update(environment)
        return attempt(lambda: self._together(job, places, mailbox))

    def _together(self, job: Job, places: StoragePaths, mailbox: Any) -> Report:
        place, ranks = places.here(), ranks_from_environment()
        device = resolve_device(place.device)
        # Ray shows an actor its own GPU alone, whatever its number on the machine.
        device = resolve_device("cuda:0") if device.type == "cuda" else own_device(device, ranks)
        # Held until the moment before it is listened at: the first to bind a free port has it.
        self._port.close()
        with init_process_group(ranks, device, place.timeout) as group:
            return Work(job, replace(place, device=str(device)), lambda report: mailbox.put(report), group).do()


def perform_together(job: Job, places: StoragePaths, share: Resources, tell: Tell) -> Report:
    """Do `job` with `share.processes` processes; raises where one of them was lost."""
    import ray
    from ray.util import get_current_placement_group
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_current_placement_group()
    assert group is not None
    actors: list[Any] = [
        ray.remote(Rank)
        .options(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote()
        for number in range(share.processes)
    ]
    mailbox = Queue(actor_options={"num_cpus": 0})
    try:
        found = ray.get([actor.where.remote() for actor in actors], timeout=MEETING_SECONDS)
        environments = announcements(found)
        order = sorted(range(len(actors)), key=lambda index: int(environments[index]["RANK"]))
        refs = [actors[index].work.remote(job, places, environments[index], mailbox) for index in order]
        pending = refs
        while pending:
            ended, pending = ray.wait(pending, num_returns=len(pending), timeout=ASK_SECONDS)
            _pass_on(mailbox, tell)
            # Raises for a lost process: those that wait for it would do so until their patience ends.
            ray.get(ended)
        # What failed because another was lost is told apart from a failed run only when all have ended.
        reports: list[Report] = ray.get(refs)
    finally:
        for actor in actors:
            ray.kill(actor)
        mailbox.shutdown(force=True)
    return next((report for report in reports if report.state == "failed"), reports[0])


def announcements(found: Sequence[tuple[str, str, int]]) -> list[dict[str, str]]:
    """What torchrun would put into the environment of each process, which are at (node, address, free port).

    Processes of one node get ranks that follow each other, nodes in order of their first process.
    """
    by_node: dict[str, list[int]] = {}
    for index, (node, _, _) in enumerate(found):
        by_node.setdefault(node, []).append(index)
    order = [(index, local, members) for members in by_node.values() for local, index in enumerate(members)]
    _, master, port = found[order[0][0]]
    said: list[dict[str, str]] = [{} for _ in found]
    for rank, (index, local, members) in enumerate(order):
        ranks = Ranks(rank, len(found), local, len(members))
        said[index] = {
            "RANK": str(ranks.rank),
            "WORLD_SIZE": str(ranks.size),
            "LOCAL_RANK": str(ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(ranks.local_size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
        }
    return said


def _pass_on(mailbox: Any, tell: Tell) -> None:
    while True:
        try:
            tell(mailbox.get_nowait())
        except Empty:
            return
