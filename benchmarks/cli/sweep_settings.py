"""Convert the flags of `procap sweep` to `SweepSettings`: check names, fill in defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.cli.flags import EngineFlags, RecipeFlags, RuntimeFlags, SelectionFlags, SweepFlags, command_line
from benchmarks.cli.selection import recipe_changes
from benchmarks.console.parse import (
    parse_datasets,
    parse_integers,
    parse_methods,
    parse_options,
    parse_shot_count,
    split_names,
)
from benchmarks.sweeps.table import method_of
from cluster.configuration import METRICS, Search, SweepSettings
from cluster.space import Domain, Values, parse_param
from cluster.submit import find_secret
from procap.errors import UsageError, unknown_name
from runner.config import explain_validation_error
from shards.urls import redact

MOST_LISTED = 100_000
"""Largest number of configurations in a grid."""


def make_settings(flags: SweepFlags, selection: SelectionFlags, recipe: RecipeFlags, data: Path) -> SweepSettings:
    """Make the settings. Raises UsageError for what cannot be searched, DataUsageError for an unknown data set."""
    from pydantic import ValidationError

    from benchmarks.cli.data_few_shot import samples_digest

    given = list(flags.param or ())
    methods, given = _split_methods(selection.methods, given)
    space = _make_space(given, methods)
    if "dataset" in space:
        if selection.datasets:
            raise UsageError("--datasets and --param dataset contradict each other: --datasets averages over them")
        datasets = parse_datasets(",".join(map(str, _listed("dataset", space["dataset"]))), data)
        space["dataset"] = list(datasets)
    else:
        datasets = parse_datasets(selection.datasets, data)
    _refuse_fixed(space, selection, recipe, methods)
    if "shots" in space and isinstance(space["shots"], list):
        space["shots"] = list(dict.fromkeys(map(_to_shots, space["shots"])))
    _check_validation_images(datasets, data)
    metric = _choose("metric", flags.metric or "val", tuple(METRICS))
    listed = all(isinstance(domain, list) for domain in space.values())
    scheduler = _choose("scheduler", flags.scheduler or "none", ("none", "asha"))
    halving = {name: value for name in ("grace_period", "reduction_factor") if (value := getattr(flags, name))}
    if scheduler == "none" and halving:
        raise UsageError("--grace-period and --reduction-factor belong to early stopping: add --scheduler asha")
    if scheduler == "asha" and "recipe.epochs" in space:
        raise UsageError("--scheduler asha compares runs at the same epoch: epochs cannot be varied with it")
    shots = parse_shot_count(selection.shots or "16")
    fields: dict[str, Any] = {
        "name": flags.name or _make_name(methods, datasets, space),
        "space": space,
        "methods": methods,
        "datasets": datasets,
        "seeds": parse_integers(selection.seeds, "--seeds") or [1],
        "metric": metric,
        "direction": _choose("direction", flags.direction or "max", ("max", "min")),
        "search": _choose("search", flags.search or ("grid" if listed else "random"), get_args(Search)),
        "search_seed": flags.search_seed or 0,
        "classes": _choose_classes(selection.classes, metric),
        "shots": shots,
        "backbone": selection.backbone or "mini",
        "pretrained": selection.pretrained or None,
        "precision": selection.precision or "fp32",
        "recipe": recipe.recipe or "published",
        "overrides": recipe_changes(recipe),
        "options": parse_options(recipe.option or (), methods),
        "few_shot_samples": samples_digest(recipe.few_shot_samples, list(datasets), shots),
        "scheduler": scheduler,
        "trials": flags.trials,
        "hours": flags.hours,
        **halving,
    }
    try:
        settings = SweepSettings.model_validate(fields)
    except ValidationError as error:
        raise explain_validation_error(error, SweepSettings, "sweep") from error
    _check(settings)
    return settings


def _split_methods(selected: str, params: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take the methods from --methods or --param, and return the other params separately."""
    varied = [text.partition("=")[2] for text in params if text.partition("=")[0].strip() == "method"]
    if varied and selected:
        raise UsageError("--methods and --param method contradict each other: give one of them")
    others = [text for text in params if text.partition("=")[0].strip() != "method"]
    return parse_methods(",".join(split_names(varied[0].replace('"', "") if varied else selected))), others


def _make_space(params: Sequence[str], methods: Sequence[str]) -> dict[str, Domain]:
    space: dict[str, Domain] = {}
    for text in params:
        field, domain = parse_param(text, methods)
        if field in space:
            raise UsageError(f"--param {text.partition('=')[0]} is given twice, as {field}: list all its values in one")
        space[field] = domain
    return space


