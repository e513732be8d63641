"""Convert the flags of `procap sweep` to `SweepSettings`: check names, fill in defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import (
    EngineFlags,
    RecipeFlags,
    RuntimeFlags,
    SelectionFlags,
    SweepFlags,
    assignments,
    command_line,
)
from benchmarks.cli.selection import recipe_changes
from benchmarks.console.parse import (
    parse_assignments,
    parse_datasets,
    parse_integers,
    parse_methods,
    parse_options,
    parse_shot_count,
)
from benchmarks.experiment.published import table1_methods
from cluster.space import Domain, Values, parse_param
from cluster.sweep_record import SweepSettings
from procap.errors import UsageError, explain_invalid
from shards.resolve import resolve_dataset

MOST_LISTED = 100_000
"""Largest number of configurations in a grid."""
OPTIONAL = ("metric", "search_seed", "scheduler", "grace_period", "reduction_factor", "trials", "hours",
            "classes", "backbone", "pretrained", "precision", "recipe")  # fmt: skip
"""Settings that are left to the defaults of `SweepSettings` unless their flag is given."""


def make_settings(flags: SweepFlags, selection: SelectionFlags, recipe: RecipeFlags, data: Path) -> SweepSettings:
    """Make the settings. Raises UsageError for what cannot be searched."""
    from pydantic import ValidationError

    params = [(text.partition("=")[0].strip(), text) for text in flags.param or ()]
    varied = [text.partition("=")[2].replace('"', "") for name, text in params if name == "method"]
    if varied and selection.methods:
        raise UsageError("--methods and --param method contradict each other: give one of them")
    methods = parse_methods(varied[0] if varied else selection.methods, table1_methods())
    if selection.datasets:
        # Parameters need the methods, whose import takes longer than everything else here.
        parse_datasets(selection.datasets, data)
    space: dict[str, Domain] = {}
    for text in (text for name, text in params if name != "method"):
        field, domain = parse_param(text, methods)
        if field in space:
            raise UsageError(f"--param {text.partition('=')[0]} is given twice, as {field}: list all its values in one")
        space[field] = domain
    datasets = _choose_datasets(space, selection.datasets, data)
    _refuse_fixed(space, selection, recipe, methods)
    if isinstance(shots := space.get("shots"), list):
        counts = [parse_shot_count(str(value)) if value == 0 or isinstance(value, str) else value for value in shots]
        space["shots"] = list(dict.fromkeys(counts))
    listed = all(isinstance(domain, list) for domain in space.values())
    names = [methods, datasets, [field.rpartition(".")[2] for field in space]]
    chosen = {**asdict(flags), **asdict(selection), "recipe": recipe.recipe}
    fields: dict[str, Any] = {name: chosen[name] for name in OPTIONAL if chosen[name] not in (None, "")} | {
        "name": flags.name or "-".join("-".join(part) for part in names if part)[:100],
        "space": space,
        "methods": methods,
        "datasets": datasets,
        "seeds": parse_integers(selection.seeds, "--seeds") or [1],
        "search": flags.search or ("grid" if listed else "random"),
        "shots": parse_shot_count(selection.shots or "16"),
        "overrides": recipe_changes(recipe),
        "options": parse_options(recipe.option or (), methods),
    }
    try:
        settings = SweepSettings.model_validate(fields)
    except ValidationError as error:
        raise explain_invalid(error, "sweep", SweepSettings.model_fields) from error
    _check(settings, flags)
    return settings


def _choose_datasets(space: dict[str, Domain], selected: str, data: Path) -> list[str]:
    """Return the data sets, varied or averaged over. Raises UsageError for one without validation images."""
    domain = space.get("dataset")
    if domain is not None and selected:
        raise UsageError("--datasets and --param dataset contradict each other: --datasets averages over them")
    if isinstance(domain, dict):
        raise UsageError("dataset needs a list of names")
    datasets = parse_datasets(selected if domain is None else ",".join(map(str, domain)), data)
    if domain is not None:
        space["dataset"] = list(datasets)
    for name in datasets:
        if "val" not in resolve_dataset(name, data).counts:
            raise UsageError(
                f"{name} has no validation images, and a sweep never chooses by test images: search on a data set that "
                "has some"
            )
    return datasets


def _refuse_fixed(
    space: Mapping[str, Domain], selection: SelectionFlags, recipe: RecipeFlags, methods: Sequence[str]
) -> None:
    """Raise UsageError if a varied field also has a fixed value."""
    fixed = {name for name in ("shots", "backbone", "pretrained", "precision") if getattr(selection, name)}
    fixed |= {"recipe"} if recipe.recipe else set()
    fixed |= {f"recipe.{name}" for name in recipe_changes(recipe)}
    options = parse_assignments(recipe.option or (), "--option", "n_ctx=4")
    fixed |= {f"options.{key.rpartition('.')[2]}" for _, key, _ in options}
    for field in space.keys() & fixed:
        raise UsageError(f"{field.rpartition('.')[2]} is varied and has one value as well: give one of them")


def _check(settings: SweepSettings, flags: SweepFlags) -> None:
    """Raise UsageError for settings that contradict each other."""
    asha, search = settings.scheduler == "asha", settings.search
    distributions = [field for field, domain in settings.domains.items() if not isinstance(domain, list)]
    if search == "grid" and distributions:
        raise UsageError(f"--search grid needs lists, and {distributions[0]} has none: use random or tpe")
    if search == "grid" and settings.trials:
        raise UsageError("--search grid tries every combination: leave out --trials, or use random or tpe")
    if search != "grid" and not (settings.trials or settings.hours):
        raise UsageError(f"--search {search} never ends by itself: give --trials or --hours")
    if search != "grid" and not settings.domains:
        raise UsageError(f"--search {search} has nothing to choose: give --param 'lr=loguniform(1e-5,1e-2)'")
    if search == "grid" and (settings.size or 0) > MOST_LISTED:
        raise UsageError(f"a grid of {settings.size:,} configurations: use --search random or tpe")
    if not asha and (flags.grace_period or flags.reduction_factor):
        raise UsageError("--grace-period and --reduction-factor belong to early stopping: add --scheduler asha")
    if asha and "recipe.epochs" in settings.space:
        raise UsageError("--scheduler asha compares runs at the same epoch: epochs cannot be varied with it")
    if settings.metric == "held-out" and settings.classes != "base":
        raise UsageError("--metric held-out trains on half of the base classes: leave out --classes")
    if settings.varies_data and settings.one_trial:
        raise UsageError(
            "tpe and asha compare configurations, and scores on different data sets do not compare: --datasets "
            "averages over them"
        )


def make_commands(settings: SweepSettings, values: Values, place: RuntimeFlags, parallel: EngineFlags) -> list[str]:
    """Make the commands that train a configuration with all seeds and test it.

    A sweep with --metric held-out trains on half of the base classes; these commands train on all of them.
    """
    method = values.get("method", settings.methods[0])
    changes, options = dict(settings.overrides), dict(settings.options.get(method, {}))
    for field, value in values.items():
        group, _, name = field.partition(".")
        if name:
            (changes if group == "recipe" else options)[name] = value
    flags = {name: changes.pop(name) for name in ("epochs", "batch_size", "lr") if name in changes}
    datasets = [values["dataset"]] if "dataset" in values else settings.datasets
    chosen = {**settings.model_dump(), **values}
    selection = SelectionFlags(
        methods=method,
        datasets=",".join(map(str, datasets)),
        seeds=",".join(map(str, settings.seeds)),
        shots=str(chosen["shots"] or "full"),
        classes=settings.classes,
        backbone=chosen["backbone"],
        pretrained=chosen["pretrained"] or "",
        precision=chosen["precision"],
    )
    training = RecipeFlags(
        recipe=chosen["recipe"],
        option=assignments(options),
        recipe_field=assignments(changes),
        **flags,
    )
    chosen_flags = command_line(selection, training, place)
    return [
        f"procap train {chosen_flags} {command_line(parallel)}".rstrip(),
        f"procap eval {chosen_flags}",
    ]
