"""Run groups of processes that take training steps on request and sleep in between.

A group is started once and keeps its libraries, its frozen model and its connections, so that groups of different sizes
can take turns, round by round, and other load on the machine affects all of them. A process of a group runs this file:
a line of JSON on standard input is a request, one on standard output the answer.

Shapes: W processes, B images of the global batch, C classes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UserError

if TYPE_CHECKING:
    from procap.clip import CLIP
    from runner.config import RunConfig
    from runner.distributed.collectives import ProcessGroup

MODULE = "benchmarks.studies.scaling.ranks"
WAIT_SECONDS = 600.0
END_SECONDS = 60.0
WARM_UPS = 3
"""DDP rebuilds its buckets, with extra messages, within the first three steps."""
PINGS = 10


@dataclass(frozen=True)
class Parallelism:
    """A way to take steps. sharded: classes are sharded over the processes, else each encodes all of them."""

    name: str
    processes: int = 1
    engine: str = "ddp"
    zero_stage: int | None = None
    sharded: bool = True


@dataclass(frozen=True)
class StepSpec:
    """The step to take: a method on a global batch of synthetic images and a number of synthetic classes."""

    method: str
    classes: int
    batch: int


class Group:
    """The processes of a variant, one thread each. Raises UserError if one of them has ended."""

    def __init__(self, variant: Parallelism, backbone: str, pretrained: str | None) -> None:
        self.variant = variant
        setting = json.dumps({"variant": asdict(variant), "backbone": backbone, "pretrained": pretrained})
        environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environ |= {"WORLD_SIZE": str(variant.processes), "LOCAL_WORLD_SIZE": str(variant.processes)}
        self._folder = tempfile.TemporaryDirectory(prefix="scaling-")
        self._processes = []
        for rank in range(variant.processes):
            stderr = os.open(self._stderr_file(rank), os.O_WRONLY | os.O_CREAT)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, setting],
                    env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
            os.close(stderr)

    def ask(self, request: str, job: StepSpec | None = None, **details: Any) -> list[dict[str, Any]]:
        """Send a request to every process and return the answers in order of the ranks; all work at the same time."""
        about = {"job": asdict(job)} if job else {}
        line = json.dumps({"request": request, **about, **details}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            answer = process.stdout.readline()
            if not answer:
                raise UserError(f"process {rank} of {self.variant.name} is gone: {self._last_words(rank)}")
            answers.append(json.loads(answer))
        return answers

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()

    def _stderr_file(self, rank: int) -> Path:
        return Path(self._folder.name) / str(rank)

    def _last_words(self, rank: int) -> str:
        self._processes[rank].wait(END_SECONDS)
        lines = self._stderr_file(rank).read_text().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._processes[rank].returncode}"


def start_groups(
    variants: Sequence[Parallelism], backbone: str, pretrained: str | None, stack: ExitStack
) -> list[Group]:
    """Start a group for each of `variants` and wait until all are ready; `stack` closes them."""
    groups = []
    for variant in variants:
        groups.append(Group(variant, backbone, pretrained))
        stack.callback(groups[-1].close)
    for group in groups:
        group.ask("clear")
    return groups


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Steps:
    """Take steps of a job in this process, at a learning rate of zero: every round starts from the same weights."""

    def __init__(self, job: StepSpec, variant: Parallelism, group: ProcessGroup, clip: CLIP) -> None:
        from benchmarks.runtime.data import synthetic_case
        from runner.config import RuntimeConfig
        from runner.engine import Batch
        from runner.meters import Meter
        from runner.setup import make_engine
        from runner.step import TrainStep
        from shards.rng import generator

        method, images, labels = synthetic_case(clip, job.method, job.classes, job.batch)
        if group.size > 1:
            method.group = group
        place = RuntimeConfig(Path(), Path(), "cpu", engine=variant.engine, zero_stage=variant.zero_stage)
        config = run_config(job)
        self.group, self.counted = group, variant.engine == "ddp"
        self.meter = Meter(clip.device, 0)
        self.engine = make_engine(method, config, place, group)
        self.engine.set_rate(0.0)
        self.batch = Batch(images[group.rank :: group.size], labels, method.draw(generator(config.seed, "noise", 0)))
        self._step = TrainStep(self.engine, self.meter)

    def take(self, times: int) -> dict[str, Any]:
        """Take `times` steps; returns mean seconds, CPU seconds, and seconds of communication if they are measured."""
        self.group.barrier()
        waited, worked, began = self.group.communication_seconds, time.process_time(), time.perf_counter()
        for _ in range(times):
            self._step(self.batch)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        waited = self.group.communication_seconds - waited
        self.meter.settle()
        return {"seconds": seconds / times, "cpu": worked / times, "waited": waited / times if self.counted else None}

    def look(self) -> dict[str, Any]:
        """Measure what a step sends and allocates, and the memory of the process."""
        from benchmarks.runtime.measure import peak_bytes
        from runner.meters import ResourceMonitor

        for _ in range(WARM_UPS):
            self._step(self.batch)
        machine = ResourceMonitor(self.meter.device)
        sent, messages = sent_bytes(lambda: self._step(self.batch), self.group.size)
        process = machine.peak_memory().process
        tensors = peak_bytes(lambda: self._step(self.batch), self.meter.device)
        loss = float(self._step(self.batch)[-1])
        learned = sum(parameter.numel() for parameter in self.engine.method.parameters())
        return {
            "loss": loss,
            "sent_bytes": sent,
            "messages": messages,
            "tensor_bytes": tensors,
            "process_bytes": process,
            "learnables": learned,
        }


def run_config(job: StepSpec) -> RunConfig:
    """Configure a run with ProCAP's recipe, so that only the methods differ."""
    from benchmarks.runtime.settings import METHOD_OPTIONS
    from runner.config import plan_run

    return plan_run(
        method=job.method,
        dataset="shapes",
        classes="all",
        recipe="procap",
        overrides={"epochs": 1, "batch_size": job.batch},
        options=METHOD_OPTIONS.get(job.method, {}),
    )


