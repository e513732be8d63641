"""How many runs this machine does at once: as many as its cores and its memory hold, GPUs shared by parts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from procap.errors import UsageError
from runner.limits import cores_here, memory_here

RUN_BYTES = 3 * 2**30
"""Of main memory for a process: the program 0.7 GiB, weights and activations of a ViT-B/16 on a CPU up to 2.3 GiB."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LocalCapacity:
    """at_once runs, whose processes have `gpus` of a GPU each; `cpus` is what this process may use."""

    at_once: int
    cpus: int
    gpus: float


def slots_here(
    at_once: int | None = None, gpus: float | None = None, device: str = "auto", processes: int = 1
) -> LocalCapacity:
    """What fits here of runs of so many processes; `at_once` and `gpus` (per process) where somebody knows better.

    A process has a GPU to itself unless `gpus` says less: what a part of one holds depends on the method and the batch.
    Raises UsageError where a process is to have more GPUs than there are.
    """
    cpus = cores_here()
    fit = min(cpus, memory_here() // RUN_BYTES)
    count = 0 if device == "cpu" else _gpus()
    has = "with --device cpu a run uses none" if device == "cpu" else f"torch sees {count} on this machine"
    if names_gpu(device):
        count, has = min(count, 1), f"--device {device} is one"
    each = float(min(count, 1)) if gpus is None else gpus
    if each > count:
        raise UsageError(f"--gpus {each:g}: {has}; {f'at most {count} would work' if count else 'leave it out'}")
    if each:
        fit = min(fit, gpus_hold(count, each))
    return LocalCapacity(at_once or max(1, fit // processes), cpus, each)


def names_gpu(device: str) -> bool:
    """Whether `device` is one GPU by its number."""
    return device.startswith("cuda:")


def only_gpu(device: str) -> str | None:
    """What `VISIBLE` tells processes that are to see this one GPU alone; None where none is named."""
    if not names_gpu(device):
        return None
    number, seen = int(device.partition(":")[2]), os.environ.get(VISIBLE)
    return seen.split(",")[number].strip() if seen else str(number)


def times(amount: float, share: float) -> int:
    """How often `share` fits into `amount`, where 0.1 does into 1 ten times, as it does for Ray."""
    return math.floor(amount / share + 1e-6)


def gpus_hold(gpus: float, share: float) -> int:
    """How many processes with `share` each so many GPUs hold; a part is always one of a single GPU."""
    return int(gpus) * times(1, share) if share < 1 else times(gpus, share)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
