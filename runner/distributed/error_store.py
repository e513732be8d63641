"""How the ranks of a run learn why one of them leaves: a board in the store they met at, watched by a thread."""

from __future__ import annotations

import json
import threading

import torch.distributed as dist

from runner.distributed.ranks import Ranks

INTERRUPTED = "interrupted"
"""The reason of a rank that a signal stops on the spot."""

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 5.0
"""How long a rank that leaves waits for the reason, and for all others to have read it."""


class ErrorStore:
    """The first reason that a rank gave for leaving. A thread reads it as soon as it is there.

    That is needed because rank 0 mostly keeps the store: when rank 0 fails the store ends with it, so the others must
    have read the reason before. All dealings with the store are the thread's; a store that does not answer holds up
    nobody else.
    """

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks
        self._changed = threading.Condition()
        self._leaving = self._told = self._alarm = self._lost = self._closed = False
        self._own = ""
        self._reason: tuple[int, str] | None = None
        self._missing = set(range(ranks.size))
        self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
        self._thread.start()

    def leave(self, reason: str = "") -> None:
        """Tell all that this rank leaves, for `reason` where it has its own; some seconds at most.

        The reason that is found is the first that any rank gave.
        """
        with self._changed:
            self._leaving, self._own = True, reason
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lost or bool(self._reason and not self._missing), PATIENCE_SECONDS)

    @property
    def reason(self) -> tuple[int, str] | None:
        """The rank that gave its reason first, and the reason."""
        with self._changed:
            return self._reason

    @property
    def blames_another(self) -> bool:
        """Whether another rank gave its reason first, and did not just have to stop as well."""
        with self._changed:
            return self._reason is not None and self._reason[0] != self._ranks.rank and self._reason[1] != INTERRUPTED

    def verdict(self, symptom: str) -> str:
        """What people are told by a rank that saw only the `symptom` of another's trouble; call `leave` before."""
        size = self._ranks.size
        with self._changed:
            if self._reason:
                return f"rank {self._reason[0]} of {size} failed: {self._reason[1]}"
            # Rank 0 may have been here and left, like this one, because of another.
            silent = 0 in self._missing and (self._lost or not self._told)
            gone = ["0"] if silent else [str(rank) for rank in sorted(self._missing)]
        if not gone:
            return f"the {size} ranks lost each other, though all of them answer: {symptom}"
        who = f"rank {gone[0]} of {size} is" if len(gone) == 1 else f"ranks {', '.join(gone)} of {size} are"
        return f"{who} gone without a word: killed, out of memory, stuck, or the machine is down ({symptom})"

    def close(self) -> None:
        """End the thread, unless it waits for a store that does not answer; it then ends with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _watch(self) -> None:
        try:
            while not self._closed:
                self._look()
                with self._changed:
                    self._changed.notify_all()
                    if not self._closed and self._told == self._leaving:
                        self._changed.wait(POLL_SECONDS)
        except RuntimeError:
            with self._changed:
                self._lost = True
                self._changed.notify_all()

    def _look(self) -> None:
        store = self._store
        if self._leaving and not self._told:
            if self._own:
                store.compare_set("reason", "", json.dumps([self._ranks.rank, self._own]))
            store.set("alarm", "")
            self._told = True
        if not self._alarm and not store.check(["alarm"]):
            return
        if self._reason is None and store.check(["reason"]):
            rank, reason = json.loads(store.get("reason"))
            self._reason = rank, reason
        if not self._alarm:
            # Said after the reason was looked for: who is here knows it, and nobody needs to keep the store for him.
            store.set(f"here {self._ranks.rank}", "")
            self._alarm = True
        self._missing = {rank for rank in self._missing if not store.check([f"here {rank}"])}
