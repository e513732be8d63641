"""Measure what needs a GPU, in three commands of at most nine minutes; the most valuable measurements come first.

    python -m tools.gpu a --out gpu      peaks, refinement, training against the targets, memory, profiles
    python -m tools.gpu b --out gpu      tests, parity, a whole run, runs at once, repeated and killed runs
    python -m tools.gpu c --out gpu      accelerations one by one, sizes
    python -m tools.gpu a --out gpu --quick --device cpu      rehearsal with mini

Each result is written to `OUT/COMMAND.json` when it is measured, and a repeated command goes on after it.
`OUT/report.md` has all tables; `OUT/caches.tar.gz` keeps compiled code for the next command on another machine. Exit
code 0: everything is measured; 3: a part failed (`--retry` repeats it); 75: parts are left, repeat the command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.console.output import note
from runner.environment import resolve_device
from runner.results import write_bytes, write_json
from tools.gpu.report import format_report
from tools.gpu.stages import COMMANDS, Study
from tools.record import describe_run

INCOMPLETE = 75
GRACE = 45
"""Seconds after which a part that runs beyond the time for starting parts is given up, so that the rest is saved."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of the folders that keep compiled code."""


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parse(arguments)
    device = resolve_device(flags.device)
    archive = flags.out / "caches.tar.gz"
    _restore_caches(archive, flags.work)
    try:
        left, failed = _measure(
            flags, Study(device, flags.work, quick=flags.quick), describe_run("gpu", arguments, device)
        )
    finally:
        _save_caches(archive, flags.work)
    write_bytes(flags.out / "report.md", format_report(flags.out, COMMANDS).encode())
    note(f"{left} parts left, {failed} failed; {flags.out / 'report.md'}")
    return INCOMPLETE if left else 3 if failed else 0


def _measure(flags: argparse.Namespace, study: Study, record: dict[str, Any]) -> tuple[int, int]:
    """Measure the parts of a command that have no result yet; returns how many are left and how many have failed."""
    signal.signal(signal.SIGALRM, _give_up)
    began, file = time.monotonic(), flags.out / f"{flags.command}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else record | {"stages": {}}
    left = failed = 0
    for stage, list_parts in COMMANDS[flags.command].items():
        if flags.stages and stage not in flags.stages.split(","):
            continue
        results = record["stages"].setdefault(stage, {})
        for part, measure in list_parts(study):
            if part in results and not (flags.retry and "error" in results[part]):
                failed += "error" in results[part]
                continue
            if time.monotonic() - began >= flags.seconds:
                left += 1
                continue
            started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(1.0, began + flags.seconds + GRACE - started))
            try:
                measured = measure()
            except Exception as error:
                traceback.print_exc()
                measured = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
                failed += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            seconds = round(time.monotonic() - started, 2)
            results[part] = measured | {"wall_seconds": seconds}
            write_json(file, record)
            note(f"{stage} {part}: {measured.get('error', 'done')} ({seconds} s)")
    return left, failed


def _give_up(*_: object) -> None:
    raise TimeoutError("the time is over")


def _restore_caches(archive: Path, work: Path) -> None:
    """Put compiled code below `work`, with that of an earlier command unless there is some."""
    if archive.exists() and not any((work / name).exists() for name in CACHES.values()):
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
    for variable, name in CACHES.items():
        os.environ[variable] = str(work / name)


def _save_caches(archive: Path, work: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name in CACHES.values():
            if (work / name).exists():
                tar.add(work / name, name)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results [default: gpu]")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "procap-gpu"), help="data, runs, caches"
    )
    parser.add_argument("--stages", default="", help="comma-separated; all by default")
    parser.add_argument("--seconds", type=float, default=480, help="start no part after that time [default: 480]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the CLIP mini, few methods and sizes")
    parser.add_argument("--retry", action="store_true", help="repeat parts that failed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
