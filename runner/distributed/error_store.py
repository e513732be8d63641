"""Share the first error among all ranks through the c10d store of the process group."""

from __future__ import annotations

import json
import threading

import torch.distributed as dist

from runner.distributed.ranks import Ranks

INTERRUPTED = "interrupted"
"""The error of a rank that a signal ended immediately."""

POLL_SECONDS = 0.25
ERROR_WAIT_SECONDS = 5.0
"""How long a rank that fails waits for the first error, and for all other ranks to have read it."""


class ErrorStore:
    """The first error of a process group.

    A thread polls the store, which is in the process of rank 0: when rank 0 fails, the store ends with it, so the other
    ranks must have read its error before. A store that does not answer blocks only this thread.
    """

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self.first: tuple[int, str] | None = None
        """The rank that reported its error first, and the error."""
        self._store, self._ranks = store, ranks
        self._changed = threading.Condition()
        self._own: str | None = None
        self._silent = set(range(ranks.size))
        self._published = self._lost = self._closed = False
        self._thread = threading.Thread(target=self._poll, name="error store", daemon=True)
        self._thread.start()

    def report(self, error: str = "") -> None:
        """Announce that this rank fails, with "" if it only lost another rank; wait until all know the first error."""
        with self._changed:
            self._own = error
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lost or bool(self.first and not self._silent), ERROR_WAIT_SECONDS)

    @property
    def is_from_another(self) -> bool:
        """Whether another rank reported an error first, and that error is not just an interrupt."""
        return self.first is not None and self.first[0] != self._ranks.rank and self.first[1] != INTERRUPTED

    def explain(self, symptom: str) -> str:
        """Format the message of a rank that saw the `symptom` of another rank's failure; call `report` before."""
        size = self._ranks.size
        with self._changed:
            if self.first:
                return f"rank {self.first[0]} of {size} failed: {self.first[1]}"
            # Without the store, which is in rank 0's process, the state of the other ranks is unknown.
            no_store = 0 in self._silent and (self._lost or not self._published)
            missing = [0] if no_store else sorted(self._silent)
        if not missing:
            return f"the {size} ranks lost their connections, but all of them still run: {symptom}"
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"no answer from {who} of {size}: killed, out of memory, stuck, or the machine is down ({symptom})"

    def close(self) -> None:
        """Stop the thread. One that is blocked in a store that does not answer ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _poll(self) -> None:
        try:
            while not self._closed:
                if self._own is not None and not self._published:
                    if self._own:
                        self._store.compare_set("error", "", json.dumps([self._ranks.rank, self._own]))
                    self._store.set("failed", "")
                    self._published = True
                if self._published or self._store.check(["failed"]):
                    if self.first is None and self._store.check(["error"]):
                        rank, error = json.loads(self._store.get("error"))
                        self.first = rank, error
                    # Set after reading the error: it means that this rank does not need the store any more.
                    self._store.set(f"read by {self._ranks.rank}", "")
                    self._silent = {rank for rank in self._silent if not self._store.check([f"read by {rank}"])}
                with self._changed:
                    self._changed.notify_all()
                    if not self._closed and self._published == (self._own is not None):
                        self._changed.wait(POLL_SECONDS)
        except RuntimeError:
            with self._changed:
                self._lost = True
                self._changed.notify_all()
