"""CUDA graphs on a CPU: a capture records operations on a tape, and a replay runs them again over the same memory.

A replay runs no Python of the captured function, so what Python computed is fixed, as on a GPU. Operations that a
capture refuses raise, also under torch's check for synchronizations, and so does a replay that reads freed memory.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.cuda.graphs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from runner.cuda_graphs import CaptureTape, check_capturable


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class OutsideTensor:
    """A tensor that a graph reads and does not own: kept by its memory alone, which may be freed."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._form = tensor.storage_offset(), tensor.size(), tensor.stride()

    def get(self) -> Tensor:
        if self._memory.expired():
            raise ReferenceError(f"a replay reads memory {tuple(self._form[1])} that was freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


class RecordingTape(CaptureTape):
    """Records the operations of a capture, on tensors of the graph's own memory and of the outside."""

    def __init__(self, owned: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._owned = owned
        self._records: list[tuple[Any, list[Any], Any, list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, form = tree_flatten((args, kwargs or {}))
        inputs = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        output = super().__torch_dispatch__(operation, types, args, kwargs)
        made = [(i, each) for i, each in enumerate(tree_leaves(output)) if isinstance(each, Tensor)]
        fresh = [(i, each) for i, each in made if storage_of(each) not in inputs]
        for _, each in fresh:
            self._owned[storage_of(each)] = each.untyped_storage()
        writes = any(each.alias_info and each.alias_info.is_write for each in operation._schema.arguments)
        # A view of other memory is no work.
        if fresh or writes or not made:
            self._records.append((operation, [self._keep(leaf) for leaf in leaves], form, fresh))
        return output

    def _keep(self, leaf: Any) -> Any:
        is_outside = isinstance(leaf, Tensor) and storage_of(leaf) not in self._owned
        return OutsideTensor(leaf) if is_outside else leaf

    @torch.no_grad()
    def replay(self) -> None:
        for operation, leaves, form, fresh in self._records:
            args, kwargs = tree_unflatten([x.get() if isinstance(x, OutsideTensor) else x for x in leaves], form)
            with torch._C._AutoDispatchBelowAutograd():
                outputs = tree_leaves(operation(*args, **kwargs))
            for i, target in fresh:
                target.copy_(outputs[i])


class WaitGuard(CaptureTape):
    """What `set_sync_debug_mode("error")` does on a GPU."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_capturable(operation, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        return operation(*args, **(kwargs or {}))


class EmulatedGraphs:
    """Counts what the emulation did. refuses: whether captures fail."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.refuses = False
        self._guard: WaitGuard | None = None

    def set_sync_debug_mode(self, mode: str) -> None:
        if self._guard:
            self._guard.__exit__(None, None, None)
        self._guard = WaitGuard() if mode == "error" else None
        if self._guard:
            self._guard.__enter__()


@pytest.fixture
def emulated_graphs(monkeypatch) -> EmulatedGraphs:
    """Let `torch.cuda.make_graphed_callables`, `CUDAGraph` and `graph` work on the CPU."""
    emulation = EmulatedGraphs()
    memory: dict[int, torch.UntypedStorage] = {}

    class Graph:
        def replay(self) -> None:
            emulation.replayed += 1
            self.tape.replay()

    @contextmanager
    def capture(graph, *_, **more):
        if emulation.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        emulation.captured += 1
        graph.tape = RecordingTape(memory)
        with graph.tape:
            yield

    class Stream:
        def wait_stream(self, other) -> None:
            pass

    replacements = {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda *_: None,
        "Stream": lambda *_, **more: Stream(),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: Stream(),
        "get_sync_debug_mode": lambda: "default",
        "set_sync_debug_mode": emulation.set_sync_debug_mode,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.graphs, name):
            monkeypatch.setattr(torch.cuda.graphs, name, value)
    return emulation
