"""Describe runs, suites and sweeps for MLflow from their result files."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from procap.errors import UserError
from procap.methods import method_paths, title_and_colour
from procap.recipe import format_value
from runner.config import RunConfig
from runner.results import EpochLog, EvalResult, TrainResult, ValidationCount, harmonic_mean
from runner.run_collection import Collection, read_collections
from runner.run_folders import OnError, RunFolder, find_runs

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "interrupted": "KILLED"}
"""MLflow's status of a run or a collection."""

DESCRIPTION = "mlflow.note.content"
TABLE_START = "| method |"
"""How descriptions begin that this program has written."""

COLUMNS = ("method", "accuracy", "FPS", "training s")
DIGITS = {"accuracy": 2, "fps": 0, "train_seconds": 1}
"""Metrics of the description, and their digits after the point."""


@dataclass
class Content:
    """What MLflow shows of a run or collection.

    started, ended: in milliseconds since 1970. metrics: accuracies, FPS and seconds.
    curves: name, value, milliseconds since the start and epoch of each metric of an epoch.
    inputs: name, digest and context of data sets. parent: path of the collection that a run is nested below.
    replaces_metrics: those of an earlier command, as a collection does whose command has ended with results.
    """

    name: str
    status: str
    tags: dict[str, str]
    started: int
    ended: int | None
    metrics: dict[str, float]
    params: dict[str, str] = field(default_factory=dict)
    curves: list[tuple[str, float, int, int]] = field(default_factory=list)
    inputs: list[tuple[str, str, str]] = field(default_factory=list)
    parent: str = ""
    replaces_metrics: bool = False


def read_contents(results: Path, on_error: OnError, only: Iterable[str] | None = None) -> dict[str, Content]:
    """Describe the collections of `results`, then the runs, by their paths; broken files are passed to `on_error`.

    only: paths of runs and collections; the collections of these runs are described as well.
    """
    collections = read_collections(results, on_error)
    if only is None:
        exported = {run.path.relative_to(results).as_posix() for run in find_runs(results)}
    else:
        exported = {*only}
        collections = [each for each in collections if not exported.isdisjoint({each.path, *each.runs})]
    runs: dict[str, Content] = {}
    for path in sorted(exported.union(*(collection.runs for collection in collections))):
        try:
            # The folder of a collection has no content of a run.
            if content := run_content(RunFolder(results / path)):
                runs[path] = content
        except UserError as error:
            on_error(path, error)
    parents = {}
    for collection in collections:
        children = [runs[path] for path in collection.runs if path in runs]
        parents[collection.path] = collection_content(collection, results / collection.path, children)
        # A run can belong to several collections, but MLflow nests it below one: the earliest; the others only tag it.
        for child in children:
            child.parent = child.parent or collection.path
            child.tags[f"{collection.kind}.{collection.name}"] = "yes"
    # Other runs of the collections have only been read for their figures.
    return parents | {path: run for path, run in runs.items() if path in exported}


