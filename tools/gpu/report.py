"""Format the results of the GPU study as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.tables.render import markdown_grid
from tools.record import describe_machine


def format_report(out: Path, stages: Iterable[str]) -> str:
    """Format the tables of all stages that have results in `out`, with device, versions and command."""
    sections = []
    for stage in stages:
        file = out / f"{stage}.json"
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
            rows = {part: facts for part, facts in record["parts"].items() if "error" not in facts}
            failed = {part: facts["error"] for part, facts in record["parts"].items() if "error" in facts}
            lines = [f"## {stage.capitalize()}", f"`{record['command']}` on {describe_machine(record)}"]
            lines += [FORMATS.get(stage, _plain)(rows)] if rows else []
            lines += [f"- FAILED {part}: {error.splitlines()[-1]}" for part, error in failed.items()]
            sections.append("\n\n".join(lines))
    return "# GPU study\n\n" + "\n\n".join(sections) + "\n"


def _plain(parts: dict[str, Any]) -> str:
    """Format every part as one row of its numbers."""
    numbers = {part: {k: v for k, v in facts.items() if isinstance(v, int | float)} for part, facts in parts.items()}
    names = list(dict.fromkeys(name for facts in numbers.values() for name in facts))
    rows = [[part, *[_number(facts.get(name)) for name in names]] for part, facts in numbers.items()]
    return markdown_grid(["part", *names], rows, left=range(1))


def _sizes(parts: dict[str, Any]) -> str:
    headers = ["work", "fast, ms", "reference, ms", "ratio", "counted", "images/s", "TFLOP/s"]
    headers += ["memory, GB", "reference, GB", "start, s"]
    rows = []
    for part, facts in parts.items():
        seconds = {mode: facts["seconds"][mode]["median"] for mode in ("fast", "reference")}
        numbers = (
            1e3 * seconds["fast"], 1e3 * seconds["reference"], facts["ratio"], facts["counted"],
            facts["point"]["batch"] / seconds["fast"], facts["flops"]["fast"] / seconds["fast"] / 1e12,
            facts["peaks"]["fast"] / 1e9, facts["peaks"]["reference"] / 1e9, facts["starts"]["fast"],
        )  # fmt: skip
        rows.append([part, *map(_number, numbers)])
    return markdown_grid(headers, rows, left=range(1))


def _training(parts: dict[str, Any]) -> str:
    headers = ["method", "mode", "ten epochs, s", "step, ms", "FPS encoder", "FPS end to end", "start, s"]
    rows = [
        [row["title"], row["mode"], *map(_number, (
            row["train_seconds"], row["step_seconds"] and 1e3 * row["step_seconds"]["median"],
            row["encoder_fps"]["median"], row["end_to_end_fps"]["median"],
            row["start_seconds"]["train"],
        ))]
        for facts in parts.values()
        for row in facts["rows"]
    ]  # fmt: skip
    return markdown_grid(headers, rows, left=range(1))


def _refinement(parts: dict[str, Any]) -> str:
    """Format microseconds, and bytes over seconds: what reading and writing the weights once would reach."""
    headers = ["part", "form", "forward, us", "with backward, us", "weights at TB/s", "kernels", "off eager by"]
    rows = []
    for part, facts in parts.items():
        for row in facts["forms"]:
            numbers = (row["forward_us"], row["step_us"], facts["step_bytes"] / row["step_us"] / 1e6, row["kernels"])
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


FORMATS = {"sizes": _sizes, "accelerations": _sizes, "training": _training, "refinement": _refinement}
FORMATS["profiles"] = _profiles
