"""How many runs this machine does at once: as many as its cores and its memory hold, GPUs shared by parts."""

from __future__ import annotations

import os
from dataclasses import dataclass

RUN_BYTES = 3 * 2**30
"""Of main memory for a process: the program 0.7 GiB, weights and activations of a ViT-B/16 on a CPU up to 2.3 GiB."""


@dataclass(frozen=True)
class Slots:
    """at_once runs, whose processes have `gpus` of a GPU each; `cpus` is what the machine has."""

    at_once: int
    cpus: int
    gpus: float


def slots_here(
    at_once: int | None = None, gpus: float | None = None, device: str = "auto", processes: int = 1
) -> Slots:
    """What fits here of runs of so many processes; `at_once` and `gpus` (per process) where somebody knows better.

    A process has a GPU to itself unless `gpus` says less: what a part of one holds depends on the method and the batch.
    """
    import psutil

    cpus = os.cpu_count() or 1
    count = 0 if device == "cpu" else _gpus()
    if count:
        each = 1.0 if gpus is None else gpus
        fit = min(cpus, int(count / each) if each else cpus)
    else:
        each = 0.0
        fit = min(cpus, int(psutil.virtual_memory().available // RUN_BYTES))
    return Slots(at_once or max(1, fit // processes), cpus, each)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
