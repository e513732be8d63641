"""How many runs this machine does at once: as many as its cores and its memory hold, GPUs shared by parts."""

from __future__ import annotations

import os
from dataclasses import dataclass

RUN_BYTES = 3 * 2**30
"""Of main memory for a run: the program 0.7 GiB, weights and activations of a ViT-B/16 on a CPU up to 2.3 GiB."""


@dataclass(frozen=True)
class Slots:
    """at_once runs, each with `gpus` of a GPU; `cpus` is what the machine has."""

    at_once: int
    cpus: int
    gpus: float


def slots_here(at_once: int | None = None, gpus: float | None = None, device: str = "auto") -> Slots:
    """What fits here; `at_once` and `gpus` (per run) where somebody knows better.

    A run has a GPU to itself unless `gpus` says less: what a part of one holds depends on the method and the batch.
    """
    import psutil

    cpus = os.cpu_count() or 1
    count = 0 if device == "cpu" else _gpus()
    if count:
        each = 1.0 if gpus is None else gpus
        fit = int(count / each) if each else cpus
        return Slots(at_once or max(1, min(fit, cpus)), cpus, each)
    fit = min(cpus, int(psutil.virtual_memory().available // RUN_BYTES))
    return Slots(at_once or max(1, fit), cpus, 0.0)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
