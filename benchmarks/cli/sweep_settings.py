"""Convert the flags of `procap sweep` to `SweepSettings`: check names, fill in defaults."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import (
    EngineFlags,
    RecipeFlags,
    SelectionFlags,
    SweepFlags,
    assignments,
    command_line,
    given_options,
)
from benchmarks.cli.selection import recipe_overrides
from benchmarks.console.parse import parse_datasets, parse_integers, parse_methods, parse_options, parse_shot_count
from benchmarks.experiment.published import table1_methods
from cluster.space import Values, parse_param
from cluster.sweep_record import SweepSettings
from procap.errors import UsageError, validate
from shards.resolve import resolve_dataset
from shards.uneven_samples import BALANCED

OPTIONAL = ("metric", "search_seed", "scheduler", "grace_period", "reduction_factor", "trials", "hours",
            "classes", "sampling", "backbone", "pretrained", "precision", "recipe")  # fmt: skip
"""Settings that are left to the defaults of `SweepSettings` unless their flag is given."""


def make_settings(flags: SweepFlags, selection: SelectionFlags, recipe_flags: RecipeFlags, data: Path) -> SweepSettings:
    """Make the settings; varied values replace a single one. Raises UsageError for what cannot be searched."""
    datasets = parse_datasets(selection.datasets, data)
    for name in datasets:
        if "val" not in resolve_dataset(name, data).counts:
            raise UsageError(f"{name} has no validation images, and a sweep never chooses by test images")
    methods = parse_methods(selection.methods, table1_methods())
    space = dict(parse_param(text, methods) for text in flags.param or ())
    if isinstance(shots := space.get("shots"), list):
        # As in --shots: 0 stands for all images.
        space["shots"] = list(dict.fromkeys(0 if value in ("full", "all") else value for value in shots))
    is_listed = all(isinstance(domain, list) for domain in space.values())
    names = [methods, datasets, [field.rpartition(".")[2] for field in space]]
    chosen = {**asdict(flags), **asdict(selection), "recipe": recipe_flags.recipe}
    fields: dict[str, Any] = {name: chosen[name] for name in OPTIONAL if chosen[name] not in (None, "")} | {
        "name": flags.name or "-".join("-".join(part) for part in names if part)[:100],
        "space": space,
        "methods": methods,
        "datasets": datasets,
        "seeds": parse_integers(selection.seeds, "--seeds") or [1],
        "search": flags.search or ("grid" if is_listed and not flags.trials else "random"),
        "shots": parse_shot_count(selection.shots or "16"),
        "overrides": recipe_overrides(recipe_flags),
        "options": parse_options(given_options(recipe_flags.option, recipe_flags.unlabelled), methods),
    }
    settings = validate(SweepSettings, fields, "sweep")
    if settings.search == "grid" and not is_listed:
        raise UsageError("--search grid needs lists of values: use random or tpe")
    of_draws = command_line(SweepFlags(trials=flags.trials, search_seed=flags.search_seed))
    if settings.search == "grid" and of_draws:
        raise UsageError(f"--search grid trains all combinations: leave out {of_draws}, or use random or tpe")
    of_asha = command_line(SweepFlags(grace_period=flags.grace_period, reduction_factor=flags.reduction_factor))
    if settings.scheduler != "asha" and of_asha:
        raise UsageError(f"without --scheduler asha nothing is stopped early: add it, or leave out {of_asha}")
    if settings.search != "grid" and not (settings.trials or settings.hours):
        raise UsageError(f"--search {settings.search} never ends by itself: give --trials or --hours")
    if settings.scheduler == "asha" and "recipe.epochs" in space:
        raise UsageError("--scheduler asha compares runs at the same epoch: epochs cannot be varied with it")
    return settings


def make_commands(settings: SweepSettings, values: Values, runtime: EngineFlags) -> list[str]:
    """Make the commands that train a configuration with all seeds and test it.

    A sweep with --metric held-out trains on half of the base classes; these commands train on all of them.
    """
    method = values.get("method", settings.methods[0])
    overrides, options = dict(settings.overrides), dict(settings.options.get(method, {}))
    for field, value in values.items():
        group, _, name = field.partition(".")
        if name:
            (overrides if group == "recipe" else options)[name] = value
    flags = {name: overrides.pop(name) for name in ("epochs", "batch_size", "lr") if name in overrides}
    chosen = {**settings.model_dump(), **values}
    selection = SelectionFlags(
        methods=method,
        datasets=",".join(settings.datasets),
        seeds=",".join(map(str, settings.seeds)),
        shots=str(chosen["shots"] or "full"),
        classes=settings.classes,
        sampling="" if settings.sampling == BALANCED else settings.sampling,
        backbone=chosen["backbone"],
        pretrained=chosen["pretrained"] or "",
        precision=chosen["precision"],
    )
    training = RecipeFlags(
        recipe=chosen["recipe"], option=assignments(options), recipe_field=assignments(overrides), **flags
    )
    groups = {"train": runtime, "eval": runtime.for_evaluation()}
    return [f"procap {name} {command_line(selection, training, group)}" for name, group in groups.items()]
