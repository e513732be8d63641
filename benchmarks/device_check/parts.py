"""Run the parts of a check, each in a process with a time limit, so that a crash or a hang fails that part alone."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.console.output import note
from benchmarks.device_check import machine, numbers, paths, speed
from benchmarks.device_check.case import DeviceCase, Skipped
from runner.device_record import PartResult
from runner.results import describe_failure, write_bytes

PARTS: dict[str, tuple[Callable[[DeviceCase], dict[str, Any]], float]] = {
    "facts": (machine.collect_facts, 120),
    "plain": (numbers.check_plain, 120),
    "attention": (numbers.check_attention, 120),
    "cudnn": (numbers.check_cudnn, 120),
    "images": (paths.check_images, 120),
    "graphs": (paths.check_graphs, 180),
    "fused": (paths.check_fused, 300),
    "compile": (paths.check_compile, 600),
    "deterministic": (numbers.check_deterministic, 120),
    "processes": (machine.check_processes, 180),
    "speed": (speed.measure_speed, 600),
}
"""Functions and time limits in seconds, in their order: `speed` measures the paths that have passed before."""


def run_parts(case: DeviceCase, names: Iterable[str]) -> Iterator[tuple[str, PartResult]]:
    """Run parts one after the other, and yield the outcome of each."""
    for name in names:
        note(f"{name}: at most {PARTS[name][1]:g} s")
        result = run_in_process(name, case)
        if result.status == "passed":
            case = replace(case, passed=(*case.passed, name))
        yield name, result


def run_in_process(name: str, case: DeviceCase, seconds: float | None = None) -> PartResult:
    """Run a part in a separate process. seconds: the time limit, by default that of the part."""
    limit, began = seconds or PARTS[name][1], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="procap-device-") as folder:
        file = Path(folder, "result.json")
        process = get_context("spawn").Process(target=_run, args=(name, case, file))
        process.start()
        try:
            process.join(limit)
            hangs = process.is_alive()
        finally:
            # Also on Ctrl-C: the part leads a process group that holds what it has started.
            with suppress(ProcessLookupError, TypeError):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.kill()
            process.join()
        spent = round(time.monotonic() - began, 1)
        with suppress(OSError, ValidationError):
            return PartResult.model_validate_json(file.read_bytes()).model_copy(update={"seconds": spent})
        reason = f"no end after {limit:g} s" if hangs else f"its process ended with exit code {process.exitcode}"
        return PartResult(status="failed", reason=reason, seconds=spent)


def _run(name: str, case: DeviceCase, file: Path) -> None:
    """Run a part in this process and write its outcome to `file`."""
    os.setsid()
    outcome: dict[str, Any] = {"status": "passed"}
    try:
        outcome["values"] = PARTS[name][0](case)
    except Skipped as error:
        outcome = {"status": "skipped", "reason": str(error)}
    except Exception as error:
        outcome = {"status": "failed", "reason": describe_failure(error)}
    write_bytes(file, PartResult(seconds=0.0, **outcome).model_dump_json().encode())
