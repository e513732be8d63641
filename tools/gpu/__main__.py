"""Run the parts of the GPU study that have no result yet, for a limited time, and write the report.

    python -m tools.gpu --out gpu                     repeat until it exits with 0; 9 minutes each time
    python -m tools.gpu --out gpu --stages tests,parity --seconds 300
    python -m tools.gpu --out gpu --quick --device cpu        rehearsal: mini, two methods, few sizes

Each part is written to `OUT/STAGE.json` when it ends, so that a command that is killed loses one part. A part that
fails is recorded with its error and not repeated, unless `--retry` is given. `OUT/report.md` has all tables. Exit code
0: every part is done; 3: some failed; 75: parts are left, repeat the command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.console.output import note
from runner.environment import resolve_device
from runner.results import write_bytes, write_json
from tools.gpu.report import format_report
from tools.gpu.stages import STAGES, StudySetup
from tools.record import describe_run

INCOMPLETE = 75


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    flags = _parse(arguments)
    device = resolve_device(flags.device)
    setup = StudySetup(device, flags.out, quick=flags.quick)
    left = failed = 0
    for name in flags.stages.split(",") if flags.stages else STAGES:
        file = flags.out / f"{name}.json"
        record: dict[str, Any] = describe_run("gpu", arguments, device) | {"parts": {}}
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
        for part, measure in STAGES[name](setup):
            earlier = record["parts"].get(part)
            if earlier is not None and not (flags.retry and "error" in earlier):
                failed += "error" in earlier
                continue
            remaining = flags.seconds - (time.monotonic() - began)
            if remaining <= 0:
                left += 1
                continue
            started = time.monotonic()
            try:
                measured = measure(remaining)
            except Exception as error:
                traceback.print_exc()
                measured = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
                failed += 1
            record["parts"][part] = measured | {"wall_seconds": round(time.monotonic() - started, 2)}
            write_json(file, record)
            note(f"{name} {part}: {measured.get('error', 'done')} ({time.monotonic() - started:.1f} s)")
    write_bytes(flags.out / "report.md", format_report(flags.out, STAGES).encode())
    note(f"{left} parts left, {failed} failed; {flags.out / 'report.md'}")
    return INCOMPLETE if left else 3 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results [default: gpu]")
    parser.add_argument("--stages", default="", help="comma-separated; all by default")
    parser.add_argument("--seconds", type=float, default=520, help="start no part after that time [default: 520]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="the CLIP mini, two methods, few sizes")
    parser.add_argument("--retry", action="store_true", help="repeat parts that failed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
