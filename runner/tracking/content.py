"""Describe a run, a suite or a sweep for MLflow from the files of its folder."""

from __future__ import annotations

import getpass
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from procap.errors import UserError
from procap.recipe import format_value
from runner.config import RunConfig
from runner.planning import changed_settings
from runner.results import EpochLog, EvalResult, Progress, TrainResult, harmonic_mean
from runner.run_collection import Collection
from runner.run_folders import RunFolder

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "interrupted": "KILLED"}
"""MLflow's status of a run or a collection."""

MOST_METRICS = 15
"""Metrics of a run: MLflow's comparison shows all of them, in alphabetical order."""

MOST_NAMED = 4
"""Largest number of settings that differ from the published ones in the name of a run."""

MAX_NAME = 250
"""Largest number of characters of a name in MLflow."""

Metrics = dict[str, float]


def name_run(config: RunConfig) -> str:
    """Name a run, with the settings that differ from those published for the task if they are few."""
    recipe, changes = config.recipe_name, list[str]()
    # The plug-in may not be installed here.
    with suppress(UserError):
        options, fields = changed_settings(config, recipe="procap" if recipe == "procap" else "published")
        changed = options | (fields if recipe == "custom" else {})
        changes = [f"{name} {value}" for name, value in changed.items()]
    if recipe != "published" and not (recipe == "custom" and changes):
        changes = [f"{recipe} recipe", *changes]
    if len(changes) > MOST_NAMED:
        changes = [f"{recipe} recipe"]
    shots = [f"{config.shots or 'full'} shot{'s' * (config.shots != 1)}"] if config.recipe.epochs else []
    return " · ".join([config.method, config.dataset, config.classes, *shots, f"seed {config.seed}", *changes])


def describe_run(config: RunConfig, state: TrainResult | Progress, folder: Path) -> dict[str, str]:
    """Return the tags of a run."""
    environment, git = state.environment, state.environment.get("git") or {}
    names = ("method", "dataset", "classes", "shots", "seed", "backbone", "precision")
    tags = {name: getattr(config, name) for name in names} | {
        "recipe": config.recipe_name,
        "config_hash": config.hash,
        "device": environment.get("gpu") or environment.get("device"),
        "folder": folder.resolve(),
        "mlflow.source.git.commit": git.get("commit"),
    }
    if isinstance(state, TrainResult):
        tags |= {"processes": state.processes, "imported": state.imported and state.imported.sha256}
    return _source_tags() | {name: str(value) for name, value in tags.items() if value is not None}


def describe_collection(collection: Collection, folder: Path) -> dict[str, str]:
    """Return the tags of a suite or a sweep. Settings are tags, as parameters of MLflow cannot change later."""
    tags = {collection.kind: collection.name, "folder": str(folder.resolve())}
    for name, value in collection.settings.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        tags[make_name(f"settings.{name}")] = text
    return _source_tags() | tags


def _source_tags() -> dict[str, str]:
    tags = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the parameters of a nested document."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield make_name(f"{prefix}{name}"), format_value(value)


def epoch_metrics(log: EpochLog) -> Metrics:
    """Return the metrics of an epoch."""
    metrics = {"training/loss": sum(log.terms.values()), "training/lr": log.lr, "training/epoch_seconds": log.seconds}
    if log.images_per_second is not None:
        metrics["training/images_per_second"] = log.images_per_second
    return metrics | {make_name(f"training/loss_{name}"): value for name, value in log.terms.items()}


def result_metrics(config: RunConfig, train: TrainResult, evaluations: Sequence[EvalResult]) -> Metrics:
    """Return accuracies in percent, FPS and seconds of a finished run; their names sort in this order.

    `accuracy` is the harmonic mean over base and novel classes of the run's data set, else the accuracy on its classes.
    Results of a part of the images or under other settings than the default are left out.
    """
    whole = [result for result in evaluations if not result.limited and not result.settings.label]
    accuracies: Metrics = {}
    for result in whole:
        dataset, classes, split = result.target.split(":")
        name = classes if dataset == config.dataset else f"{dataset}-{classes}"
        accuracies[name if split == "test" else f"{name}-{split}"] = result.accuracy
    metrics = {make_name(f"accuracy/{name}"): accuracy for name, accuracy in accuracies.items()}
    if {"base", "novel"} <= accuracies.keys():
        metrics = {"accuracy": harmonic_mean(accuracies["base"], accuracies["novel"]), **metrics}
    elif config.classes in accuracies:
        metrics = {"accuracy": accuracies[config.classes], **metrics}
    timed = [result for result in whole if result.images_per_second]
    if timed and len(timed) == len(whole):
        seconds = sum(result.total / (result.images_per_second or 1.0) for result in timed)
        metrics["fps"] = sum(result.total for result in timed) / seconds
    metrics["train_seconds"] = train.seconds
    # The epochs have at least four metrics of their own.
    headlines = ("accuracy", "fps", "train_seconds")
    others = islice((name for name in metrics if name not in headlines), MOST_METRICS - len(headlines) - 4)
    kept = {*headlines, *others}
    return {name: value for name, value in metrics.items() if name in kept}


def collection_metrics(collection: Collection, results: Path) -> Metrics:
    """Return accuracy, FPS and training seconds of each method of a suite or sweep, the last five methods of many.

    Accuracies are those of the tables (`hm/procap`), else means over the runs; FPS and seconds are means over the runs.
    """
    by_method: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in collection.runs:
        folder = RunFolder(results / path)
        with suppress(UserError):
            if (config := folder.config()) and (train := folder.train()):
                for name, value in result_metrics(config, train, folder.evaluations()).items():
                    by_method[config.method][name].append(value)
    metrics: Metrics = {}
    for method in [*by_method][-(MOST_METRICS // 3) :]:
        values = by_method[method]
        accuracy = collection.metrics.get(f"hm/{method}", fmean(values["accuracy"]) if values["accuracy"] else None)
        if accuracy is not None:
            metrics[make_name(f"accuracy/{method}")] = accuracy
        for name in ("fps", "train_seconds"):
            if values[name]:
                metrics[make_name(f"{name}/{method}")] = fmean(values[name])
    return metrics


def milliseconds(written: str) -> int:
    """Convert the time when a result was written to milliseconds since 1970."""
    return int(datetime.fromisoformat(written).timestamp() * 1000)


def make_name(text: str) -> str:
    """Make a name that MLflow accepts for a metric, a parameter or a tag; it has to be a normal relative path."""
    parts = re.sub(r"[^/\w.\- ]", "_", text)[:MAX_NAME].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
