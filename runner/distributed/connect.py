"""Form the process group of a run and leave it, also when a rank fails."""

from __future__ import annotations

import gc
import os
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from procap.errors import UserError
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import Ranks

TIMEOUT_SECONDS = 300.0
LEAVE_SECONDS = 5.0
"""How long leaving a group may take after a failure: a pending message can block it."""
LOST = "lost the connection to another rank"


@contextmanager
def init_process_group(
    ranks: Ranks, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[ProcessGroup]:
    """Form the process group of `ranks` at MASTER_ADDR:MASTER_PORT; enter it once in the life of a process.

    device: that of this rank. A GPU needs its index and becomes torch's current device.
    timeout_seconds: longest time that a rank waits for another.
    A rank that fails closes its connections, so that the next collective of every other rank raises UserError; the
    launcher names the first failure. Create DDP and DeepSpeed objects in a function that is called inside the block: a
    group that is still referenced when the interpreter ends can abort the process.
    Raises UserError if the ranks cannot connect.
    """
    if ranks.size == 1:
        yield ProcessGroup()
        return
    group = _connect(ranks, device, timedelta(seconds=timeout_seconds))
    try:
        yield group
        # A rank that left earlier would close connections that the last collective of another rank still uses.
        group.barrier()
    except BaseException as error:
        # DDP objects in the locals of the stack frames of the error and of its causes would keep the connections open.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        _close(group, device)
        # Gloo raises plain RuntimeErrors.
        of_gloo = isinstance(error, RuntimeError) and re.search("gloo|nccl|monitoredBarrier", str(error), re.I)
        if isinstance(error, dist.DistError) or of_gloo:
            reason = _first_line(error)
            raise UserError(f"rank {ranks.rank} of {ranks.size} {LOST}, which failed or hangs: {reason}") from None
        raise
    # Objects in reference cycles would still hold the groups.
    group.flag_group = None
    gc.collect()
    dist.destroy_process_group()


def _connect(ranks: Ranks, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """Connect to the other ranks, over gloo for the CPU and for flags, over NCCL for a GPU."""
    on_gpu = device.type == "cuda"
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
        flag_group = dist.new_group(backend="gloo", timeout=timeout)
        if on_gpu:
            # NCCL connects at the first message; send one here, so that connection errors are raised here.
            dist.all_reduce(torch.zeros(1, device=device))
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {ranks.rank} of {ranks.size} could not connect to the others at {address} in "
            f"{timeout.total_seconds():g} seconds: {_first_line(error)} (on hosts with several networks, set "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the shared one)"
        ) from None
    assert isinstance(flag_group, dist.ProcessGroup)
    return ProcessGroup(ranks, flag_group)


def _close(group: ProcessGroup, device: torch.device) -> None:
    """Close the connections after a failure, for at most LEAVE_SECONDS."""
    group.flag_group = None
    gc.collect()

    def destroy() -> None:
        with suppress(RuntimeError, ValueError, AssertionError):
            if device.type == "cuda" and dist.group.WORLD is not None:
                # Ends the messages on a GPU, for which the next line would wait.
                dist.group.WORLD.abort()
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error of torch without its source position."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". This is typically")[0].strip()
