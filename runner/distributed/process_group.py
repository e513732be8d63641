"""Form the process group of a run and leave it, also when a rank fails: then all ranks leave together."""

from __future__ import annotations

import gc
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import synchronize

from procap.errors import UsageError, UserError
from runner.distributed.collectives import ProcessGroup
from runner.distributed.error_store import ERROR_WAIT_SECONDS, INTERRUPTED, ErrorStore
from runner.distributed.ranks import Ranks
from runner.stop_signals import StopRequest

TIMEOUT_SECONDS = 300.0


@contextmanager
def init_process_group(
    ranks: Ranks, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS
) -> Iterator[ProcessGroup]:
    """Form the process group of `ranks` at MASTER_ADDR:MASTER_PORT; enter it once in the life of a process.

    device: that of this rank. A GPU needs its index and becomes torch's current device.
    timeout_seconds: longest time that a rank waits for another.
    An error that leaves the block is shared with all ranks, whose next collective (or DDP) call then fails; there it
    becomes UserError "rank 2 of 4 failed: ...", or names the ranks that do not answer.
    Create DDP and DeepSpeed objects in a function that is called inside the block: a group that is still referenced
    when the interpreter ends can abort the process.
    Raises UserError if the ranks cannot connect.
    """
    if ranks.size == 1:
        yield ProcessGroup()
        return
    group, errors = _connect(ranks, device, timedelta(seconds=timeout_seconds))
    try:
        yield group
        group.barrier()
    except BaseException as error:
        # Launchers end the other ranks as soon as one has exited, so share the error first.
        with StopRequest():
            lost_another = _is_communication_error(error)
            errors.report("" if lost_another else _describe(error))
            _clear_frames(error)
            _destroy(group, device, failed=True)
        if lost_another or (isinstance(error, KeyboardInterrupt) and errors.is_from_another):
            failure = UserError(errors.explain(_torch_message(error)))
            # One process per machine prints it; the rank that failed prints its own error.
            failure.printed_elsewhere = ranks.local_rank > 0
            raise failure from None
        rank, first = errors.first or (ranks.rank, "")
        error.printed_elsewhere = rank != ranks.rank and first == _describe(error)  # type: ignore[attr-defined]
        raise
    else:
        _destroy(group, device)
    finally:
        errors.close()


def _connect(ranks: Ranks, device: torch.device, timeout: timedelta) -> tuple[ProcessGroup, ErrorStore]:
    # Otherwise torchrun keeps one store over restarts, where ranks find addresses of dead processes.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        raise UsageError(
            "torchrun --max-restarts would start ranks that find addresses of dead ones: give --rdzv-backend c10d or "
            "--standalone, and export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is called"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    gpu = device.type == "cuda"
    try:
        with _stderr_muted():
            store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))
        _check_hosts(store, ranks, device, address, timeout)
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timeout,
        )
        flag_group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(flag_group, dist.ProcessGroup)
        if gpu:
            # NCCL connects at the first message; send one here, so that connection errors are raised here.
            dist.all_reduce(torch.zeros(1, device=device))
        group = ProcessGroup(ranks, flag_group)
        # A store can outlive a restarted group, so the errors of each group have a prefix of their own.
        attempt = group.broadcast_object(uuid.uuid4().hex)
    except (RuntimeError, ValueError, OSError) as error:
        advice = "; if hosts have several networks, name the shared one by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        several = ranks.local_size < ranks.size
        raise UserError(
            f"rank {ranks.rank} of {ranks.size} could not connect to the others at {address}:{port} "
            f"in {timeout.total_seconds():g} seconds: {_torch_message(error)}{advice * several}"
        ) from None
    return group, ErrorStore(dist.PrefixStore(attempt, store), ranks)


@contextmanager
def _stderr_muted() -> Iterator[None]:
    """Keep C++ code from writing to standard error: torch prints a page of frames before it raises on a timeout."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _check_hosts(store: dist.Store, ranks: Ranks, device: torch.device, master: str, timeout: timedelta) -> None:
    """Exchange device types and addresses; the groups of ranks with different types of devices would never connect."""
    try:
        address = address_towards(master)
    except OSError:
        address = ""
    own = json.dumps([device.type, address]).encode()
    hosts = synchronize(store, own, ranks.rank, ranks.size, "hosts/", timeout.total_seconds())
    kinds, addresses = zip(*map(json.loads, hosts), strict=True)
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UsageError(f"rank 0 works on {kinds[0]} and rank {rank} on {kind}: give all of them --device cpu")
    if ranks.local_size < ranks.size:
        choose_network(addresses)


def choose_network(addresses: Sequence[str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface towards `addresses` of other machines, unless the user has set it.

    By default gloo takes the address that the machine's own name resolves to, which is 127.0.1.1 on many.
    """
    remote = next((one for one in addresses if one and not ipaddress.ip_address(one).is_loopback), None)
    if "GLOO_SOCKET_IFNAME" in os.environ or remote is None:
        return
    with suppress(OSError):
        own = address_towards(remote)
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == own for entry in entries):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`; sends nothing. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect((host, 9))
        return str(outward.getsockname()[0])


def _destroy(group: ProcessGroup, device: torch.device, *, failed: bool = False) -> None:
    """Destroy the groups; after a failure wait ERROR_WAIT_SECONDS at most, since a pending message can block it."""
    group.flag_group = None
    gc.collect()
    if not failed:
        dist.destroy_process_group()
        return

    def destroy() -> None:
        with suppress(RuntimeError, ValueError, AssertionError):
            if device.type == "cuda" and dist.group.WORLD is not None:
                dist.group.WORLD.abort()
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, daemon=True)
    thread.start()
    thread.join(ERROR_WAIT_SECONDS)


def _clear_frames(error: BaseException) -> None:
    """Release the locals of the error's stack frames, because DDP objects in them keep the process group alive."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _is_communication_error(error: BaseException) -> bool:
    """Whether a message to or from other ranks failed. Gloo raises plain RuntimeErrors for that."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl|monitoredBarrier", str(error), re.I) is not None
    )


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    known = isinstance(error, UserError)
    return str(error) if known else f"{type(error).__name__}: {_torch_message(error)}"


def _torch_message(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". This is typically")[0].strip()
