"""Describe the command and the machine of a study."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner.provenance import describe_environment

if TYPE_CHECKING:
    import torch


def describe_run(study: str, argv: Sequence[str] | None, device: torch.device | None = None) -> dict[str, Any]:
    """Return the command of a study, with `argv` or this process's arguments, its machine, versions and load."""
    words = ["python", "-m", f"tools.{study}", *(sys.argv[1:] if argv is None else argv)]
    load = round(os.getloadavg()[0], 2)
    return {"command": shlex.join(words), "environment": describe_environment(device), "load_average": load}


def describe_machine(record: dict[str, Any]) -> str:
    """Format the machine, its load and the version of torch in one line."""
    machine = record["environment"]
    cpu = machine["cpu"]
    name = machine.get("gpu") or f"{cpu['name']}, {cpu['cores']} cores"
    return f"{name}, torch {machine['packages']['torch']}, load average {record['load_average']}"