def run_content(folder: RunFolder) -> Content | None:
    """Describe a run; None before the end of its first epoch. Raises UserError for a broken file."""
    config, state = folder.read_config(), folder.read_training() or folder.read_progress()
    if config is None or state is None or not (state.epochs or isinstance(state, TrainResult)):
        return None
    ended, metrics, inputs = None, {}, []
    if isinstance(state, TrainResult):
        ended, evaluations = int(1000 * datetime.fromisoformat(state.written).timestamp()), folder.read_evaluations()
        metrics = result_metrics(config, evaluations)
        # Zero-shot CLIP and imported weights have no training here.
        if config.recipe.epochs and not state.imported:
            metrics["train_seconds"] = state.seconds
        inputs = [(config.dataset, state.manifest_digest, "training")]
        inputs += [(result.target, result.manifest_digest, "evaluation") for result in evaluations]
    started = (ended or time.time_ns() // 1_000_000) - int(1000 * state.seconds)
    shots = f"{config.shots or 'all'} shots"
    name = " · ".join((config.method, config.dataset, config.classes, shots, f"seed {config.seed}"))
    tags = {"config_hash": config.hash, "folder": str(folder.path.resolve())}
    tags["device"] = str(state.environment.get("gpu") or state.environment.get("device"))
    if source := state.environment.get("git"):
        tags["mlflow.source.git.commit"] = str(source["commit"])
    params: dict[str, str] = {}
    for key, value in config.model_dump(mode="json").items():
        # MLflow's parameters are not nested: this makes names such as recipe.lr.
        parts = {f"{key}.{part}": each for part, each in value.items()} if isinstance(value, dict) else {key: value}
        params |= {part: format_value(each) for part, each in parts.items()}
    curves = list(_epoch_curves(state.epochs, folder.read_validation(), config.dataset))
    return Content(name, STATUS[state.status], tags, started, ended, metrics, params, curves, inputs)


def _epoch_curves(
    logs: Sequence[EpochLog], counts: Sequence[ValidationCount], dataset: str
) -> Iterator[tuple[str, float, int, int]]:
    """Yield the metrics of the epochs; their times follow from their seconds, so that they are logged only once."""
    on_own_set = [count for count in counts if count.target.startswith(f"{dataset}:")]
    clock = 0.0
    for log in logs:
        clock += 1000 * log.seconds
        metrics = {"training/loss": sum(log.terms.values()), "training/lr": log.lr}
        if log.images_per_second is not None:
            metrics["training/images_per_second"] = log.images_per_second
        if len(log.terms) > 1:
            metrics |= {f"training/loss_{name}": value for name, value in log.terms.items()}
        if accuracies := [count.accuracy for count in on_own_set if count.epoch == log.epoch]:
            metrics["validation/accuracy"] = statistics.harmonic_mean(accuracies)
        for name, value in metrics.items():
            yield name, value, int(clock), log.epoch


def result_metrics(config: RunConfig, evaluations: Iterable[EvalResult]) -> dict[str, float]:
    """Return accuracies in percent and FPS of a finished run, few enough for MLflow's pages.

    `accuracy` is the harmonic mean over base and novel classes of the run's data set, after all classes the accuracy on
    them; `accuracy/transfer` the mean over other sets. Limited results, and those under other settings, are left out.
    """
    whole = [result for result in evaluations if not result.limited and not result.settings.name]
    metrics: dict[str, float] = {}
    transfer = []
    for result in whole:
        dataset, classes, split = result.target.split(":")
        if dataset == config.dataset:
            metrics[f"accuracy/{classes}" if split == "test" else f"accuracy/{classes}-{split}"] = result.accuracy
        elif split == "test":
            transfer.append(result.accuracy)
    if transfer:
        metrics["accuracy/transfer"] = statistics.fmean(transfer)
    if config.classes != "all" and {"accuracy/base", "accuracy/novel"} <= metrics.keys():
        metrics["accuracy"] = harmonic_mean(metrics["accuracy/base"], metrics["accuracy/novel"])
    elif config.classes != "base" and f"accuracy/{config.classes}" in metrics:
        metrics["accuracy"] = metrics[f"accuracy/{config.classes}"]
    rates = [result.images_per_second for result in whole if result.images_per_second]
    if whole and len(rates) == len(whole):
        # All images by the seconds of all targets: a mean of rates would count small targets as much as large ones.
        metrics["fps"] = statistics.harmonic_mean(rates, weights=[result.total for result in whole])
    return metrics


def method_rows(metrics: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Format title, accuracy, FPS and training seconds of methods (`COLUMNS`), the best accuracy first."""
    methods = sorted({name.partition("/")[2] for name in metrics if name.startswith(("accuracy/", "fps/"))})
    methods.sort(key=lambda method: -metrics.get(f"accuracy/{method}", 0.0))
    rows = []
    for method in methods:
        values = {name: metrics.get(f"{name}/{method}") for name in DIGITS}
        cells = ["-" if value is None else f"{value:.{DIGITS[name]}f}" for name, value in values.items()]
        rows.append((title_and_colour(method)[0] if method in method_paths() else method, *cells))
    return rows


def collection_content(collection: Collection, folder: Path, runs: Iterable[Content]) -> Content:
    """Describe a suite or sweep with accuracy, FPS and training seconds of each method, and a sweep's best score.

    Accuracies are those of the tables (`hm/procap`, `accuracy/procap`); FPS and seconds are means over the runs.
    The settings are tags, as parameters of MLflow cannot change later.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name in {"fps", "train_seconds"} & run.metrics.keys():
            values[f"{name}/{run.params['method']}"].append(run.metrics[name])
    metrics = {name: statistics.fmean(each) for name, each in values.items()}
    for name, value in collection.metrics.items():
        kind, _, of = name.partition("/")
        metrics[f"accuracy/{of}" if kind == "hm" else name] = value
    tags = {collection.kind: collection.name, "folder": str(folder.resolve())}
    tags |= {f"settings.{name}": format_value(value) for name, value in collection.settings.items() if value}
    if values:
        table = [COLUMNS, ("---", *["---:"] * len(DIGITS)), *method_rows(metrics)]
        tags[DESCRIPTION] = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    name, status = f"{collection.kind} · {collection.name}", STATUS[collection.status]
    replaces = bool(collection.metrics)
    return Content(name, status, tags, collection.started, collection.ended, metrics, replaces_metrics=replaces)
