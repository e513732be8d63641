"""Choose the device of a run, and count what this machine has: GPUs, cores, memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.distributed.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    import torch

MOST_DECODERS = 12
"""Upper limit of decoding threads; more do not decode faster in one interpreter."""


def check_device_name(name: str) -> None:
    """Raise UsageError for a name that is no device on any machine; imports no torch."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", name):
        raise UsageError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N")


def resolve_device(name: str = "auto") -> torch.device:
    """Return the torch device called `name`; "auto" is the first GPU, else the CPU. Raises UsageError if absent."""
    import torch

    check_device_name(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (gpus := count_gpus()):
        raise UsageError(f"device '{name}' does not exist, torch sees {gpus} GPUs: use --device cpu or auto")
    return device


def set_deterministic() -> None:
    """Let torch and cuBLAS repeat equal bits for the rest of this process, or raise RuntimeError where they cannot."""
    import torch

    # cuBLAS reads the variable when the first matrix product on a GPU creates its handle.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def count_gpus() -> int:
    """Count the GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_device(device: torch.device, ranks: Ranks) -> torch.device:
    """Return the device of one process of several: "cuda" becomes the GPU with its local rank."""
    import torch

    if ranks.size > 1 and device.index is not None:
        raise UsageError(f"--device {device} would be shared by {ranks.local_size} processes: use --device cuda")
    return torch.device("cuda", ranks.local_rank) if ranks.size > 1 and device.type == "cuda" else device


def num_decoders(workers: int | None, device: torch.device) -> int:
    """Return the number of decoding threads: `workers` if given, else none on a CPU and many for a GPU."""
    if workers is not None or device.type != "cuda":
        # On a CPU such threads would take the cores of the model.
        return workers or 0
    visible = count_gpus()
    gpus = int(_ask_driver("nvmlDeviceGetCount") or visible)
    # The cores are shared by the ranks of this machine, or by runs that each see only some of its GPUs.
    sharing = max(ranks_from_environment().local_size, gpus // max(1, visible))
    return min(MOST_DECODERS, max(1, available_cores() // sharing))


def available_memory() -> int:
    """Return the free main memory of this machine in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    # Only Linux has a CPU affinity of processes.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    return str(_ask_driver("nvmlSystemGetDriverVersion") or "")


def _ask_driver(function: str) -> Any:
    """Call a function of NVIDIA's management library; None where there is no driver."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return getattr(pynvml, function)()
    return None
