"""Make the tables and the summary of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Column, Row, Table
from cluster.space import Values
from cluster.sweep_record import METRICS, Configuration, SweepSettings

STATES = {"finished": "finished", "stopped": "stopped early", "running": "unfinished", "failed": "failed"}
"""The states of a configuration, the best first, as they are printed."""


def rank(settings: SweepSettings, configurations: Iterable[Configuration]) -> list[Configuration]:
    """Sort configurations: finished ones by score, then those that ended earlier, failed ones last.

    Equal ones are in the order in which the values are listed, or from the smallest drawn number on.
    """

    def order(one: Configuration) -> list[Any]:
        values = [(one.values.get(field), domain) for field, domain in settings.domains.items()]
        listed = [[*domain, value].index(value) if isinstance(domain, list) else value for value, domain in values]
        return [*_place(settings, one), listed]

    return sorted(configurations, key=order)


def _place(settings: SweepSettings, one: Configuration) -> tuple[float, ...]:
    """Return what is equal for configurations of one rank, and less for a better one."""
    score = -math.inf if one.score is None else round(one.score, 6)
    return list(STATES).index(one.state), 0 if one.state == "finished" else -one.epoch, -score


def find_best_of_each(settings: SweepSettings, configurations: Iterable[Configuration]) -> dict[str, Configuration]:
    """Find the best finished configuration of each data set if they are varied, else of each method."""
    field, names = ("dataset", settings.datasets) if settings.varies_data else ("method", settings.methods)
    finished = [one for one in rank(settings, configurations) if one.state == "finished"]
    found: dict[str, Configuration] = {}
    for name in names:
        own = [one for one in finished if one.values.get(field, names[0]) == name]
        found.update({name: own[0]} if own else {})
    return found


def find_best(settings: SweepSettings, configurations: Iterable[Configuration]) -> list[Configuration]:
    """Find the best finished configuration; of each data set if they are varied, as such scores are not comparable."""
    each = find_best_of_each(settings, configurations)
    return list(each.values()) if settings.varies_data else rank(settings, each.values())[:1]


def sweep_table(
    settings: SweepSettings,
    configurations: Sequence[Configuration],
    other_code: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Make a row for each configuration, the best first. other_code: how it differs from what is installed, by run."""
    rows, ranked = [], rank(settings, configurations)
    places = [_place(settings, one) for one in ranked]
    for one, place in zip(ranked, places, strict=True):
        seeds = tuple(sorted(map(int, one.by_seed)))
        score = None if one.score is None else Metric(one.score, one.spread, seeds)
        values = [_format_value(one.values.get(field)) for field in settings.domains]
        state = STATES[one.state] + (" (other code)" if other_code.keys() & {*one.runs} else "")
        rows.append(Row((str(places.index(place) + 1),), (*values, score, f"{one.epoch} of {one.epochs}", state)))
    fields = [Column(field.rpartition(".")[2], "") for field in settings.domains]
    columns = (*fields, Column(f"{settings.metric}, %", "high"), Column("Epochs", ""), Column("State", ""))
    notes = [
        f"Score: {METRICS[settings.metric]}; mean ± sample standard deviation over seeds. Test images are not used."
    ]
    for best in find_best(settings, configurations):
        own = [one for one in configurations if one.values.get("dataset") == best.values.get("dataset")]
        if (equal := [_place(settings, one) for one in own].count(_place(settings, best))) > 1:
            which = "the first in the order of the lists" + " or the smallest drawn" * (settings.search != "grid")
            which = f"{format_values(best.values)}, {which}, counts as the best"
            notes.append(f"{equal} configurations have the best score; {which}.")
    for change in dict.fromkeys(other_code.values()):
        runs = plural([*other_code.values()].count(change), "run")
        notes.append(f"OTHER CODE trained {runs}, which do not compare: {change}.")
    return Table(settings.name, f"Sweep {settings.name}", ("Rank",), columns, tuple(rows), notes, wide=True)


def format_configuration(one: Configuration) -> str:
    """Format a configuration that has ended in one line."""
    stopped = f", stopped after epoch {one.epoch}" if one.state == "stopped" else ""
    outcome = f"failed: {format_failure(one)}" if one.state == "failed" else f"{one.score:.2f} %{stopped}"
    return f"{format_values(one.values)}: {outcome}"


def format_failure(one: Configuration) -> str:
    run, why = next(iter(one.failures.items()))
    return why if run in why else f"{run}: {why}"


def format_values(values: Values) -> str:
    return ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in values.items()) or "as it is"


def summarize(settings: SweepSettings, configurations: Sequence[Configuration], commands: list[str]) -> dict[str, Any]:
    """Make the document of `--json` and summary.json."""
    best = find_best(settings, configurations)
    each = {name: _to_row(one) for name, one in find_best_of_each(settings, configurations).items()}
    return {
        "name": settings.name,
        "metric": settings.metric,
        "seeds": list(settings.seeds),
        "datasets": list(settings.datasets),
        "counts": count_states(configurations),
        "best": _to_row(best[0]) if best and not settings.varies_data else None,
        "best_by_method": {} if settings.varies_data else each,
        "best_by_dataset": each if settings.varies_data else {},
        "commands": commands,
        "configurations": [_to_row(one) for one in rank(settings, configurations)],
    }


def count_states(configurations: Iterable[Configuration]) -> dict[str, int]:
    """Count configurations in each state."""
    states: list[str] = [one.state for one in configurations]
    return {state: states.count(state) for state in STATES}


def _to_row(one: Configuration) -> dict[str, Any]:
    fields = ("values", "state", "score", "scores", "runs", "epoch", "epochs", "failures")
    return {"std": one.spread, **{name: getattr(one, name) for name in fields}}


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
