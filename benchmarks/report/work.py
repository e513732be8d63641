"""Make the table of what ran, on which machines, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.console.output import plural
from benchmarks.report.sections import Section
from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.results import EvalResult, TrainResult
from runner.run_folders import RunFolder

COLUMNS = (
    *(Column(title, "", 0) for title in ("Trainings", "Evaluations")),
    *(Column(title, "", 1) for title in ("Training, min", "Evaluation, min")),
)


def work_table(sections: Iterable[Section], results: Path) -> Table | None:
    """Make a row for each machine and program; None without results. Runs of several suites count once."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for path in dict.fromkeys(path for section in sections for path in section.paths):
        folder = RunFolder(results / path)
        # Files that cannot be read are listed as problems of their run.
        with suppress(UserError):
            training = folder.train()
            documents: list[TrainResult | EvalResult] = [training] if training and training.steps else []
            for document in (*documents, *folder.evaluations()):
                column = int(isinstance(document, EvalResult))
                key = describe_machine(document.environment), document.program
                row = numbers.setdefault(key, [0.0] * len(COLUMNS))
                row[column] += 1
                row[column + 2] += document.seconds / 60
    if not numbers:
        return None
    rows = [Row(key, tuple(map(Metric, row))) for key, row in sorted(numbers.items())]
    notes = ("Training: steps and checkpoints, without loading. Evaluation: class features, warm-up and images.",)
    return Table("report-work", "Machines and time", ("Machine", "Program"), COLUMNS, rows, notes, wide=True)


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Name GPU and processor, as a result recorded them."""
    cpu = environment.get("cpu") or {}
    threads = f", {plural(cpu['threads'], 'thread')}" if cpu.get("threads") else ""
    processor = f"{cpu['name']} ({plural(cpu['cores'], 'core')}{threads})" if cpu.get("name") else "not recorded"
    return f"{environment['gpu']}, {processor}" if environment.get("gpu") else processor
