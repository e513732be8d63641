"""Estimate what a training step costs on W processes from counted operations and data sheets; not a measurement.

step = max(image / W + text / W + every, floor) + gathers + all-reduce of the gradients

- image, text: both towers, forward and backward. A process has B / W images, and C / W classes, rounded up; where
  classes are not sharded every process has all of them.
- every: the part that every process repeats: refinement, heads, loss, optimizer.
- floor: the minimum time of a step's kernels, which every process runs: either launched one by one from Python,
  or replayed as a CUDA graph. One process replays; steps of several processes contain messages and are launched.
- a message takes its start, a latency for each doubling of the processes, and its bytes: a gather sends (W - 1) / W of
  what is gathered, an all-reduce twice (W - 1) / W of the gradients.
- the all-reduce does not overlap with the backward pass: the learnables are before both towers, so their gradients
  are only ready when the towers are done.

Shapes: W processes, B images, C classes, E joint embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.suites.cost import load_flops

FLOAT = 4
EMBEDDING = 512
"""Width of the joint space of ViT-B/16."""
GRADIENT_PASSES = 3
"""How often a refinement accesses its parameters: reads forward, reads backward, writes gradients."""
OPTIMIZER_BYTES = 28
"""AdamW reads weight, gradient and two moments in float32, and writes all but the gradient."""


@dataclass(frozen=True)
class Links:
    """Connections between processes: rates in bytes per second, latencies in seconds.

    rate: what a process sends at to others on its host. host_rate: what a ring over hosts runs at, all of a host's
    network cards together. latency, host_latency: of one doubling of processes and of hosts. start: of any message.
    """

    rate: float
    latency: float
    start: float = 0.0
    per_host: int = 8
    host_rate: float = math.inf
    host_latency: float = 0.0

    def gather(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-gather that gives every process `size` bytes in total."""
        return self._message((ranks - 1) / ranks * size, ranks, 1)

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes."""
        return self._message(2 * (ranks - 1) / ranks * size, ranks, 2)

    def _message(self, traffic: float, ranks: int, passes: int) -> float:
        if ranks == 1:
            return 0.0
        near, hosts = min(ranks, self.per_host), math.ceil(ranks / self.per_host)
        rate = self.rate if hosts == 1 else min(self.rate, self.host_rate)
        hops = self.latency * math.log2(near) + self.host_latency * math.log2(hosts)
        return self.start + passes * hops + traffic / rate


@dataclass(frozen=True)
class Parts:
    """One step on one process: seconds of its parts, and bytes to send with several processes.

    features: bytes of all images' features; class_features: of all classes'. launched, replayed: floors, see above.
    """

    classes: int
    image: float
    text: float
    every: float
    features: float
    class_features: float
    gradients: float
    launched: float = 0.0
    replayed: float = 0.0


@dataclass(frozen=True)
class Cost:
    """One step on several processes, in seconds; idle: what the floor adds to the work."""

    image: float
    text: float
    every: float
    idle: float
    gather: float
    all_reduce: float

    @property
    def total(self) -> float:
        return self.image + self.text + self.every + self.idle + self.gather + self.all_reduce

    @property
    def communication_share(self) -> float:
        return (self.gather + self.all_reduce) / self.total


def step_cost(parts: Parts, links: Links, ranks: int, *, sharded: bool = True, recorded: bool = False) -> Cost:
    """Estimate a step of `parts` on `ranks` processes.

    sharded: classes are sharded, where there are enough of them. recorded: steps of several processes are replayed too.
    """
    sharded = sharded and 1 < ranks <= parts.classes
    image = parts.image / ranks
    text = parts.text * math.ceil(parts.classes / ranks) / parts.classes if sharded else parts.text
    gather = links.gather(parts.features, ranks) + (links.gather(parts.class_features, ranks) if sharded else 0.0)
    floor = parts.replayed if recorded or ranks == 1 else parts.launched
    idle = max(0.0, floor - image - text - parts.every)
    return Cost(image, text, parts.every, idle, gather, links.all_reduce(parts.gradients, ranks))


def speedup(parts: Parts, links: Links, ranks: int, *, sharded: bool = True) -> float:
    """Return how many times as fast a step is on `ranks` processes as on one."""
    return step_cost(parts, links, 1).total / step_cost(parts, links, ranks, sharded=sharded).total


def pays_up_to(parts: Parts, links: Links, counts: tuple[int, ...], least: float = 0.5) -> int:
    """Return the largest of `counts`, each twice the one before, with a speed-up of `least` times the count."""
    return max((ranks for ranks in counts if speedup(parts, links, ranks) >= least * ranks), default=1)


@dataclass(frozen=True)
class Accelerator:
    """A GPU and its cluster: rates of data sheets, and the assumed shares of them that are reached.

    flops: dense bfloat16 products per second, memory: bytes per second. launch, replay: seconds of a kernel that has
    next to nothing to do, launched from Python and replayed.
    """

    name: str
    flops: float
    memory: float
    links: Links
    reached: float = 0.4
    memory_reached: float = 0.7
    launch: float = 5e-6
    replay: float = 2e-6


# NVLink and network cards at seven tenths of their data sheets, in one direction; eight GPUs a host, each with a card.
H200 = Accelerator(
    "H200",
    989e12,
    4.8e12,
    Links(0.7 * 450e9, 2e-6, start=15e-6, per_host=8, host_rate=0.7 * 8 * 50e9, host_latency=8e-6),
)
ETHERNET = replace(
    H200, name="H200 with 25 Gb/s Ethernet", links=replace(H200.links, host_rate=0.7 * 3.125e9, host_latency=30e-6)
)
A100 = Accelerator(
    "A100",
    312e12,
    2.0e12,
    Links(0.7 * 300e9, 2e-6, start=15e-6, per_host=8, host_rate=0.7 * 8 * 25e9, host_latency=8e-6),
)


def counted_parts(method: str, classes: int, batch: int, gpu: Accelerator, launches: int) -> Parts:
    """Compute the parts of a step of `method` with ViT-B/16 on `batch` images on one GPU, from counted operations."""
    counted = load_flops()["ViT-B-16"][method]
    constant, image, text, pairs = counted["step"]
    learnables = counted["learnables"]
    moved = learnables * (GRADIENT_PASSES * FLOAT + OPTIMIZER_BYTES)
    rate = gpu.flops * gpu.reached
    return Parts(
        classes=classes,
        image=image * batch / rate,
        text=text * classes / rate,
        every=(constant + pairs * batch * classes) / rate + moved / (gpu.memory * gpu.memory_reached),
        features=FLOAT * batch * EMBEDDING,
        class_features=FLOAT * classes * EMBEDDING,
        gradients=FLOAT * learnables,
        launched=launches * gpu.launch,
        replayed=launches * gpu.replay,
    )
