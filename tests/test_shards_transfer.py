"""Transfer: the same tuples in the same order, and nothing left open after an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shards.transfer import prefetch, to_device

CPU = torch.device("cpu")


def batches(count: int = 5) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for n in range(count):
        yield torch.full((4, 3, 2, 2), float(n)), torch.arange(4) + n, torch.tensor([n])


class Watched:
    """An iterator that notes how far it was taken and whether it was closed."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken, self.taken, self.closed = count, broken, 0, False

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor]:
        if self.taken == self.broken:
            raise OSError("no more of this")
        if self.taken == self.count:
            raise StopIteration
        self.taken += 1
        return (torch.tensor(self.taken),)

    def close(self) -> None:
        self.closed = True


def test_on_a_cpu_the_very_tensors_pass_one_tuple_at_a_time():
    source = list(batches())
    for given, passed in zip(source, to_device(source, CPU), strict=True):
        assert all(a is b for a, b in zip(given, passed, strict=True))
    watched = Watched(5)
    for n, _ in enumerate(to_device(watched, CPU), 1):
        assert watched.taken == n


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_prefetching_starts_that_many_items_ahead_and_keeps_their_order(ahead):
    started: list[int] = []
    for n, item in enumerate(prefetch(range(6), lambda item: (started.append(item), item)[1], ahead)):
        assert item == n and started == list(range(min(6, n + 1 + ahead)))
    assert n == 5


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_closes_the_source(ahead):
    watched = Watched(6, broken=4)
    with pytest.raises(OSError, match="no more"):
        list(prefetch(watched, lambda item: item, ahead))
    assert watched.closed


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("pinned", [False, True])
def test_on_a_gpu_the_same_values_arrive_while_the_device_is_busy(ahead, pinned):
    """Long kernels on the consumer's stream would show memory that is written again too early."""
    device, busy = torch.device("cuda"), torch.randn(2048, 2048, device="cuda")
    draws = torch.Generator().manual_seed(0)
    source = [(torch.randn(64, 3, 64, 64, generator=draws), torch.full((64,), n)) for n in range(40)]
    if pinned:
        source = [(images.pin_memory(), labels) for images, labels in source]
    sums = []
    for n, (images, labels) in enumerate(to_device(source, device, ahead, moved=(0,))):
        assert images.is_cuda and labels is source[n][1]
        for _ in range(5):
            busy = busy @ busy / 2048
        sums.append(images.double().sum(0))
        del images
    for (images, _), total in zip(source, sums, strict=True):
        assert torch.allclose(images.double().sum(0), total.cpu(), rtol=1e-12, atol=1e-9)


@pytest.mark.gpu
def test_on_a_gpu_batches_may_be_used_on_any_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for given, moved in zip(batches(20), to_device(batches(20), torch.device("cuda")), strict=True):
            assert torch.cuda.current_stream() == stream
            assert all(torch.equal(a, b.cpu()) for a, b in zip(given, moved, strict=True))
