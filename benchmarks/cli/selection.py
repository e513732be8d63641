"""From flags to runs: what a person types becomes `RunConfig`s, targets and a `RuntimeConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli.flags import EngineFlags, RecipeFlags, RuntimeFlags, SelectionFlags
from benchmarks.console.parse import (
    parse_datasets,
    parse_integers,
    parse_methods,
    parse_options,
    parse_shot_count,
    parse_value,
    split_names,
)
from procap.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from runner.config import RunConfig, RuntimeConfig, Target


def overrides(training: RecipeFlags) -> dict[str, Any]:
    """The recipe fields that flags change. Raises UsageError for what is not key=value, or is said twice."""
    given = {"epochs": training.epochs, "batch_size": training.batch_size, "lr": training.lr}
    changes = {name: value for name, value in given.items() if value is not None}
    for item in training.recipe_field or ():
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--recipe-field {item}: write it as key=value, for example --recipe-field flip=false")
        if key.strip() in changes:
            raise UsageError(f"--recipe-field {item}: {key.strip()} is given already")
        changes[key.strip()] = parse_value(text)
    return changes


def configs(selection: SelectionFlags, training: RecipeFlags, data: Path | None = None) -> list[RunConfig]:
    """Every run that the flags describe, method by method within a data set, seeds innermost.

    data: where the data sets are packed.
    """
    from benchmarks.cli.data_few_shot import samples_digest
    from runner.config import plan_run

    methods = parse_methods(selection.methods)
    datasets = parse_datasets(selection.datasets, data)
    options = parse_options(training.option or (), methods)
    shots = parse_shot_count(selection.shots or "16")
    samples = samples_digest(training.few_shot_samples, datasets, shots)
    return [
        plan_run(
            method=method,
            dataset=dataset,
            classes=selection.classes or "base",
            shots=shots,
            seed=seed,
            backbone=selection.backbone or "mini",
            pretrained=selection.pretrained or None,
            precision=selection.precision or "fp32",
            recipe=training.recipe or "published",
            overrides=overrides(training),
            options=options[method],
            picks=samples,
            data=data,
        )
        for dataset in datasets
        for method in methods
        for seed in (parse_integers(selection.seeds, "--seeds") or [1])
    ]


def targets_of(config: RunConfig, text: str = "", data: Path | None = None) -> list[Target]:
    """The targets named in `text`; without any, the halves (or all classes) of the data set that was trained on.

    A run on a half of the base half is there to choose by: it is evaluated on val (on train where a set has no val, as
    ImageNet), and the test split is left alone.
    """
    from runner.config import Target
    from shards.resolve import known

    if split_names(text):
        return [Target.parse(part, data) for part in split_names(text)]
    if config.classes.startswith("dev-"):
        split = "val" if "val" in known(config.dataset, data).counts else "train"
        return [Target.recorded(f"{config.dataset}:{half}:{split}") for half in ("dev-base", "dev-novel")]
    halves = ("all",) if config.classes == "all" else ("base", "novel")
    return [Target.recorded(f"{config.dataset}:{half}") for half in halves]


def workplace(
    place: RuntimeFlags, limit: int | None = None, features: Path | None = None, parallel: EngineFlags | None = None
) -> RuntimeConfig:
    """Where and how the runs happen. Raises UsageError where a file is in the place of a folder.

    features: where image features are kept, None to compute them every time.
    """
    from runner.config import RuntimeConfig

    parallel = parallel or EngineFlags()
    data, (results, store) = place.data_root(), place.results_root()
    for flag, folder in (("--data", data), ("--results", results)):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{flag} {folder} is a file; name a folder")
    return RuntimeConfig(
        data=data,
        results=results,
        device=place.device,
        workers=place.workers,
        limit=limit,
        tracking_uri=place.tracking or None,
        log_checkpoints=place.log_checkpoints,
        features=features,
        accelerate=place.accelerate,
        timeout=place.timeout,
        engine=parallel.engine,
        zero_stage=parallel.zero_stage,
        deepspeed_json=parallel.deepspeed_config,
        store=store,
        no_cache=place.no_cache,
    )


def results_at(given: str) -> Path:
    """The folder of the results that `--results` names; of a URL, with every document that is there."""
    from runner.remote_results import RemoteResults, results_root
    from shards.home import cache_home

    folder, url = results_root(given, cache_home())
    RemoteResults(url, folder).pull_all()
    return folder


def chooser(selection: SelectionFlags, recorded: Callable[[], Iterable[str]]) -> Callable[[RunConfig], bool]:
    """Whether a run that is there is among those that the flags select; a flag that was not given selects all.

    recorded: the data sets of the runs that are there, asked only for names that the catalogue does not have.
    Raises UsageError or DataUsageError for an unknown method or data set.
    """
    from procap.methods import method_paths

    wanted: Mapping[str, list[Any]] = {
        "method": split_names(selection.methods),
        "dataset": [_recorded_name(name, recorded) for name in split_names(selection.datasets)],
        "seed": parse_integers(selection.seeds, "--seeds"),
        "shots": [parse_shot_count(selection.shots)] if selection.shots else [],
        "classes": split_names(selection.classes),
        "backbone": split_names(selection.backbone),
        "pretrained": split_names(selection.pretrained),
        "precision": split_names(selection.precision),
    }
    known = method_paths()
    for name in wanted["method"]:
        if name not in known:
            raise unknown_name("method", name, known)
    return lambda config: all(not values or getattr(config, field) in values for field, values in wanted.items())


def _recorded_name(name: str, recorded: Callable[[], Iterable[str]]) -> str:
    from shards.catalogue import CATALOGUE, find
    from shards.errors import DataUsageError

    try:
        return find(name).name
    except DataUsageError:
        own = set(recorded())
        if name.lower() in own:
            return name.lower()
        raise unknown_name("data set", name, own | set(CATALOGUE)) from None
