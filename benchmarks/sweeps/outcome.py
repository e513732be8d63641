"""Make the tables and the summary of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from benchmarks.results.metrics import Metric
from benchmarks.tables.columns import PARAMETERS
from benchmarks.tables.table import Column, Row, Table
from cluster.space import Values
from cluster.sweep_record import METRICS, Configuration, State, SweepSettings
from procap.recipe import format_value
from runner.run_folders import RunFolder


def sort_configurations(configurations: Iterable[Configuration]) -> list[Configuration]:
    """Sort configurations: finished ones by score, then those that ended earlier, failed ones last."""

    def order(configuration: Configuration) -> tuple[float, ...]:
        # Rounded, so that equal means in different order of summation keep the order of their start.
        score = -math.inf if configuration.score is None else round(configuration.score, 6)
        epoch = 0 if configuration.state == "finished" else -configuration.epoch
        # Scores of configurations that were stopped compare only at the same epoch.
        return get_args(State).index(configuration.state), epoch, -score

    return sorted(configurations, key=order)


def find_best(configurations: Iterable[Configuration]) -> Configuration | None:
    """Find the best finished configuration, None without any."""
    finished = [configuration for configuration in configurations if configuration.state == "finished"]
    return next(iter(sort_configurations(finished)), None)


def sweep_table(settings: SweepSettings, configurations: Sequence[Configuration], results: Path) -> Table:
    """Make a row for each configuration, the best first; `results` has their runs."""
    rows = []
    for number, configuration in enumerate(sort_configurations(configurations), 1):
        seeds = tuple(sorted(map(int, configuration.by_seed)))
        score = None if configuration.score is None else Metric(configuration.score, configuration.spread, seeds)
        values = [format_value(configuration.values.get(field)) for field in settings.domains]
        epochs = f"{configuration.epoch} of {configuration.epochs}"
        trained = [RunFolder(results / path).read_training() for path in configuration.runs]
        counts = [training.trainable_parameters for training in trained if training]
        parameters = Metric(fmean(counts) / 1000) if counts else None
        cells = (*values, score, parameters, epochs, configuration.state)
        # The score of a shorter training is not ranked with those of finished ones.
        group = "" if configuration.state == "finished" else f"{configuration.state} {configuration.epoch}"
        rows.append(Row((str(number),), cells, group=group))
    fields = [Column(field.rpartition(".")[2], "") for field in settings.domains]
    score_column = Column(f"{settings.metric}, %", "high")
    columns = (*fields, score_column, PARAMETERS, Column("Epochs", ""), Column("State", ""))
    note = f"Score: {METRICS[settings.metric]}; mean ± sample standard deviation over seeds. Test images are not used."
    return Table(settings.name, f"Sweep {settings.name}", ("No.",), columns, tuple(rows), [note])


def format_configuration(configuration: Configuration) -> str:
    """Format a configuration that has ended in one line."""
    if configuration.state == "failed":
        return f"{format_values(configuration.values)}: failed: {configuration.error}"
    stopped = f", stopped after epoch {configuration.epoch}" if configuration.state == "stopped" else ""
    return f"{format_values(configuration.values)}: {configuration.score:.2f} %{stopped}"


def format_values(values: Values) -> str:
    return (
        ", ".join(f"{field.rpartition('.')[2]} {format_value(value)}" for field, value in values.items()) or "as it is"
    )


def summarize(settings: SweepSettings, configurations: Sequence[Configuration], commands: list[str]) -> dict[str, Any]:
    """Make the document of `--json`."""
    states: list[str] = [configuration.state for configuration in configurations]
    return {
        "name": settings.name,
        "metric": settings.metric,
        "seeds": list(settings.seeds),
        "datasets": list(settings.datasets),
        "counts": {state: states.count(state) for state in get_args(State)},
        "best": _to_row(best) if (best := find_best(configurations)) else None,
        "commands": commands,
        "configurations": [_to_row(configuration) for configuration in sort_configurations(configurations)],
    }


def _to_row(configuration: Configuration) -> dict[str, Any]:
    fields = ("values", "state", "score", "scores", "runs", "epoch", "epochs", "error")
    return {"std": configuration.spread, **{name: getattr(configuration, name) for name in fields}}
