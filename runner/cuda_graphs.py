"""Capture work as CUDA graphs and replay it: one launch on the host instead of thousands.

Captured work must run the same kernels on the same memory every time: it must not read numbers back to the host, and
shapes must not change.

Shapes: B images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Part = Callable[[], None]

WARMUP_RUNS = 3
"""Eager runs before a capture: libraries choose kernels and workspaces, torch compiles and allocates."""


class CudaGraphs:
    """Capture functions on a separate stream, with one memory pool for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run the block on the stream of capture and replay, synchronized with the caller's stream before and after."""
        callers = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also after an error: tensors that are freed while it propagates belong to this stream.
            callers.wait_stream(self._stream)

    def capture(self, part: Part) -> Part:
        """Return a replay of `part` over the same tensors. Raises RuntimeError if `part` cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        # Otherwise the graph could read cached casts, whose memory is released before the replay.
        torch.clear_autocast_cache()
        try:
            # Other threads may allocate pinned memory meanwhile, which the default mode ("global") forbids.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                part()
        except RuntimeError as error:
            # Ending a broken capture raises another error; raise the one that caused it.
            raise (error.__context__ if isinstance(error.__context__, RuntimeError) else error) from None
        finally:
            # Casts that were cached during the capture hold no values until the replay.
            torch.clear_autocast_cache()
        return graph.replay


def warm_up_and_capture(graphs: CudaGraphs, parts: Sequence[Part], what: str) -> list[Part]:
    """Run `parts` alternately and return their replays; none, with a warning, if they cannot be captured."""
    for _ in range(WARMUP_RUNS):
        for part in parts:
            part()
    try:
        return [graphs.capture(part) for part in parts]
    except RuntimeError as error:
        log.warning("%s not captured as CUDA graphs: %s", what, str(error).partition("\n")[0])
        return []


class GraphedFunction:
    """A function of one tensor, captured for the first shape it is called with; other shapes run eagerly."""

    def __init__(self, function: Callable[[Tensor], Tensor], graphs: CudaGraphs) -> None:
        self._function, self._graphs = function, graphs
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._replay: Part | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """Compute `function(images)`; the result is not overwritten by later calls."""
        if self._input is None:
            self._capture(images)
        if self._replay is None or self._input is None or images.shape != self._input.shape:
            return self._function(images)
        with self._graphs.side_stream():
            self._input.copy_(images)
            self._replay()
            assert self._output is not None
            # The next replay writes to the same memory.
            return self._output.clone()

    def _capture(self, images: Tensor) -> None:
        # Set before the capture: one that fails is not tried again, and all calls run eagerly.
        self._input = example = images.clone()

        def part() -> None:
            self._output = self._function(example)

        with self._graphs.side_stream():
            self._replay = next(iter(warm_up_and_capture(self._graphs, [part], "evaluation is")), None)
