"""Describe a run, a suite or a sweep for MLflow from the files of its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean

from procap.errors import UserError
from procap.recipe import format_value
from runner.config import RunConfig
from runner.results import EpochLog, EvalResult, TrainResult, ValidationCount, harmonic_mean
from runner.run_collection import Collection
from runner.run_folders import RunFolder

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "interrupted": "KILLED"}
"""MLflow's status of a run or a collection."""

Metrics = dict[str, float]


@dataclass
class Content:
    """What MLflow shows of a run or collection.

    started, ended: in milliseconds since 1970. metrics: name, value, milliseconds since 1970 and step of each.
    inputs: name, digest and context of data sets.
    """

    name: str
    status: str
    tags: dict[str, str]
    started: int
    ended: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: list[tuple[str, float, int, int]] = field(default_factory=list)
    inputs: list[tuple[str, str, str]] = field(default_factory=list)


def run_content(folder: RunFolder, started: int | None, now: int) -> Content | None:
    """Describe a run; None before the end of its first epoch. Raises UserError for a broken file.

    started: when its MLflow run starts, if it exists.
    """
    import pandas as pd

    config, state = folder.config(), folder.train() or folder.progress()
    if config is None or state is None or not (state.epochs or isinstance(state, TrainResult)):
        return None
    ended = _milliseconds(state.written) if isinstance(state, TrainResult) else None
    started = started or (ended or now) - int(1000 * state.seconds)
    shots = f"{config.shots or 'all'} shots"
    name = " · ".join((config.method, config.dataset, config.classes, shots, f"seed {config.seed}"))
    tags = {"config_hash": config.hash, "folder": str(folder.path.resolve())}
    tags["device"] = str(state.environment.get("gpu") or state.environment.get("device"))
    if source := state.environment.get("git"):
        tags["mlflow.source.git.commit"] = str(source["commit"])
    # MLflow's parameters are not nested: this makes names such as recipe.lr.
    [fields] = pd.json_normalize(config.model_dump(mode="json")).to_dict("records")
    params = {str(name): format_value(value) for name, value in fields.items()}
    metrics = list(_epoch_metrics(state.epochs, folder.validation(), config.dataset, started))
    inputs = []
    if isinstance(state, TrainResult):
        evaluations = folder.evaluations()
        metrics += [(name, value, now, 0) for name, value in result_metrics(config, state, evaluations).items()]
        inputs = [(config.dataset, state.manifest_digest, "training")]
        inputs += [(result.target, result.manifest_digest, "evaluation") for result in evaluations]
    return Content(name, STATUS[state.status], tags, started, ended, params, metrics, inputs)


def _epoch_metrics(
    logs: Sequence[EpochLog], counts: Sequence[ValidationCount], dataset: str, started: int
) -> Iterator[tuple[str, float, int, int]]:
    """Yield the metrics of the epochs; their times follow from their seconds, so that they are logged only once."""
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
    timed = [(result.total, result.images_per_second) for result in whole if result.images_per_second]
    if timed and len(timed) == len(whole):
        # All images by the seconds of all targets: a mean of rates would count small targets as much as large ones.
        metrics["fps"] = sum(images for images, _ in timed) / sum(images / rate for images, rate in timed)
    return metrics | {"train_seconds": train.seconds}


def collection_content(collection: Collection, results: Path, now: int) -> Content:
    """Describe a suite or sweep with accuracy, FPS and training seconds of each method, and a sweep's best score.

    Accuracies are those of the tables (`hm/procap`), else means over the runs; FPS and seconds are means over the runs.
    The settings are tags, as parameters of MLflow cannot change later.
    """
    by_method: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in collection.runs:
        folder = RunFolder(results / path)
        with suppress(UserError):
            if (config := folder.config()) and (train := folder.train()):
                for name, value in result_metrics(config, train, folder.evaluations()).items():
                    by_method[config.method][name].append(value)
    tags = {collection.kind: collection.name, "folder": str((results / collection.path).resolve())}
    tags |= {f"settings.{name}": format_value(value) for name, value in collection.settings.items()}
    name, status = f"{collection.kind} · {collection.name}", STATUS[collection.status]
    content = Content(name, status, tags, collection.started, collection.ended)
    for method, values in by_method.items():
        means = {name: fmean(values[name]) for name in ("accuracy", "fps", "train_seconds") if values[name]}
        if f"hm/{method}" in collection.metrics:
            means["accuracy"] = collection.metrics[f"hm/{method}"]
        content.metrics += [(f"{name}/{method}", mean, collection.ended or now, 0) for name, mean in means.items()]
    best = {name: value for name, value in collection.metrics.items() if name.startswith("best/")}
    content.metrics += [(name, value, collection.ended or now, 0) for name, value in best.items()]
    return content


def _milliseconds(written: str) -> int:
    """Convert the time when a result was written to milliseconds since 1970."""
    return int(datetime.fromisoformat(written).timestamp() * 1000)