def sent_bytes(work: Any, size: int) -> tuple[float, int]:
    """Count the bytes that one of `size` processes sends while `work` runs, and the messages.

    Counted from the tensors of the messages, as rings send them: a gather W - 1 parts of W, an all-reduce twice that.
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found: list[float] = []

    class Messages(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d" and function._opname not in ("barrier", "monitored_barrier_"):
                # The full tensor is the first argument of a gather (output) and the second of a scatter (input).
                whole = args[1] if function._opname.startswith(("reduce_scatter", "_reduce_scatter")) else args[0]
                size_of = sum(leaf.nbytes for leaf in tree_leaves(whole) if isinstance(leaf, Tensor))
                found.append(size_of * (2 if "allreduce" in function._opname else 1))
            return function(*args, **(kwargs or {}))

    with Messages():
        work()
    return sum(found) * (size - 1) / size, len(found)


def ping(size: int) -> float:
    """Time an all-reduce of `size` float32 numbers."""
    import torch
    import torch.distributed as dist

    numbers = torch.zeros(size)
    dist.all_reduce(numbers)
    began = time.perf_counter()
    for _ in range(PINGS):
        dist.all_reduce(numbers)
    return (time.perf_counter() - began) / PINGS


def serve(variant: Parallelism, clip: CLIP, group: ProcessGroup, requests: Any, answer: Any) -> None:
    """Answer requests until the input ends."""
    steps: dict[StepSpec, Steps] = {}

    def clear() -> None:
        for one in steps.values():
            one.engine.close()
        steps.clear()
        gc.collect()
        # Return freed memory to the system, or it would count as the next job's memory.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    for line in requests:
        request = json.loads(line)
        job = StepSpec(**request.pop("job")) if "job" in request else None
        match request.pop("request"):
            case "build" if job:
                steps[job] = Steps(job, variant, group, clip)
                answer(steps[job].look())
            case "step" if job:
                answer(steps[job].take(**request))
            case "ping":
                answer({"seconds": ping(**request)})
            case "clear":
                clear()
                answer({})
    clear()


def main() -> None:
    """Run one process of a group."""
    setting = json.loads(sys.argv[1])
    variant = Parallelism(**setting["variant"])
    # Libraries may print to stdout, so keep the original descriptor for the answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from runner.environment import library_defaults

    library_defaults()
    import torch

    from procap import parallel
    from procap.weights.loading import load_clip
    from runner.distributed.process_group import init_process_group
    from runner.distributed.ranks import ranks_from_environment

    torch.set_num_threads(1)
    parallel.SHARED_FROM = 1 if variant.sharded else sys.maxsize
    ranks = ranks_from_environment()

    def answer(words: dict[str, Any]) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    clip = load_clip(setting["backbone"], setting["pretrained"])
    with init_process_group(ranks, torch.device("cpu"), WAIT_SECONDS) as group:
        serve(variant, clip, group, sys.stdin, answer)


if __name__ == "__main__":
    main()
