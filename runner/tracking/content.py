"""Describe a run, a suite or a sweep for MLflow from the files of its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from procap.errors import UserError
from procap.recipe import format_value
from runner.config import RunConfig
from runner.results import EpochLog, EvalResult, Progress, TrainResult, ValidationCount, harmonic_mean
from runner.run_collection import Collection
from runner.run_folders import RunFolder

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "interrupted": "KILLED"}
"""MLflow's status of a run or a collection."""

Metrics = dict[str, float]
TimedMetric = tuple[str, float, int, int]
"""Name, value, milliseconds since 1970 and step."""


@dataclass
class Content:
    """What MLflow shows of a run or collection.

    started, ended: in milliseconds since 1970. inputs: name, digest and context of data sets.
    """

    name: str
    status: str
    tags: dict[str, str]
    started: int
    ended: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[TimedMetric] = field(default_factory=list)
    inputs: list[tuple[str, str, str]] = field(default_factory=list)


def run_content(folder: RunFolder, started: int | None) -> Content | None:
    """Describe a run; None before the end of its first epoch. Raises UserError for a broken file.

    started: when its MLflow run starts, if it exists.
    """
    config, train = folder.config(), folder.train()
    # The run may finish, and its progress file be gone, between the two reads.
    state = train or folder.progress() or folder.train()
    if config is None or state is None or not (state.epochs or isinstance(state, TrainResult)):
        return None
    if started is None:
        written = state.written if isinstance(state, TrainResult) else datetime.now().isoformat()
        started = milliseconds(written) - int(1000 * state.seconds)
    shots = f"{config.shots or 'full'} shot{'s' * (config.shots != 1)}" if config.recipe.epochs else ""
    recipe = f"{config.recipe_name} recipe" if config.recipe_name != "published" else ""
    words = config.method, config.dataset, config.classes, shots, f"seed {config.seed}", recipe
    content = Content(" · ".join(filter(None, words)), STATUS[state.status], run_tags(config, state, folder), started)
    content.params = dict(flatten(config.model_dump(mode="json")))
    content.metrics = list(_epoch_metrics(state.epochs, folder.validation(), config.dataset, started))
    if isinstance(state, TrainResult):
        evaluations = folder.evaluations()
        content.ended = milliseconds(state.written)
        last = milliseconds(max([state.written, *(result.written for result in evaluations)]))
        for name, value in result_metrics(config, state, evaluations).items():
            content.metrics.append((name, value, content.ended if name == "train_seconds" else last, 0))
        content.inputs = [(config.dataset, state.manifest_digest, "training")]
        content.inputs += [(result.target, result.manifest_digest, "evaluation") for result in evaluations]
    return content


def run_tags(config: RunConfig, state: TrainResult | Progress, folder: RunFolder) -> dict[str, str]:
    """Return the tags of a run, by which MLflow's search finds it."""
    environment = state.environment
    names = ("method", "dataset", "classes", "shots", "seed", "backbone", "precision")
    tags = {name: getattr(config, name) for name in names} | {
        "recipe": config.recipe_name,
        "config_hash": config.hash,
        "device": environment.get("gpu") or environment.get("device"),
        "folder": folder.path.resolve(),
        "mlflow.source.git.commit": (environment.get("git") or {}).get("commit"),
    }
    return {name: str(value) for name, value in tags.items() if value is not None}


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the parameters of a nested document."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", format_value(value)


def _epoch_metrics(
    logs: Sequence[EpochLog], counts: Sequence[ValidationCount], dataset: str, started: int
) -> Iterator[TimedMetric]:
    """Yield the metrics of the epochs; their times follow from their seconds."""
    validation: dict[int, list[float]] = defaultdict(list)
    for count in counts:
        if count.target.startswith(f"{dataset}:"):
            validation[count.epoch].append(count.accuracy)
    clock = float(started)
    for log in logs:
        clock += 1000 * log.seconds
        metrics = {"training/loss": sum(log.terms.values()), "training/lr": log.lr}
        if log.images_per_second is not None:
            metrics["training/images_per_second"] = log.images_per_second
        if len(log.terms) > 1:
            metrics |= {f"training/loss_{name}": value for name, value in log.terms.items()}
        if accuracies := validation.get(log.epoch):
            metrics["validation/accuracy"] = harmonic_mean(*accuracies) if len(accuracies) == 2 else accuracies[0]
        for name, value in metrics.items():
            yield name, value, int(clock), log.epoch


def collection_content(collection: Collection, results: Path, now: int) -> Content:
    """Describe a suite or a sweep. Its settings are tags, as parameters of MLflow cannot change later."""
    tags = {collection.kind: collection.name, "folder": str((results / collection.path).resolve())}
    tags |= {f"settings.{name}": format_value(value) for name, value in collection.settings.items()}
    name, status = f"{collection.kind} · {collection.name}", STATUS[collection.status]
    content = Content(name, status, tags, collection.started, collection.ended)
    metrics = collection_metrics(collection, results)
    content.metrics = [(name, value, collection.ended or now, 0) for name, value in metrics.items()]
    return content


def result_metrics(config: RunConfig, train: TrainResult, evaluations: Iterable[EvalResult]) -> Metrics:
    """Return accuracies in percent, FPS and seconds of a finished run, few enough for MLflow's pages.

    `accuracy` is the harmonic mean over base and novel classes of the run's data set, else the accuracy on its classes;
    `accuracy/transfer` the mean over different data sets. Results of a part of the images or under settings that are
    not the default are left out.
    """
    whole = [result for result in evaluations if not result.limited and not result.settings.label]
    accuracies: Metrics = {}
    transfer: list[float] = []
    for result in whole:
        dataset, classes, split = result.target.split(":")
        if dataset == config.dataset:
            accuracies[classes if split == "test" else f"{classes}-{split}"] = result.accuracy
        elif split == "test":
            transfer.append(result.accuracy)
    metrics = {f"accuracy/{name}": accuracy for name, accuracy in accuracies.items()}
    if transfer:
        metrics["accuracy/transfer"] = fmean(transfer)
    if {"base", "novel"} <= accuracies.keys():
        metrics["accuracy"] = harmonic_mean(accuracies["base"], accuracies["novel"])
    elif config.classes in accuracies:
        metrics["accuracy"] = accuracies[config.classes]
    timed = [result for result in whole if result.images_per_second]
    if timed and len(timed) == len(whole):
        seconds = sum(result.total / (result.images_per_second or 1.0) for result in timed)
        metrics["fps"] = sum(result.total for result in timed) / seconds
    return metrics | {"train_seconds": train.seconds}


def collection_metrics(collection: Collection, results: Path) -> Metrics:
    """Return accuracy, FPS and training seconds of each method of a suite or sweep.

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
    for method, values in by_method.items():
        means = {name: fmean(values[name]) for name in ("accuracy", "fps", "train_seconds") if values[name]}
        if f"hm/{method}" in collection.metrics:
            means["accuracy"] = collection.metrics[f"hm/{method}"]
        metrics |= {f"{name}/{method}": mean for name, mean in means.items()}
    return metrics


def milliseconds(written: str) -> int:
    """Convert the time when a result was written to milliseconds since 1970."""
    return int(datetime.fromisoformat(written).timestamp() * 1000)
