"""Format the results of the GPU study as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.render import markdown_grid
from tools.record import describe_machine


def format_report(out: Path, commands: Iterable[str]) -> str:
    """Format the tables of all commands that have results in `out`, with device, versions and command."""
    sections = []
    for file in [out / f"{command}.json" for command in commands]:
        if not file.exists():
            continue
        record = json.loads(file.read_text(encoding="utf-8"))
        sections.append(f"`{record['command']}` on {describe_machine(record)}")
        if targets := list(_targets(record["stages"])):
            sections.append("## Targets\n\n" + markdown_grid(("target", "limit", "measured", "met"), targets, left=[0]))
        for stage, parts in record["stages"].items():
            rows = {part: facts for part, facts in parts.items() if "error" not in facts}
            failed = [f"- FAILED {part}: {facts['error']}" for part, facts in parts.items() if "error" in facts]
            tables = [FORMATS.get(stage, _plain)(rows)] if rows else []
            sections.append("\n\n".join([f"## {stage.capitalize()}", *tables, *failed]))
    return "# GPU study\n\n" + "\n\n".join(sections) + "\n"


def _targets(stages: dict[str, Any]) -> Iterator[list[str]]:
    """Judge the results of command `a` by what this program wants to reach on an H100 or H200."""
    reports = [facts for facts in stages.get("training", {}).values() if "rows" in facts]
    rows = {row["method"]: row for facts in reports for row in facts["rows"] if row["mode"] == "fast"}
    if {"zeroshot", "maple", "procap"} <= {*rows}:
        steps = {name: rows[name]["step_seconds"]["median"] for name in ("maple", "procap")}
        rates = {name: rows[name]["encoder_fps"]["median"] for name in ("zeroshot", "procap")}
        yield _judge("step of ProCAP / MaPLe", 1.05, steps["procap"] / steps["maple"])
        yield _judge("images/s of ProCAP / plain CLIP", 0.97, rates["procap"] / rates["zeroshot"], at_least=True)
        yield _judge("images/s of the encoder", 9000, rates["procap"], at_least=True)
        yield _judge("ten epochs, s", 4, rows["procap"]["train_seconds"])
    for part, facts in stages.get("memory", {}).items():
        if facts.get("reserved_gb"):
            yield _judge(f"reserved memory of {part}, GB", 8, facts["reserved_gb"])


def _judge(name: str, limit: float, value: float, *, at_least: bool = False) -> list[str]:
    met = value >= limit if at_least else value <= limit
    return [name, f"{'at least' if at_least else 'at most'} {limit:g}", _number(value), "yes" if met else "no"]


def _plain(parts: dict[str, Any]) -> str:
    """Format each part as one row of its numbers."""
    numbers = {part: {k: v for k, v in facts.items() if isinstance(v, int | float)} for part, facts in parts.items()}
    names = list(dict.fromkeys(name for facts in numbers.values() for name in facts))
    rows = [[part, *[_number(facts.get(name)) for name in names]] for part, facts in numbers.items()]
    return markdown_grid(["part", *names], rows, left=range(1))


def _training(parts: dict[str, Any]) -> str:
    headers = ["method", "mode", "epochs, s", "step, ms", "FPS encoder", "FPS end to end", "start, s"]
    rows = [
        [row["title"], row["mode"], *map(_number, (
            row["train_seconds"], row["step_seconds"] and 1e3 * row["step_seconds"]["median"],
            row["encoder_fps"]["median"], row["end_to_end_fps"]["median"],
            row["start_seconds"]["train"],
        ))]
        for facts in parts.values()
        for row in facts["rows"]
    ]  # fmt: skip
    return markdown_grid(headers, rows, left=range(2))


def _refinement(parts: dict[str, Any]) -> str:
    """Format microseconds, and bytes over seconds: what reading and writing the weights once would reach."""
    headers = ["part", "form", "forward, us", "with backward, us", "weights at TB/s", "off eager by"]
    rows = []
    for part, facts in parts.items():
        for row in facts["forms"]:
            numbers = (row["forward_us"], row["step_us"], facts["step_bytes"] / row["step_us"] / 1e6)
            rows.append([part, row["form"], *map(_number, numbers), f"{row['difference']:.1e}"])
    return markdown_grid(headers, rows, left=range(2))


def _profiles(parts: dict[str, Any]) -> str:
    sections = []
    for part, facts in parts.items():
        rows = [[name, _number(count), _number(ms)] for name, count, ms in facts["kernels"]]
        head = f"{part}: {facts['step_ms']:.2f} ms per step, of which the device is busy {facts['busy_ms']:.2f} ms"
        sections.append(f"{head}\n\n{markdown_grid(('kernel', 'calls', 'ms'), rows, left=range(1))}")
    return "\n\n".join(sections)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


FORMATS = {"training": _training, "refinement": _refinement, "profiles": _profiles}
