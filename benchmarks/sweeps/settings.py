"""From what is asked of a sweep to its settings: every name checked, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import RecipeFlags, SelectionFlags
from benchmarks.cli.selection import overrides
from benchmarks.console.parse import (
    parse_datasets,
    parse_integers,
    parse_methods,
    parse_options,
    parse_shot_count,
    split_names,
)
from benchmarks.sweeps.file import Asked
from cluster.configuration import METRICS, check_data
from cluster.space import MOST_LISTED, Dimension, Space, dimension, dimension_of_text, resolve
from cluster.sweep_record import SweepSettings
from procap.errors import UsageError, unknown_name
from runner.config import explain

SEARCHES = ("grid", "random", "tpe")
STOPS = ("none", "asha")


def settings_of(asked: Asked, data: Path) -> SweepSettings:
    """Raises UsageError in one line for whatever cannot be searched, DataUsageError for an unknown data set."""
    from pydantic import ValidationError

    searched, selection, training = asked.searched, asked.selection, asked.training
    given = _split(searched.vary or ())
    methods = _chosen("method", "--methods", selection.methods, given, asked.space)
    methods = parse_methods(",".join(methods))
    dimensions = _dimensions(given, asked.space or {}, methods)
    by_field = {one.field: one for one in dimensions}
    if "dataset" in by_field:
        if selection.datasets:
            raise UsageError("--datasets and --vary dataset are two answers: --datasets averages over them")
        datasets = parse_datasets(",".join(map(str, by_field["dataset"].values)), data)
        by_field["dataset"] = Dimension("dataset", "list", tuple(datasets))
    else:
        datasets = parse_datasets(selection.datasets, data)
    _refuse_fixed(by_field, selection, training, methods)
    if "shots" in by_field:
        by_field["shots"] = _with_full(by_field["shots"], methods)
    check_data(tuple(datasets), data)
    metric = _one_of("metric", searched.metric or "val", tuple(METRICS))
    space = Space(tuple(by_field.values()))
    stop = _one_of("early stopping", searched.stop or "none", STOPS)
    if stop == "none" and (searched.grace is not None or searched.reduction is not None):
        raise UsageError("--grace and --reduction are about early stopping: add --stop asha")
    if stop == "asha" and "recipe.epochs" in by_field:
        raise UsageError("--stop asha compares runs at the same epoch: epochs cannot be varied with it")
    fields: dict[str, Any] = {
        "name": searched.name or _name(methods, datasets, by_field),
        "space": {one.field: one.plain() for one in by_field.values()},
        "methods": methods,
        "datasets": datasets,
        "seeds": parse_integers(selection.seeds, "--seeds") or [1],
        "metric": metric,
        "direction": _one_of("direction", searched.direction or "max", ("max", "min")),
        "search": _one_of("search", searched.search or ("grid" if space.listed else "random"), SEARCHES),
        "search_seed": searched.search_seed or 0,
        "classes": _classes(selection.classes, metric),
        "shots": parse_shot_count(selection.shots or "16"),
        "backbone": selection.backbone or "mini",
        "pretrained": selection.pretrained or None,
        "precision": selection.precision or "fp32",
        "recipe": training.recipe or "published",
        "overrides": overrides(training),
        "options": parse_options(training.option or (), methods),
        "picks": _samples(training.few_shot_samples, datasets, parse_shot_count(selection.shots or "16")),
        "stop": stop,
        "trials": searched.trials,
        "hours": searched.hours,
    }
    fields |= {name: value for name in ("grace", "reduction") if (value := getattr(searched, name)) is not None}
    try:
        settings = SweepSettings.model_validate(fields)
    except ValidationError as error:
        raise explain(error, SweepSettings, "sweep") from error
    _check(settings)
    return settings


def _split(given: Sequence[str]) -> dict[str, str]:
    """What is typed with --vary, by the name of the field."""
    found: dict[str, str] = {}
    for text in given:
        name = text.partition("=")[0].strip()
        if name in found:
            raise UsageError(f"--vary {name} is given twice: list all its values in one")
        found[name] = text
    return found


def _chosen(field: str, flag: str, text: str, given: dict[str, str], space: Mapping[str, Any] | None) -> list[str]:
    """The methods of --methods or, where they are varied like any other field, of --vary."""
    typed = given.pop(field, None)
    filed = None if space is None else space.get(field)
    varied = typed.partition("=")[2] if typed else ",".join(map(str, filed if isinstance(filed, list) else [filed]))
    if typed is None and filed is None:
        return split_names(text)
    if text:
        raise UsageError(f"{flag} and --vary {field} are two answers to one question: give one of them")
    return split_names(varied)


def _dimensions(given: Mapping[str, str], space: Mapping[str, Any], methods: Sequence[str]) -> list[Dimension]:
    """What is typed goes before what a file says of the same field."""
    filed: dict[str, Dimension] = {}
    for name, values in space.items():
        if name != "method":
            field = resolve(str(name), methods)
            # In a file, too, people write what they type.
            one = (
                dimension_of_text(f"{field}={values}", methods)
                if isinstance(values, str)
                else dimension(field, values, methods)
            )
            _enter(filed, one, str(name))
    typed: dict[str, Dimension] = {}
    for name, text in given.items():
        _enter(typed, dimension_of_text(text, methods), name)
    return list((filed | typed).values())


def _enter(found: dict[str, Dimension], one: Dimension, name: str) -> None:
    if one.field in found:
        raise UsageError(f"{name} is varied twice, as {one.field} has another name: list all its values in one")
    found[one.field] = one


def _refuse_fixed(
    varied: Mapping[str, Dimension], selection: SelectionFlags, training: RecipeFlags, methods: Sequence[str]
) -> None:
    """Raises UsageError for a field that is varied and has one value as well."""
    fixed = {name for name in ("shots", "backbone", "pretrained", "precision") if getattr(selection, name)}
    fixed |= {"recipe"} if training.recipe else set()
    fixed |= {f"recipe.{name}" for name in overrides(training)}
    fixed |= {f"options.{name}" for own in parse_options(training.option or (), methods).values() for name in own}
    for field in varied.keys() & fixed:
        raise UsageError(f"{field.rpartition('.')[2]} is varied and has one value as well: give one of them")


def _with_full(shots: Dimension, methods: Sequence[str]) -> Dimension:
    """Numbers of images, where `full` is said as --shots has it."""
    for value in shots.values:
        if isinstance(value, str) and value.lower() not in ("full", "all"):
            raise UsageError(f"shots: '{value}' is not a whole number of 0 or more, or full for every image")
    values = [0 if isinstance(value, str) else value for value in shots.values]
    return dimension(shots.field, values, methods) if shots.kind == "list" else shots


def _one_of(what: str, name: str, known: tuple[str, ...]) -> str:
    if name in known:
        return name
    if what == "metric" and "test" in name:
        raise UsageError(f"--metric {name}: a sweep never chooses by test images; use {' or '.join(known)}")
    raise unknown_name(what, name, known)


def _classes(given: str, metric: str) -> str:
    if metric == "held-out":
        if given not in ("", "base", "dev-base"):
            raise UsageError(f"--metric held-out trains on a half of the base classes: leave out --classes {given}")
        return "base"
    if given in ("", "base", "all"):
        return given or "base"
    if given in ("dev-base", "dev-novel"):
        raise UsageError(f"--classes {given}: for classes that are held out use --metric held-out")
    raise UsageError(f"--classes {given}: a sweep looks at base or all classes; novel ones stay unseen")


def _samples(text: str, datasets: Sequence[str], shots: int) -> str:
    from benchmarks.cli.data_few_shot import samples_digest

    return samples_digest(text, list(datasets), shots)


def _name(methods: Sequence[str], datasets: Sequence[str], fields: Mapping[str, Dimension]) -> str:
    words = ["-".join(methods), "-".join(datasets), "-".join(field.rpartition(".")[2] for field in fields)]
    return "-".join(filter(None, words))[:100]


def _check(settings: SweepSettings) -> None:
    space = settings.searched()
    if settings.search == "grid" and not space.listed:
        ranges = ", ".join(one.field for one in space.dimensions if one.kind != "list")
        raise UsageError(f"--search grid needs lists, and {ranges} is a range: use --search random or tpe")
    if settings.search == "grid" and (space.size or 0) > MOST_LISTED and settings.trials is None:
        raise UsageError(f"a grid of {space.size:,} configurations: use --search random or tpe, or --trials N")
    if space.size is None and settings.trials is None and settings.hours is None:
        raise UsageError(f"--search {settings.search} over a range never ends by itself: give --trials or --hours")
    if settings.varies_data and (settings.search == "tpe" or settings.stop == "asha"):
        how = "--search tpe" if settings.search == "tpe" else "--stop asha"
        raise UsageError(
            f"{how} compares configurations, and figures of different data sets do not compare: --datasets averages "
            "over them, or give each a sweep of its own"
        )
    if settings.search == "tpe" and not space.dimensions:
        raise UsageError("--search tpe has nothing to choose: give --vary, for example --vary 'lr=log(1e-5,1e-2)'")
