"""Where data and results are, as every machine resolves it for itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from runner.config import RuntimeConfig
from runner.remote_results import results_root
from shards.home import cache_home, data_root
from shards.urls import is_url


@dataclass(frozen=True)
class StoragePaths:
    """What was typed for --data and --results, and the rest of a workplace.

    data: a folder, a URL, or empty for the machine's own default. results: a folder that all machines see, or a URL.
    """

    data: str
    results: str
    rest: RuntimeConfig

    @classmethod
    def shared(cls, data: str, results: str, rest: RuntimeConfig) -> StoragePaths:
        """Places that mean the same on all machines: relative folders are those of this one's working folder.

        What $PROCAP_DATA says here counts like a typed --data.
        """
        return cls(absolute(data or os.environ.get("PROCAP_DATA", "")), absolute(results), rest)

    def here(self) -> RuntimeConfig:
        """The workplace on this machine, whose cache and mirrors are its own."""
        results, store = results_root(self.results, cache_home())
        return replace(self.rest, data=data_root(self.data), results=results, store=store)


def absolute(given: str) -> str:
    """A folder as all machines have to name it; URLs and nothing stay as they are."""
    # Links are kept: the same name may lead to another mount point on another machine.
    return given if not given or is_url(given) else os.path.abspath(Path(given).expanduser())