def _refuse_fixed(
    space: Mapping[str, Domain], selection: SelectionFlags, recipe: RecipeFlags, methods: Sequence[str]
) -> None:
    """Raise UsageError if a varied field also has a fixed value."""
    fixed = {name for name in ("shots", "backbone", "pretrained", "precision") if getattr(selection, name)}
    fixed |= {"recipe"} if recipe.recipe else set()
    fixed |= {f"recipe.{name}" for name in recipe_changes(recipe)}
    fixed |= {f"options.{name}" for own in parse_options(recipe.option or (), methods).values() for name in own}
    for field in space.keys() & fixed:
        raise UsageError(f"{field.rpartition('.')[2]} is varied and has one value as well: give one of them")


def _to_shots(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() not in ("full", "all"):
        raise UsageError(f"shots: '{value}' is not a whole number of 0 or more, or full for every image")
    return 0


def _listed(field: str, domain: Domain) -> list[Any]:
    if not isinstance(domain, list):
        raise UsageError(f"{field} needs a list of names")
    return domain


def _check_validation_images(datasets: Sequence[str], data: Path) -> None:
    from shards.resolve import resolve_dataset

    for name in datasets:
        dataset = resolve_dataset(name, data)
        if "val" not in dataset.counts:
            raise UsageError(
                f"{dataset.name} has no validation images, and a sweep never chooses by test images: search on a data "
                "set that has some"
            )


def _choose(what: str, name: str, known: tuple[str, ...]) -> str:
    if name in known:
        return name
    if what == "metric" and "test" in name:
        raise UsageError(f"--metric {name}: a sweep never chooses by test images; use {' or '.join(known)}")
    raise unknown_name(what, name, known)


def _choose_classes(given: str, metric: str) -> str:
    if metric == "held-out" and given in ("", "base", "dev-base"):
        return "base"
    if metric == "held-out":
        raise UsageError(f"--metric held-out trains on a half of the base classes: leave out --classes {given}")
    if given in ("", "base", "all"):
        return given or "base"
    if given in ("dev-base", "dev-novel"):
        raise UsageError(f"--classes {given}: for classes that are held out use --metric held-out")
    raise UsageError(f"--classes {given}: a sweep looks at base or all classes; novel ones stay unseen")


def _make_name(methods: Sequence[str], datasets: Sequence[str], space: Mapping[str, Domain]) -> str:
    words = ["-".join(methods), "-".join(datasets), "-".join(field.rpartition(".")[2] for field in space)]
    return "-".join(filter(None, words))[:100]


def _check(settings: SweepSettings) -> None:
    distributions = [field for field, domain in settings.domains.items() if not isinstance(domain, list)]
    if settings.search == "grid":
        if distributions:
            raise UsageError(
                f"--search grid needs lists, and {', '.join(distributions)} has none: use --search random or tpe"
            )
        if settings.trials is not None:
            raise UsageError("--search grid tries every combination: leave out --trials, or use --search random or tpe")
        if (settings.size or 0) > MOST_LISTED:
            raise UsageError(f"a grid of {settings.size:,} configurations: use --search random or tpe")
    elif settings.trials is None and settings.hours is None:
        raise UsageError(f"--search {settings.search} never ends by itself: give --trials or --hours")
    if settings.varies_data and settings.one_trial:
        how = "--search tpe" if settings.search == "tpe" else "--scheduler asha"
        raise UsageError(
            f"{how} compares configurations, and scores on different data sets do not compare: --datasets averages "
            "over them, or give each a sweep of its own"
        )
    if settings.search != "grid" and not settings.domains:
        raise UsageError(
            f"--search {settings.search} has nothing to choose: give --param, as in --param 'lr=loguniform(1e-5,1e-2)'"
        )


def make_commands(settings: SweepSettings, values: Values, place: RuntimeFlags, parallel: EngineFlags) -> list[str]:
    """Make the commands that train a configuration with all seeds and test it.

    A sweep with --metric held-out trains on half of the base classes; these commands train on all of them.
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
        option=[f"{name}={_format_option(value)}" for name, value in options.items()] or None,
        recipe_field=[f"{name}={_format_option(value)}" for name, value in changes.items()] or None,
        few_shot_samples=settings.few_shot_samples,
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
    """Remove the password from a URL, as the commands are also written to a file that others read."""
    return redact(text) if find_secret(text) else text


def _format_option(value: Any) -> str:
    """Format a value as it follows `=` on the command line: text without quotes unless it would parse as JSON."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except json.JSONDecodeError:
            return value
    return json.dumps(value)
