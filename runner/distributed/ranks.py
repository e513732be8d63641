"""Read rank and world size of this process from the environment that a launcher sets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from procap.errors import UsageError


@dataclass(frozen=True)
class Ranks:
    """Process `rank` of `size`, and `local_rank` of the `local_size` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def environment(self, address: str, port: int) -> dict[str, str]:
        """Return the variables that torchrun would set for this process, with rank 0 at `address`:`port`."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_size, "MASTER_PORT": port}
        return {"MASTER_ADDR": address, **{name: str(number) for name, number in numbers.items()}}


def ranks_from_environment() -> Ranks:
    """Read what torchrun or the deepspeed launcher has set; one process if nothing is set."""
    environ = os.environ
    # The second is the name that DeepSpeed's launcher uses.
    local_size = "LOCAL_SIZE" if "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ else "LOCAL_WORLD_SIZE"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
    if not any(environ.get(name) for name in names):
        return Ranks()
    try:
        return Ranks(*(int(environ[name]) for name in names))
    except (KeyError, ValueError) as error:
        remedy = "start with torchrun, or unset them all for one process"
        raise UsageError(f"of the variables {', '.join(names)} one is missing or wrong ({error}): {remedy}") from None
