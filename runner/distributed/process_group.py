"""Joining the processes of a run into one crew, and leaving it: cleanly, or all together when one of them fails."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from procap.errors import UsageError, UserError
from runner.distributed.collectives import ProcessGroup
from runner.distributed.error_store import INTERRUPTED, PATIENCE_SECONDS, ErrorStore
from runner.distributed.network import choose_network
from runner.distributed.ranks import ALONE, Ranks
from runner.stop_signals import StopRequest
from shards.errors import DataError

TIMEOUT_SECONDS = 300.0


@contextmanager
def joined(ranks: Ranks, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[ProcessGroup]:
    """The crew of `ranks`, met at MASTER_ADDR:MASTER_PORT; enter it once in the life of a process.

    device: of this rank; a GPU with its index, which becomes torch's current one. Tensors on the CPU go over gloo
    whatever it is, so control messages never touch a GPU. timeout_seconds: the longest that anybody waits for anybody.

    The block ends when all ranks have ended it. An error that leaves it is told to all others, whose next call of the
    crew (or of DDP) then fails; there they raise UserError "rank 2 of 4 failed: ..." with the first reason that was
    given, or name the ranks that are gone without a word. The rank's own error goes on as it is.
    What holds a DDP or DeepSpeed object must be gone when the block ends, so make it in a function that is called
    inside: a group that is still held when the interpreter ends can abort the process.

    Under `torchrun --max-restarts N`, torchrun itself (its environment, not that of the ranks it starts) needs
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and `--rdzv-backend c10d` or `--standalone`: it otherwise keeps one store over
    restarts, where ranks find addresses of processes that are dead.
    Raises UsageError where that is missed, UserError when the ranks do not meet.
    """
    if ranks.size == 1:
        yield ProcessGroup(ALONE)
        return
    crew, board = _join(ranks, device, timedelta(seconds=timeout_seconds))
    try:
        yield crew
        crew.meet()
    except BaseException as error:
        # Launchers end the other ranks as soon as the first is gone; that must not hide why.
        with StopRequest():
            lost = _lost_another(error)
            board.leave("" if lost else _reason(error))
            _drop_frames(error)
            _part(crew, device, failed=True)
        if lost or (isinstance(error, KeyboardInterrupt) and board.blames_another):
            verdict = UserError(board.verdict(_first_line(error)))
            # One process a machine says it to people; the rank that failed says it as well.
            verdict.spoken = ranks.local_rank > 0
            raise verdict from None
        told = board.reason is not None and board.reason[0] != ranks.rank and board.reason[1] == _reason(error)
        error.spoken = told  # type: ignore[attr-defined]
        raise
    else:
        _part(crew, device)
    finally:
        board.close()


def _join(ranks: Ranks, device: torch.device, timeout: timedelta) -> tuple[ProcessGroup, ErrorStore]:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        raise UsageError(
            "torchrun --max-restarts would start ranks that find addresses of dead ones: give --rdzv-backend c10d or "
            "--standalone, and export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is called"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    gpu = device.type == "cuda"
    try:
        here = _wait_for(address, int(port), ranks, timeout)
        with _without_frames():
            store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))
        _same_kind(store, ranks, device)
        choose_network(store, ranks, here)
        if gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timeout,
        )
        votes = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(votes, dist.ProcessGroup)
        if gpu:
            # NCCL connects with the first message: what is wrong there should be said here.
            dist.all_reduce(torch.zeros(1, device=device))
        crew = ProcessGroup(ranks, votes)
        # A store may outlive an attempt; what was said there must not be heard in this one.
        attempt = crew.share(uuid.uuid4().hex)
    except (RuntimeError, ValueError, OSError) as error:
        advice = "; if hosts have several networks, name the shared one by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        several = ranks.local_size < ranks.size
        raise UserError(
            f"rank {ranks.rank} of {ranks.size} did not get to the others at {address}:{port} "
            f"in {timeout.total_seconds():g} seconds: {_first_line(error)}{advice * several}"
        ) from None
    return crew, ErrorStore(dist.PrefixStore(attempt, store), ranks)


@contextmanager
def _without_frames() -> Iterator[None]:
    """Keep C++ from writing to standard error: when rank 0 dies now, torch prints a page of frames before it raises."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _wait_for(address: str, port: int, ranks: Ranks, timeout: timedelta) -> str:
    """Wait until rank 0 listens, and give this process's address on the way there, "" for rank 0.

    torch would wait as well, but writes a page of C++ frames when nobody comes.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not ranks.first:
        try:
            with socket.create_connection((address, port), timeout.total_seconds()) as connected:
                return str(connected.getsockname()[0])
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return ""


def _same_kind(store: dist.Store, ranks: Ranks, device: torch.device) -> None:
    """Raise UsageError where some ranks have a GPU and others have none: the groups of the two never connect."""
    store.set(f"device {ranks.rank}", device.type)
    kinds = [kind.decode() for kind in store.multi_get([f"device {rank}" for rank in range(ranks.size)])]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return
    store.set(f"read by {ranks.rank}", "")
    if ranks.first:
        # Rank 0 mostly keeps the store.
        with suppress(RuntimeError):
            store.wait([f"read by {rank}" for rank in range(ranks.size)], timedelta(seconds=PATIENCE_SECONDS))
    raise UsageError(f"rank 0 works on {kinds[0]} and rank {other} on {kinds[other]}: give all of them --device cpu")


def _part(crew: ProcessGroup, device: torch.device, *, failed: bool = False) -> None:
    """Leave the groups; after a failure for some seconds at most, since a message that is under way would block it."""
    crew.votes = None
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
    thread.join(PATIENCE_SECONDS)


def _drop_frames(error: BaseException) -> None:
    """Let go of what the functions held that the error came through: DDP objects, which keep the group alive."""
    chain: BaseException | None = error
    seen: list[BaseException] = []
    while chain is not None and chain not in seen:
        seen.append(chain)
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def _lost_another(error: BaseException) -> bool:
    """Whether an error says that a message to or from other ranks failed. Gloo has no type of its own for that."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl", str(error), re.IGNORECASE) is not None
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return str(error) if isinstance(error, UserError | DataError) else f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """What an error says, without the place in torch's source and its advice to look at other logs."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". This is typically")[0].strip()
