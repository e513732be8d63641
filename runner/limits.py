"""Find out how many cores and how much memory a container or batch system lets this process use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory() -> int:
    """Return the free memory in bytes, within the limits of the control groups."""
    import psutil

    limits = [psutil.virtual_memory().available]
    for version, group in _control_groups("memory"):
        with suppress(OSError, ValueError):
            limits.append(int((group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text()))
    return min(limits)


def available_cores() -> int:
    """Return the number of usable cores, within the limits of the control groups."""
    # Only Linux has a CPU affinity of processes.
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for version, group in _control_groups("cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                limits.append(int(quota) / int(period))
    return max(1, int(min(limits)))


def _control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """List version and folder of the control groups of this process; "max" and -1 in their files mean no limit."""
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            version, root = (1, CGROUPS / controller) if controllers else (2, CGROUPS)
            own = root / path.lstrip("/")
            for group in (own, *own.parents):
                yield version, group
                if group == root:
                    break
