"""Describe what computes a result: versions, hardware, and the state of the source."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("procap-bench", "torch", "torchvision", "open_clip_torch", "numpy", "safetensors", "webdataset", "pydantic",
            "deepspeed")  # fmt: skip

SOURCE_VARIABLE = "PROCAP_SOURCE"
"""The state of a source tree that was submitted to a cluster, as JSON."""


def describe_environment(device: torch.device | None = None) -> dict[str, Any]:
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
    """Return when (UTC) and by which program a result is written, and `facts` of `describe_environment`."""
    written = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"written": written, "program": program_version(), "environment": facts}


def program_version() -> str:
    """Return the version of this program, and the commit if this is a checkout: `0.1.0 (ec68cbb6, changed)`."""
    source = _code_versions()["git"]
    commit = f" ({source['commit'][:8]}{', changed' if source['dirty'] else ''})" if source else ""
    return importlib.metadata.version("procap-bench") + commit


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
