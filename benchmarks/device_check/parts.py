"""Run the parts of a check, each in a process with a time limit, so that a crash or a hang fails that part alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.device_check.case import DeviceCase, Skipped
from benchmarks.device_check.machine import check_processes, collect_facts
from benchmarks.device_check.numbers import (
    check_attention,
    check_cudnn,
    check_deterministic,
    check_plain,
    check_repeatability,
)
from benchmarks.device_check.paths import check_compile, check_fused, check_graphs, check_images
from benchmarks.device_check.speed import measure_speed
from runner.device_record import PartResult
from runner.failures import describe_failure
from runner.results import write_json


@dataclass(frozen=True)
class Part:
    """One part of the check. seconds: after which it counts as hanging; most of it is for compiling kernels."""

    run: Callable[[DeviceCase], dict[str, Any]]
    seconds: float


PARTS = {
    "facts": Part(collect_facts, 60),
    "plain": Part(check_plain, 120),
    "attention": Part(check_attention, 120),
    "cudnn": Part(check_cudnn, 120),
    "images": Part(check_images, 120),
    "graphs": Part(check_graphs, 180),
    "fused": Part(check_fused, 300),
    "compile": Part(check_compile, 600),
    "repeatability": Part(check_repeatability, 120),
    "deterministic": Part(check_deterministic, 120),
    "processes": Part(check_processes, 180),
    "speed": Part(measure_speed, 600),
}
"""By name, in their order: `speed` measures the paths that have passed before."""


def run_parts(case: DeviceCase, names: Iterable[str]) -> Iterator[tuple[str, PartResult]]:
    """Run parts one after the other, and yield the outcome of each."""
    passed: tuple[str, ...] = ()
    for name in names:
        result = run_in_process(name, replace(case, passed=passed))
        passed += (name,) if result.status == "passed" else ()
        yield name, result


def run_in_process(name: str, case: DeviceCase, seconds: float | None = None) -> PartResult:
    """Run a part in a process of its own. seconds: the time limit, by default that of the part."""
    limit, began = seconds or PARTS[name].seconds, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="procap-device-") as folder:
        file = Path(folder, "result.json")
        words = [name, str(file), str(case.device), case.backbone, case.pretrained or "", ",".join(case.passed)]
        command = [sys.executable, "-m", "benchmarks.device_check", *words, "full" if case.full else ""]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            reason = ""
            try:
                _, errors = process.communicate(timeout=limit)
            except BaseException as error:
                # Also on Ctrl-C: processes of the part have a session of their own, which no signal reaches.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                _, errors = process.communicate()
                reason = f"no end after {limit:g} s"
        spent = round(time.monotonic() - began, 1)
        with suppress(OSError, ValidationError):
            return PartResult.model_validate_json(file.read_bytes()).model_copy(update={"seconds": spent})
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        reason = reason or f"its process ended with exit code {process.returncode}: {last}"
        return PartResult(status="failed", reason=reason, seconds=spent)


def run_here(name: str, case: DeviceCase, file: Path) -> None:
    """Run a part in this process and write its outcome to `file`."""
    try:
        result = PartResult(status="passed", seconds=0.0, values=PARTS[name].run(case))
    except Skipped as error:
        result = PartResult(status="skipped", reason=str(error), seconds=0.0)
    except Exception as error:
        result = PartResult(status="failed", reason=describe_failure(error), seconds=0.0)
    write_json(file, json.loads(result.model_dump_json()))
