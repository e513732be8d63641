"""`procap check device`: test which accelerations are equal and faster on this device."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from benchmarks.cli.flags import command, flag, switch
from benchmarks.console.output import columns, note, show, show_json
from benchmarks.console.parse import split_names
from procap.errors import check_names


@command("procap check device", "procap check device --full --json", "procap check device --device cpu --only plain")
def check(
    device: Annotated[str, flag("auto|cpu|cuda|cuda:N", "device to check")] = "auto",
    full: Annotated[bool, switch("--full", "also check and measure compiled blocks, about two minutes more")] = False,
    only: Annotated[str, flag("A,B", "parts to run, without writing a record [default: all]")] = "",
) -> int:
    """Compare each faster path with the plain one on this device, measure both, and record the outcome.

    On a GPU this takes about a minute and a half. `--accelerate auto` then uses the paths that passed and are at least
    5 % faster. Another GPU, driver, torch or program version needs a new check. The exit code is 1 if a part failed.
    """
    from benchmarks.device_check.case import DeviceCase
    from benchmarks.device_check.parts import PARTS, run_parts
    from runner.device_record import DeviceRecord, identify, write_record
    from runner.devices import resolve_device

    names = split_names(only)
    check_names("part", names, PARTS)
    chosen = resolve_device(device)
    case = DeviceCase(chosen, full=full)
    results = {}
    note(f"checking {chosen}; kernels are compiled on the way")
    for name, result in run_parts(case, names or PARTS):
        note(f"{name}: {result.status} ({result.seconds:g} s){result.reason and ': '}{result.reason}")
        results[name] = result
    rows = [(name, result.status, f"{result.seconds:g}", result.reason) for name, result in results.items()]
    show(columns(("part", "result", "seconds", "note"), rows))
    record = DeviceRecord(
        identity=identify(chosen),
        written=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        parts=results,
        gains=results["speed"].values.get("gains", {}) if "speed" in results else {},
    )
    for name, gain in record.gains.items():
        show(f"{name}: {gain:.2f} times as fast as the plain path")
    show_json(record.model_dump(mode="json"))
    if not names:
        file = write_record(record)
        note(f"--accelerate auto uses: {', '.join(record.faster) or 'the plain path'}; {file}")
    return 1 if any(result.status == "failed" for result in results.values()) else 0
