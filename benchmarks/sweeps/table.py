"""What a sweep shows: its configurations by figure, the commands that train and test the best one, a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.cli.flags import EngineFlags, RecipeFlags, RuntimeFlags, SelectionFlags, command_line
from benchmarks.console.output import columns
from cluster.space import Values
from cluster.submit import find_secret
from cluster.sweep_record import SweepSettings, TrialRecord, best, best_of_each, ordered
from shards.urls import redact

SHOWN = {"finished": "finished", "stopped": "stopped early", "running": "unfinished", "failed": "failed"}


def table(settings: SweepSettings, records: Mapping[str, TrialRecord]) -> str:
    """Every configuration, the best first and marked."""
    varied = [one.field for one in settings.dimensions()]
    chosen = [record for _, record in winners(settings, records)]
    rows = []
    for _, record in ordered(records, settings.direction):
        seeds = f"{len(record.by_seed())}/{len(settings.seeds)}"
        mark = "best" if record in chosen else ""
        values = [_short(record.values.get(field)) for field in varied]
        rows.append((*values, _figure(record), seeds, f"{record.epoch}/{record.epochs}", SHOWN[record.state], mark))
    headers = [field.rpartition(".")[2] for field in varied]
    return columns((*headers, f"{settings.metric} %", "seeds", "epochs", "state", ""), rows)


def winners(settings: SweepSettings, records: Mapping[str, TrialRecord]) -> list[tuple[str, TrialRecord]]:
    """The best configuration, or that of each data set where they are varied."""
    if settings.varies_data:
        return list(best_of_each(settings, records).values())
    first = best(settings, records)
    return [first] if first else []


def method_of(settings: SweepSettings, values: Values) -> str:
    return str(values.get("method", settings.methods[0]))


def commands(settings: SweepSettings, values: Values, place: RuntimeFlags, parallel: EngineFlags) -> list[str]:
    """What trains this configuration with all seeds and tests it, for a shell.

    A sweep over held-out classes trained on half of the base classes: now it is all of them.
    """
    method = method_of(settings, values)
    changes, options = dict(settings.overrides), dict(settings.options.get(method, {}))
    for field, value in values.items():
        group, _, name = field.partition(".")
        if name:
            (changes if group == "recipe" else options)[name] = value
    flags = {name: changes.pop(name) for name in ("epochs", "batch_size", "lr") if name in changes}
    shots = values.get("shots", settings.shots)
    datasets = [values["dataset"]] if "dataset" in values else settings.datasets
    pretrained = values.get("pretrained", settings.pretrained)
    chosen = {name: values.get(name, getattr(settings, name)) for name in ("backbone", "precision", "recipe")}
    selection = SelectionFlags(
        methods=method,
        datasets=",".join(map(str, datasets)),
        seeds=",".join(map(str, settings.seeds)),
        shots="" if shots == 16 else str(shots or "full"),
        classes="" if settings.classes == "base" else settings.classes,
        backbone="" if chosen["backbone"] == "mini" else chosen["backbone"],
        pretrained=pretrained or "",
        precision="" if chosen["precision"] == "fp32" else chosen["precision"],
    )
    training = RecipeFlags(
        recipe="" if chosen["recipe"] == "published" else chosen["recipe"],
        option=[f"{name}={_typed(value)}" for name, value in options.items()] or None,
        recipe_field=[f"{name}={_typed(value)}" for name, value in changes.items()] or None,
        few_shot_samples=settings.picks,
        **flags,
    )
    place = replace(
        place,
        data=_without_password(place.data),
        results=_without_password(place.results),
        tracking=_without_password(place.tracking),
    )
    tested = replace(place, timeout=RuntimeFlags().timeout)
    return [
        f"procap train {command_line(selection, training, place, parallel)}".rstrip(),
        f"procap eval {command_line(selection, training, tested)}".rstrip(),
    ]


def _without_password(text: str) -> str:
    """Without its password, which is left to who types it: what is printed is also kept in a file that others read."""
    return redact(text) if find_secret(text) else text


def summary(settings: SweepSettings, records: Mapping[str, TrialRecord], ready: list[str]) -> dict[str, Any]:
    """For programs, as `--json` prints it and summary.json keeps it."""
    first = best(settings, records)
    each = {name: _row(*one) for name, one in best_of_each(settings, records).items()}
    rows = [_row(digest, record) for digest, record in ordered(records, settings.direction)]
    states: list[str] = [record.state for record in records.values()]
    return {
        "name": settings.name,
        "metric": settings.metric,
        "direction": settings.direction,
        "seeds": list(settings.seeds),
        "datasets": list(settings.datasets),
        "counts": {state: states.count(state) for state in SHOWN},
        "best": _row(*first) if first else None,
        "best_by_method": {} if settings.varies_data else each,
        "best_by_dataset": each if settings.varies_data else {},
        "commands": ready,
        "configurations": rows,
    }


def _row(digest: str, record: TrialRecord) -> dict[str, Any]:
    kept = ("number", "values", "state", "figure", "figures", "runs", "epoch", "epochs", "why")
    return {"configuration": digest, "std": record.spread, **{name: getattr(record, name) for name in kept}}


def _figure(record: TrialRecord) -> str:
    if record.figure is None:
        return "-"
    return f"{record.figure:.2f}" if record.spread is None else f"{record.figure:.2f} ± {record.spread:.2f}"


def _typed(value: Any) -> str:
    """As it is typed behind an equals sign: a text without quotes, unless it would be read as something else."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except json.JSONDecodeError:
            return value
    return json.dumps(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
