"""Following a job until its end: its log as it is written, over connections that may break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from cluster.ray_jobs import RayCluster, RayJob, Unreachable
from procap.errors import UserError

PATIENCE_SECONDS = 600.0
"""How long an unreachable cluster is waited for."""

_LOOK_SECONDS = 10.0
_TICK_SECONDS = 0.25
_TAIL_SECONDS = 5.0
"""How long the rest of the log of a job that has ended may take."""

Write = Callable[[str], None]


class Follower:
    """One job, its log given to `write` in order and exactly once."""

    def __init__(
        self, cluster: RayCluster, name: str, write: Write, *, tell: Write, check: Callable[[], None] = lambda: None
    ) -> None:
        """tell: gets words about the connection, a line each. check: is called all the time, may end it by raising."""
        self.cluster, self.name = cluster, name
        self._write, self._tell, self._check = write, tell, check
        self._written = 0

    def to_the_end(self, patience: float = PATIENCE_SECONDS) -> RayJob:
        """The job as it ended. Raises `Unreachable` where the cluster has not answered for `patience` seconds."""
        lost: float | None = None
        while True:
            try:
                job = self.cluster.job(self.name)
                if job.over:
                    self._finish_log()
                    return job
                lost = None
                asyncio.run(self._tail())
            except Unreachable as error:
                if lost is None:
                    lost = time.monotonic()
                    self._tell(f"lost the connection to {self.cluster.dashboard.url}; trying again, the job goes on")
                elif time.monotonic() - lost > patience:
                    again = f"procap jobs follow {self.name}{self.cluster.flag}"
                    raise Unreachable(f"{error}; the job may be running: {again}") from error
                self._rest(1.0)

    async def _tail(self) -> None:
        """Read one connection until it or the job ends."""
        import aiohttp

        reading = asyncio.create_task(self._read())
        looked, ended = time.monotonic(), 0.0
        try:
            while not reading.done() and not (ended and time.monotonic() - ended > _TAIL_SECONDS):
                await asyncio.wait({reading}, timeout=_TICK_SECONDS)
                self._check()
                # A connection through a tunnel can be dead and look merely quiet.
                if not ended and time.monotonic() - looked > _LOOK_SECONDS:
                    job = await asyncio.to_thread(self.cluster.job, self.name)
                    looked = time.monotonic()
                    ended = looked if job.over else 0.0
        finally:
            reading.cancel()
            (broken,) = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(broken, OSError | RuntimeError | aiohttp.ClientError):
            # Not to ask again at once where only this kind of connection fails.
            self._rest(1.0)
        elif isinstance(broken, Exception):
            raise broken

    async def _read(self) -> None:
        seen = 0
        async for text in self.cluster.client.tail_job_logs(self.name):
            # A new connection tells the log from its beginning.
            self._write_new(text[max(self._written - seen, 0) :])
            seen += len(text)

    def _finish_log(self) -> None:
        """What no connection has told. A log is kept by the node that ran the job, which may be gone."""
        until = time.monotonic() + _TAIL_SECONDS
        while True:
            with suppress(RuntimeError):
                self._write_new(self.cluster.log(self.name)[self._written :])
                return
            if time.monotonic() > until:
                return
            self._rest(1.0)

    def _write_new(self, text: str) -> None:
        if text:
            self._written += len(text)
            self._write(text)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check()
            time.sleep(min(_TICK_SECONDS, seconds))


def stopped(cluster: RayCluster, name: str, *, patience: float, check: Callable[[], None]) -> RayJob:
    """The job when it has ended after it was asked to. Raises UserError where it has not within `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        late = time.monotonic() > until
        try:
            job = cluster.job(name)
        except Unreachable:
            if late:
                raise
        else:
            if job.over:
                return job
            if late:
                raise UserError(f"job {name} has not ended within {patience:.0f} s; see `procap jobs{cluster.flag}`")
        check()
        time.sleep(_TICK_SECONDS)
