"""Resolve the folders and URLs of data and results on each machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from runner.config import RuntimeConfig
from runner.remote_results import results_root
from shards.default_paths import cache_home, data_root
from shards.urls import is_url


@dataclass(frozen=True)
class StoragePaths:
    """The values of --data and --results as given, and the rest of a `RuntimeConfig`.

    data: a folder, a URL, or empty for the machine's own default. results: a folder that all machines see, or a URL.
    """

    data: str
    results: str
    runtime: RuntimeConfig

    @classmethod
    def with_absolute_paths(cls, data: str, results: str, runtime: RuntimeConfig) -> StoragePaths:
        """Return paths that mean the same on all machines: relative ones become absolute on the driver.

        $PROCAP_DATA of the driver has the same effect as --data.
        """
        return cls(absolute(data or os.environ.get("PROCAP_DATA", "")), absolute(results), runtime)

    def with_device(self, device: str) -> StoragePaths:
        return replace(self, runtime=replace(self.runtime, device=device))

    def local_runtime(self) -> RuntimeConfig:
        """Return the runtime for this machine, with its own cache and mirrors."""
        results, store = results_root(self.results, cache_home())
        return replace(self.runtime, data=data_root(self.data), results=results, store=store)


def absolute(given: str) -> str:
    """Make a folder absolute; URLs and the empty string stay as they are."""
    # Links are not resolved: the same name may lead to another mount point on another machine.
    return given if not given or is_url(given) else os.path.abspath(Path(given).expanduser())
