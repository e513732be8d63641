"""Define columns that tables of suites and of all runs share, and compute the cells of speeds and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Column

if TYPE_CHECKING:
    import pandas as pd

HALVES = (Column("Base"), Column("Novel"), Column("HM"))
SPEEDS = (Column("FPS", "", digits=0), Column("training s", "", digits=1))
"""No end is marked better: runs were timed at different times, on any machine, and while other programs ran."""
PARAMETERS = Column("parameters, k", "", digits=1)
"""Learned parameters in thousands."""
NOTE_ON_SPEED = (
    "FPS: images per second of the evaluations, with decoding, without warm-up; FPS of the model: without waiting for "
    "images. Training s: of steps and saved states, and of the encoding for methods that learn from features, which "
    "share it, as they share the FPS. `procap bench runtime` measures methods in the same conditions."
)


def count_parameters(rows: pd.DataFrame) -> Metric:
    """Return the learned parameters in thousands, on average over seeds, whose runs can have different numbers."""
    return Metric(float(rows.groupby("seed").parameters.first().mean()) / 1000)


def average_speeds(rows: pd.DataFrame) -> tuple[Metric | None, Metric | None, Metric | None]:
    """Return images per second, mean seconds of training, and images per second of the model."""
    # A run has a row for each target, with the same seconds of training in all of them.
    seconds = rows.groupby("seed").train_seconds.first().dropna()
    trained = Metric(float(seconds.mean())) if len(seconds) else None
    return images_per_second(rows), trained, images_per_second(rows, "fps_model")


def images_per_second(frame: pd.DataFrame, column: str = "fps") -> Metric | None:
    """Divide images by seconds over several evaluations; untimed ones are left out, None if all are untimed."""
    timed = frame[frame[column].notna()]
    # The harmonic mean weighted by images; the mean of rates would favour the fast evaluations.
    return Metric(float(timed.total.sum() / (timed.total / timed[column]).sum())) if len(timed) else None
