"""Load the reports of the runtime benchmark, `<results>/runtime/*/runtime.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.experiment.titles import TITLES
from procap.errors import UserError, describe_invalid
from runner.config import Amount, Count
from shards.files import read_file

SCHEMA = 4
"""Version of the report's format; reports of another version are ignored and measured again."""
METHOD_TITLES = {
    **TITLES,
    "zeroshot": "zero-shot CLIP",
    "maple": "MaPLe-style",
}


class ReportRow(BaseModel):
    """What tables print of a measured method; a report has more fields, and None where nothing was measured."""

    model_config = ConfigDict(strict=True)

    dataset: str = ""
    title: str = ""
    mode: str = ""
    precision: str = ""
    steps: Count | None = None
    train_seconds: Amount | None = None
    encoder_fps: dict[str, Amount | None] | None = None
    end_to_end_fps: dict[str, Amount | None] | None = None
    test_images: Count | None = None
    accuracy_note: str | None = None
    accuracy: Annotated[float, Field(ge=0, le=100)] | None = None


@contextmanager
def explain_broken_report() -> Iterator[None]:
    """Turn errors about fields of a report that are missing or of a wrong type into a UserError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"a runtime.json or pictures.json of the results is damaged ({reason}): move it away, and repeat its suite"
        ) from error


def load_runtime_reports(results: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Load every report of this version below `results`, with its file; other files are left out.

    Raises UserError for a row with numbers that cannot be right.
    """
    for file in sorted((results / "runtime").glob("*/runtime.json")):
        try:
            report = json.loads(read_file(file))
        except (OSError, ValueError):
            continue
        needed = {"backbone", "rows", "written"}
        if isinstance(report, dict) and report.get("schema") == SCHEMA and needed <= report.keys():
            try:
                for row in report["rows"]:
                    ReportRow.model_validate(row)
            except ValidationError as error:
                reason = describe_invalid(error)
                raise UserError(f"{file} cannot be read ({reason}); move it away, and repeat its suite") from error
            yield file, report
