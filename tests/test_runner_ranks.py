"""Processes that train together get one process's numbers, decide alike, and end together with the reason."""

import os
import random
import signal
import time
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.nn.functional as F
from rank_processes import Processes, run_ranks
from torch import Tensor, nn

from procap.errors import UsageError, UserError
from procap.parallel import ClassShares
from runner.distributed.collectives import Flags, ProcessGroup
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import Ranks, ranks_from_environment

CPU = torch.device("cpu")
BATCH = 12


class Matcher(nn.Module):
    """Images against classes with what a prompt method has: both towers, a scale behind the gather, a penalty.

    Shapes: B images of this rank, C classes.
    """

    def __init__(self, group: ProcessGroup, classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.group = group
        self.image = nn.Parameter(torch.randn(7, 5, generator=generator, dtype=dtype))
        self.text = nn.Parameter(torch.randn(classes, 6, generator=generator, dtype=dtype))
        self.shared = nn.Parameter(torch.randn(6, 5, generator=generator, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=dtype))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        shares = ClassShares(len(self.text), self.group)
        own, counts = slice(*shares.bounds), shares.counts
        image = self.group.gather_interleaved(images @ self.image)
        labels = self.group.gather_interleaved(labels)
        text = self.group.gather_uneven(torch.tanh(self.text[own] @ self.shared), counts)
        logits = F.normalize(image) @ F.normalize(text).t() * self.scale.exp()
        return F.cross_entropy(logits, labels) + 0.1 * self.shared.square().sum()


def batch(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(BATCH, 7, generator=generator, dtype=dtype)
    return images, torch.randint(classes, (BATCH,), generator=generator)


def loss_and_gradients(group: ProcessGroup, classes: int, dtype: torch.dtype, bf16: bool) -> tuple[float, list[Tensor]]:
    """Of the global batch, of which this rank has every W-th image."""
    images, labels = batch(classes, dtype)
    model = Matcher(group, classes, dtype)
    ddp: nn.Module = model
    if group.ranks.size > 1:
        ddp = nn.parallel.DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    mine = slice(group.ranks.rank, None, group.ranks.size)
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        loss = ddp(images[mine], labels[mine])
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same_numbers(group: ProcessGroup) -> None:
    for classes, dtype, bf16, tolerance in (
        (5, torch.float64, False, 1e-14),
        (3, torch.float64, False, 1e-14),
        (5, torch.float32, False, 1e-6),
        (5, torch.float32, True, 2e-2),
    ):
        want, gradients = loss_and_gradients(ProcessGroup(), classes, dtype, bf16)
        loss, ours = loss_and_gradients(group, classes, dtype, bf16)
        assert loss == pytest.approx(want, abs=tolerance)
        assert set(group.all_gather_object(loss)) == {loss} and len(ours) == len(gradients) == 4
        for own, one in zip(ours, gradients, strict=True):
            assert (own - one).abs().max() <= tolerance, (classes, dtype, bf16, own, one)


def same_rows(group: ProcessGroup) -> None:
    rank, size = group.ranks.rank, group.ranks.size
    dealt = torch.arange(3 * size * 2).view(3 * size, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = dealt[rank::size].to(dtype)
        assert torch.equal(group.gather_interleaved(rows), dealt.to(dtype))
        expected = torch.cat([dealt[r::size] for r in range(size)]).to(dtype)
        assert torch.equal(group.gather(rows), expected)
    for items in (1, size - 1, size, 2 * size + 1):
        shares, every = ClassShares(items, group), torch.randn(items, 2)
        every = torch.tensor(group.broadcast_object(every.tolist()))
        assert torch.equal(group.gather_uneven(every[slice(*shares.bounds)], shares.counts), every)


def same_objects(group: ProcessGroup) -> None:
    rank, size = group.ranks.rank, group.ranks.size
    sent = [{"rank": r, "text": "ü" * 50 * r, "pi": 0.1 + 0.2, "none": None} for r in range(size)]
    assert group.all_gather_object(sent[rank]) == sent
    assert group.broadcast_object(["from", rank]) == ["from", 0]


def same_decisions(group: ProcessGroup) -> None:
    rank, size = group.ranks.rank, group.ranks.size
    wishes = [Flags()] * 7
    if rank == 0:
        wishes[1] = Flags(save=True)
        wishes[3] = Flags(signum=2)
    if rank == size - 1:
        wishes[3] = wishes[6] = Flags(signum=15)
    decisions = []
    for step, wish in enumerate(wishes):
        time.sleep(random.Random(10 * step + rank).uniform(0, 0.02))
        decisions.append(group.exchange_flags(save=wish.save, signum=wish.signum))
        group.gather(torch.ones(2, 2))
    go, stop = Flags(), Flags(signum=15)
    assert decisions == [go, Flags(save=True), go, stop, go, go, stop]


def work_together() -> None:
    with init_process_group(ranks_from_environment(), CPU) as group:
        for check in (same_numbers, same_rows, same_objects, same_decisions):
            check(group)
        print("done", flush=True)


@pytest.mark.parametrize("size", (2, 4))
def test_several_ranks_compute_and_decide_as_one(size):
    for end in run_ranks(size, work_together):
        assert (end.code, end.out, end.err) == (0, "done\n", "")


def threads_of_groups() -> list[str]:
    """Of groups that are still held somewhere: they can abort an interpreter that ends."""
    deadline = time.monotonic() + 600
    # The system strikes out a thread a moment after it was waited for.
    while (found := list(names_of_threads())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def names_of_threads():
    tasks = Path("/proc/self/task")
    for task in list(tasks.iterdir()) if tasks.exists() else []:
        with suppress(FileNotFoundError, ProcessLookupError):
            if "gloo" in (name := (task / "comm").read_text()):
                yield name


def train_for_ever(group, trouble, unlucky, silent):
    """Steps as a run takes them, until `trouble` comes to one rank, which may leave it silent."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    pids = group.all_gather_object(os.getpid())
    for step in range(100_000):
        group.exchange_flags()
        if step == 5:
            print("training", flush=True)
            if group.ranks.rank == unlucky:
                trouble()
            if silent:
                wait_until_still(pids[unlucky])
                for each in (torch.distributed.group.WORLD, group.flag_group):
                    each._get_backend(CPU)._set_default_timeout(timedelta(seconds=1))
        ddp(torch.ones(2, 4)).sum().backward()


def wait_until_still(pid: int) -> None:
    """Until a process is stopped or gone."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.01)


def fail(kind: str, unlucky: int) -> None:
    silent = kind in ("kill", "stop")

    def trouble() -> None:
        if kind == "error":
            raise UserError("no space left on /results")
        if kind == "bug":
            raise ZeroDivisionError("by zero")
        if kind == "interrupt":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    try:
        with init_process_group(ranks_from_environment(), CPU) as group:
            train_for_ever(group, trouble, unlucky, silent)
    finally:
        # Of a group that a process hangs in, no thread comes back.
        if not silent:
            print(threads_of_groups(), flush=True)


def finish() -> None:
    """A short run that ends well, with all that makes a process abort when it is not let go of."""

    def train(group: ProcessGroup) -> None:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for _ in range(20):
            group.exchange_flags()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    with init_process_group(ranks_from_environment(), CPU) as group:
        train(group)
    assert not threads_of_groups()


def test_a_successful_run_prints_nothing_and_exits_with_zero():
    with ExitStack() as stack:
        # An interpreter's end takes a second: not all need to be seen to it, since no threads are left that disturb it.
        for processes in [stack.enter_context(Processes(2, finish, to_the_end=again < 1)) for again in range(3)]:
            assert [(end.code, end.err) for end in processes.wait()] == [(0, "")] * 2


def test_all_ranks_end_when_one_fails_and_only_that_one_has_the_reason():
    messages = {"error": "procap: no space left on /results", "bug": "ZeroDivisionError: by zero"}
    messages["interrupt"] = "KeyboardInterrupt"
    cases = [("error", 2, 4), ("error", 0, 4), ("bug", 1, 2), ("interrupt", 1, 2)]
    with ExitStack() as stack:
        started = (Processes(size, fail, kind, who, to_the_end=kind == "bug") for kind, who, size in cases)
        groups = [stack.enter_context(processes) for processes in started]
        for (kind, unlucky, size), processes in zip(cases, groups, strict=True):
            for rank, end in enumerate(processes.wait()):
                assert end.code == 1 and end.out == "training\n[]\n" and "terminate" not in end.err
                if rank == unlucky:
                    assert end.err.splitlines()[-1] == messages[kind]
                else:
                    assert end.err.startswith(f"procap: rank {rank} of {size} lost the connection to another rank")
                    assert end.err.count("\n") == 1


def test_a_rank_that_is_killed_or_stuck_ends_all_others_with_a_line():
    with ExitStack() as stack:
        cases = [("kill", 1, 4), ("kill", 0, 2), ("stop", 1, 2)]
        groups = [stack.enter_context(Processes(size, fail, kind, who)) for kind, who, size in cases]
        for (_, unlucky, size), processes in zip(cases, groups, strict=True):
            for rank in set(range(size)) - {unlucky}:
                code, err = processes.code(rank), processes.output(rank, "err")
                assert code == 1 and err.startswith(f"procap: rank {rank} of {size} lost the connection"), err
                assert err.count("\n") == 1, err


def come_alone(timeout: float, absent: int) -> None:
    if ranks_from_environment().rank == absent:
        signal.pause()
    with init_process_group(ranks_from_environment(), CPU, timeout):
        raise AssertionError("somebody else came")


def test_ranks_that_do_not_connect_name_the_address():
    with Processes(2, come_alone, 1, 0) as apart, Processes(2, come_alone, 1, 1) as other:
        for processes, rank in ((apart, 1), (other, 0)):
            code, err = processes.code(rank), processes.output(rank, "err")
            assert code == 1, err
            last = err.splitlines()[-1]
            assert last.startswith(f"procap: rank {rank} of 2 could not connect to the others at 127.0.0.1:"), err
            assert "in 1 seconds" in last, err


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(("variables", "ranks"), [
    ({}, Ranks()), (TORCHRUN, Ranks(5, 8, 1, 4)),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, Ranks(1, 2, 1, 2)),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Ranks()),
])  # fmt: skip
def test_ranks_are_read_from_the_environment(variables, ranks):
    with patch.dict(os.environ, variables, clear=True):
        assert ranks_from_environment() == ranks


@pytest.mark.parametrize(("variables", "words"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, LOCAL_WORLD_SIZE one is missing"),
    (TORCHRUN | {"RANK": ""}, "one is missing or wrong"),
    (TORCHRUN | {"WORLD_SIZE": "two"}, "one is missing or wrong .*'two'"),
])  # fmt: skip
def test_contradictory_environment_variables_are_refused_in_one_line(variables, words):
    with patch.dict(os.environ, variables, clear=True), pytest.raises(UsageError, match=words) as refused:
        ranks_from_environment()
    assert "\n" not in str(refused.value)
