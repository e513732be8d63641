"""Where jobs are carried out: in this process, several at a time on this machine, or on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cluster.address import LOCAL, ray_address, settle_auth
from cluster.job import Job, Report
from cluster.local_capacity import names_gpu, only_gpu, slots_here
from cluster.paths import StoragePaths
from cluster.ray_cluster import Node, Resources, connected, fair_share, nodes, room
from cluster.tune_runner import Listener, carry_out
from cluster.work import Tell, Work, attempt
from procap.errors import UsageError, unknown_name
from runner.acceleration import Acceleration
from runner.distributed.ranks import ranks_from_environment
from runner.environment import resolve_device
from runner.stop_signals import Interrupted

PLACES = ("local", "ray")


@dataclass(frozen=True)
class Launcher:
    """What was asked for.

    on: "local" is this machine, "ray" a cluster. address: of the cluster, see `cluster.address.ray_address`.
    processes: that train one run together, each with `cpus` and `gpus`; None leaves both to what is there.
    at_once: runs, None for as many as there is room for. autoscale: nodes come when they are asked for.
    """

    on: str = "local"
    address: str = ""
    processes: int = 1
    cpus: float | None = None
    gpus: float | None = None
    at_once: int | None = None
    autoscale: bool = False

    def __post_init__(self) -> None:
        if self.on not in PLACES:
            raise unknown_name("launcher", self.on, PLACES)
        if self.on == "local" and (self.address or self.autoscale):
            raise UsageError("--address and --autoscale are a cluster's: add --launcher ray")
        if self.on == "ray":
            ray_address(self.address)
        for name, value, least in (("processes", self.processes, 1), ("max-concurrent", self.at_once, 1)):
            if value is not None and value < least:
                raise UsageError(f"--{name} {value}: at least {least} is needed")
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if amount is not None and not (0 <= amount <= 1 or (1 < amount < math.inf and amount == int(amount))):
                raise UsageError(f"--{name} {amount:g}: a part of one, or a whole number")


@dataclass(frozen=True)
class Capacity:
    """What there is: `at_once` runs of `share`; without Ray the one of this process.

    growing: more nodes come when they are asked for.
    """

    share: Resources
    at_once: int
    ray: bool
    growing: bool = False

    def places(self, asked: StoragePaths) -> StoragePaths:
        """`asked`, with the device as processes of such a share name it; they may work in another folder."""
        device, file = asked.rest.device, asked.rest.deepspeed_json
        if device == "auto" and not self.share.gpus:
            # Ray hides GPUs from nobody who has none of his own: they would all take the same one.
            device = "cpu"
        elif self.ray and names_gpu(device):
            device = "cuda"
        return replace(asked, rest=replace(asked.rest, device=device, deepspeed_json=file and file.absolute()))


@contextmanager
def gathered(fleet: Launcher, places: StoragePaths, *, always_ray: bool = False) -> Iterator[Capacity]:
    """Be connected to the fleet while the block lasts.

    always_ray: even where one run at a time is done, as Ray Tune's searchers need it. Raises UserError where the
    cluster does not answer, UsageError where not even one run fits or this machine has not the device.
    """
    if ranks_from_environment().size > 1:
        raise UsageError("start this command without torchrun: --processes says how many train one run together")
    if fleet.on == "local":
        # At once, as else every run would say so.
        resolve_device(places.rest.device)
        here = slots_here(fleet.at_once, fleet.gpus, places.rest.device, fleet.processes)
        share = Resources(fleet.processes, fleet.cpus or 1.0, here.gpus)
        alone = Capacity(share, 1, ray=False)
        Acceleration.of(places.rest.accelerate, resolve_device(alone.places(places).rest.device))
        if here.at_once == 1 and fleet.processes == 1 and not always_ray:
            yield alone
            return
        gpu = only_gpu(places.rest.device)
        with connected(LOCAL, cpus=max(here.cpus, here.at_once * fleet.processes), gpu=gpu):
            yield Capacity(share, min(here.at_once, room(nodes(), share, own=True)), ray=True)
        return
    if names_gpu(places.rest.device):
        raise UsageError(f"--device {places.rest.device}: on a node Ray chooses the GPU of a run: use --device cuda")
    settle_auth()
    address = ray_address(fleet.address)
    with connected("auto" if address == LOCAL else address):
        there = nodes()
        share = _share_of(fleet, there, places.rest.device)
        fits = fleet.at_once or 1000 if fleet.autoscale else room(there, share)
        yield Capacity(share, min(fits, fleet.at_once or fits), ray=True, growing=fleet.autoscale)


def _share_of(fleet: Launcher, there: Sequence[Node], device: str) -> Resources:
    """What a run gets of a cluster. Raises UsageError where that is nothing, or follows from nodes still to come."""
    if fleet.autoscale and fleet.gpus is None and device != "cpu" and not any(node.gpus for node in there):
        raise UsageError(
            "--autoscale, and no node with a GPU is up yet to show what a run gets: say --gpus 1 or --gpus 0"
        )
    share = fair_share(there, fleet.processes, fleet.cpus, fleet.gpus)
    if not share.cpus and not share.gpus:
        raise UsageError(
            f"--cpus {share.cpus:g} without a GPU: a run has to ask for something: leave it out, or say --cpus 0.5"
        )
    return share


def do_all(jobs: Sequence[Job], places: StoragePaths, room: Capacity, listener: Listener) -> None:
    """Carry out `jobs` in their order; the listener hears what becomes of each by its `number`."""
    places = room.places(places)
    if room.ray:
        carry_out(jobs, places, room.share, listener, at_once=room.at_once, growing=room.growing)
        return
    for number, job in enumerate(jobs):
        config = {"number": number}
        name = f"{number}"
        listener.started(name, config)

        def tell(report: Report, name: str = name, config: dict[str, int] = config) -> None:
            listener.reported(name, config, report)

        def work(job: Job = job, tell: Tell = tell) -> Report:
            return Work(job, places.here(), tell).do()

        report = attempt(work, lost=(Interrupted,))
        listener.ended(name, config, report)
