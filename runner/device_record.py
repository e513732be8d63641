"""Read and write what `procap check device` has found on a GPU: which accelerations are equal and faster there.

A record is of one GPU model, driver, torch and program version; a change of any of them makes it void.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from procap.errors import UserError
from runner.config import FrozenModel
from runner.devices import gpu_driver
from runner.provenance import cpu_name, program_version
from runner.results import read_document, write_json
from shards.default_paths import cache_home

if TYPE_CHECKING:
    import torch

LEAST_GAIN = 1.05
"""Speed-up over the plain path from which `auto` uses an acceleration."""


class DeviceIdentity(FrozenModel):
    """What a record is valid for. driver: of the GPU; empty on a CPU."""

    device: str
    driver: str
    torch: str
    program: str


class PartResult(FrozenModel):
    """The outcome of one part of the check. values: what it measured; reason: why it failed, or was skipped."""

    status: Literal["passed", "failed", "skipped"]
    reason: str = ""
    seconds: float = Field(ge=0)
    values: Mapping[str, Any] = {}


class DeviceRecord(FrozenModel):
    """The outcome of a check. gains: the plain path's time divided by that with each acceleration, all else equal."""

    identity: DeviceIdentity
    written: str
    parts: Mapping[str, PartResult]
    gains: Mapping[str, float]

    @property
    def faster(self) -> list[str]:
        """The accelerations whose part has passed and that gain enough for `auto` to use them."""
        passed = {name for name, part in self.parts.items() if part.status == "passed"}
        return [name for name, gain in self.gains.items() if name in passed and gain >= LEAST_GAIN]

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the record."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def identify(device: torch.device) -> DeviceIdentity:
    """Identify a device with the software that drives it."""
    import torch

    on_gpu = device.type == "cuda"
    return DeviceIdentity(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        driver=gpu_driver() if on_gpu else "",
        torch=torch.__version__,
        program=program_version(),
    )


def record_file(identity: DeviceIdentity) -> Path:
    """Return the file of a device's record, in the cache folder."""
    words = (identity.device, identity.driver, identity.torch, identity.program)
    return cache_home() / "devices" / f"{'-'.join(re.sub('[^A-Za-z0-9.+]+', '_', word) for word in words if word)}.json"


def write_record(record: DeviceRecord) -> Path:
    """Write a record to where `read_record` finds it; returns the file."""
    file = record_file(record.identity)
    write_json(file, record)
    return file


def read_record(device: torch.device) -> DeviceRecord | None:
    """Read the record of `device` as it is now; None if there is none, or one that cannot be read."""
    identity = identify(device)
    with suppress(UserError, OSError):
        record = read_document(record_file(identity), DeviceRecord)
        return record if record is not None and record.identity == identity else None
    return None
