"""Set up the environment of a run: defaults of libraries, device, cores and memory; describe versions and hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.distributed.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    import torch

PACKAGES = ("procap-bench", "torch", "torchvision", "open_clip_torch", "numpy", "safetensors", "webdataset", "pydantic",
            "deepspeed")  # fmt: skip

LIBRARY_DEFAULTS = {
    # By default OpenMP's threads spin while they wait for each other, which is very slow if another program uses a
    # core: with one busy loop on two cores a step of mini took 2.8 s instead of 0.18 s. Passive waiting costs nothing.
    "OMP_WAIT_POLICY": "passive",
    # Otherwise weights that are not there cost most of a minute of retries; users decide about downloads.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # MLflow reads the word alone, not the usual 1.
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # By default MLflow tries seven times for 120 s.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise torch prints a page of C++ frames when another process of the run dies.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Triton 3.9 warns that its default will change, and with it the numbers.
    "TRITON_DEFAULT_FP_FUSION": "1",
    # The profiler would print further messages.
    "KINETO_LOG_LEVEL": "99",
}

SOURCE_VARIABLE = "PROCAP_SOURCE"
"""The state of a source tree that was submitted to a cluster, as JSON."""

MOST_DECODERS = 12
"""Upper limit of decoding threads; more do not decode faster in one interpreter."""


def library_defaults(*runs: object) -> None:
    """Set environment variables, unless the user has set them, before the libraries that read them are imported.

    runs: those that the user names; one at `hf://` allows downloads from the Hub.
    """
    if any(str(run).startswith("hf:/") for run in runs):
        os.environ.setdefault("HF_HUB_OFFLINE", "0")
    for name, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)


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
    """Let torch and cuBLAS compute equal bits in every repetition, for the rest of this process.

    An operation that has no deterministic implementation on its device raises RuntimeError.
    """
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

    if device.type != "cuda" or ranks.size == 1:
        return device
    if device.index is not None:
        raise UsageError(f"--device {device} would be shared by {ranks.local_size} processes: use --device cuda")
    return torch.device("cuda", ranks.local_rank)


def num_decoders(workers: int | None, device: torch.device) -> int:
    """Return the number of decoding threads: `workers` if given, else none on a CPU and many for a GPU."""
    if workers is not None:
        return workers
    # On a CPU such threads would take the cores of the model.
    return min(MOST_DECODERS, max(1, available_cores() // count_sharing_runs())) if device.type == "cuda" else 0


def count_sharing_runs() -> int:
    """Count the processes that share this machine's cores: its ranks, or runs that each see only some of its GPUs."""
    gpus = visible = count_gpus()
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            gpus = int(pynvml.nvmlDeviceGetCount())
    return max(ranks_from_environment().local_size, gpus // max(1, visible))


def available_memory() -> int:
    """Return the free main memory of this machine in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    # Only Linux has a CPU affinity of processes.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Collect versions and hardware of this process, as plain JSON."""
    import torch

    gpu = device is not None and device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": None if device is None else str(device),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cuda": torch.version.cuda if gpu else None,
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **_code_versions(),
    }


@functools.cache
def cpu_name() -> str:
    """Return the model of the CPU where the system tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _code_versions() -> dict[str, Any]:
    """Collect the versions of the code once: the imported code of a process stays what it is."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"git": source_state(), "packages": versions}


def provenance(facts: dict[str, Any]) -> dict[str, Any]:
    """Return when and by which program a result is written, and `facts`, which `environment` has collected.

    written: UTC, as 2026-01-31T12:00:00Z. program: the version, and the commit if this is a checkout.
    """
    written = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"written": written, "program": program_version(), "environment": facts}


def program_version() -> str:
    """Return the version of this program, and the commit if this is a checkout: `0.1.0 (ec68cbb6, changed)`."""
    source = _code_versions()["git"]
    commit = f" ({source['commit'][:8]}{', changed' if source['dirty'] else ''})" if source else ""
    return importlib.metadata.version("procap-bench") + commit


def gpu_driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def source_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the source tree and whether it has uncommitted changes; None for an installed copy."""
    root = folder or Path(__file__).resolve().parent.parent
    try:
        if not (root / ".git").exists():
            # "" is no JSON, so an installed copy without the variable returns None below.
            recorded = json.loads(os.environ.get(SOURCE_VARIABLE, ""))
            return {"commit": str(recorded["commit"]), "dirty": bool(recorded["dirty"])}
        # Without --no-optional-locks git refreshes the index, and concurrent runs would compete for its lock.
        command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"]
        # Without tags `describe` names the commit itself.
        command += ["--exclude=*"]
        state = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return {"commit": state.removesuffix("-dirty"), "dirty": state.endswith("-dirty")}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
