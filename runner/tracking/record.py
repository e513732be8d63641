"""What a tracker is told about a run, from the files of its folder alone: parameters, tags, curves, final figures."""

from __future__ import annotations

import getpass
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.config import RunConfig
from runner.naming import run_name
from runner.results import (
    EpochLog,
    EvalResult,
    Progress,
    RankUse,
    RunFolder,
    TrainResult,
    ValidationCount,
    harmonic_mean,
    read_document,
)

MEGABYTE = 1e6


@dataclass(frozen=True)
class Point:
    """One value of one metric; `when` is in milliseconds since 1970."""

    key: str
    value: float
    when: int
    step: int = 0


@dataclass(frozen=True)
class Record:
    """Everything there is to send of one run.

    name: gives what people call the run, which takes torch to find out.
    dataset, manifest_digest: what was trained on; the digest is None before the training has finished.
    attempt: tells this training from another one of the same configuration; None while there is nothing to send.
    points: final figures by the file they come from, relative to the run's folder.
    files: SHA-256 of each file to attach, by its path relative to the run's folder.
    status: MLflow's word for the state of the run. start, end: milliseconds since 1970.
    """

    name: Callable[[], str]
    dataset: str
    manifest_digest: str | None
    params: dict[str, str]
    tags: dict[str, str]
    attempt: str | None
    epochs: list[EpochLog]
    points: dict[str, list[Point]]
    files: dict[str, str]
    status: str
    start: int
    end: int | None

    def epoch_points(self, after: int) -> Iterator[list[Point]]:
        """The metrics of each epoch later than epoch `after`, on the clock that the epochs' own seconds make."""
        clock = float(self.start)
        for epoch in self.epochs:
            clock += 1000 * epoch.seconds
            if epoch.epoch > after:
                yield [Point(key, value, int(clock), epoch.epoch) for key, value in _epoch_metrics(epoch).items()]


def read_record(folder: RunFolder) -> Record | None:
    """The record of `folder`, None where no run was begun. Raises UserError for a broken file."""
    config = folder.config()
    if config is None:
        return None
    train = folder.train()
    progress = None if train else folder.progress()
    if train is None and progress is None:
        # The run may have finished, and its progress gone, between the two looks.
        train = folder.train()
    said: TrainResult | Progress | None = train or progress
    epochs = list(said.epochs) if said else []
    start = _modified(folder.config_file)
    points: dict[str, list[Point]] = {}
    files = {folder.config_file.name: _sha256(folder.config_file)}
    if counts := folder.validation():
        name, when = folder.validation_file.name, _modified(folder.validation_file)
        points[name] = [Point(key, value, when) for key, value in _validation_metrics(config, counts).items()]
        files[name] = _sha256(folder.validation_file)
    if train:
        when = _modified(folder.train_file)
        points[folder.train_file.name] = [Point(key, value, when) for key, value in _train_metrics(train).items()]
        files[folder.train_file.name] = _sha256(folder.train_file)
        if folder.checkpoint_file.exists():
            files[folder.checkpoint_file.name] = _sha256(folder.checkpoint_file)
        points |= _eval_points(config, folder)
        files |= {name: _sha256(folder.path / name) for name in points if name not in files}
    return Record(
        name=partial(run_name, config),
        dataset=config.dataset,
        manifest_digest=train.manifest_digest if train else None,
        params=dict(_flat(config.model_dump(mode="json"))),
        tags=_tags(config, folder, said.environment if said else {}) | ({"gpus": str(_gpus(train))} if train else {}),
        attempt=_attempt(epochs, files.get(folder.train_file.name)),
        epochs=epochs,
        points=points,
        files=files,
        status=_status(train, progress),
        start=start,
        end=_modified(folder.train_file) if train else None,
    )


def _attempt(epochs: list[EpochLog], train_digest: str | None) -> str | None:
    # The first epoch's row keeps its measured seconds when a run goes on after a kill; no second attempt repeats them.
    if epochs:
        return hashlib.sha256(epochs[0].model_dump_json().encode()).hexdigest()
    return train_digest


def _status(train: TrainResult | None, progress: Progress | None) -> str:
    if train:
        return "FINISHED"
    said = progress.status if progress else "running"
    return {"running": "RUNNING", "paused": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}[said]


def _epoch_metrics(epoch: EpochLog) -> dict[str, float]:
    metrics = {"loss": sum(epoch.terms.values()), **{f"loss/{name}": value for name, value in epoch.terms.items()}}
    metrics |= {"lr": epoch.lr, "epoch_seconds": epoch.seconds}
    return metrics | _known({"images_per_second": epoch.images_per_second})


def _train_metrics(train: TrainResult) -> dict[str, float]:
    use, peak = train.use, train.peak_memory_bytes
    return _known(
        {
            "train_seconds": train.seconds,
            "epochs": len(train.epochs),
            "gpus": _gpus(train),
            "train_images_per_second": train.images_per_second,
            "train_images_per_second_model": train.images_per_second_model,
            "trainable_parameters": train.trainable_parameters,
            **{f"phase/{name}_seconds": seconds for name, seconds in train.phases.items()},
            "system/cpu_percent": use.cpu_percent,
            "system/gpu_percent": use.gpu_percent,
            "system/gpu_watts": use.gpu_watts,
            "system/peak_memory_megabytes": peak.process / MEGABYTE,
            "system/peak_gpu_memory_megabytes": None if peak.gpu is None else peak.gpu / MEGABYTE,
            "world_size": len(train.ranks) or None,
            **{name: value for rank, use in enumerate(train.ranks) for name, value in _rank_metrics(rank, use).items()},
        }
    )


def _gpus(train: TrainResult) -> int:
    return max(1, len(train.ranks)) if train.environment.get("gpu") else 0


def _rank_metrics(rank: int, use: RankUse) -> dict[str, float | None]:
    peak = use.peak_memory_bytes
    figures = {
        "images_per_second": use.images_per_second,
        "data_share": use.data_share,
        "communication_share": use.communication_share,
        "peak_memory_megabytes": peak.process / MEGABYTE,
        "peak_gpu_memory_megabytes": None if peak.gpu is None else peak.gpu / MEGABYTE,
    }
    return {f"rank/{rank}/{name}": value for name, value in figures.items()}


def _eval_points(config: RunConfig, folder: RunFolder) -> dict[str, list[Point]]:
    points: dict[str, list[Point]] = {}
    own: dict[str, dict[str, tuple[str, EvalResult, int]]] = {"test": {}, "val": {}}
    for path in folder.eval_files():
        result = read_document(path, EvalResult)
        if result is None:
            continue
        name, when = f"eval/{path.name}", _modified(path)
        dataset, classes, split = result.target.split(":")
        points[name] = [Point(key, value, when) for key, value in _eval_metrics(result).items()]
        if dataset == config.dataset and split in own and not result.limited:
            own[split][classes] = (name, result, when)
    for split, results in own.items():
        # Validation chooses, test reports: their figures never stand in one column.
        prefix = "" if split == "test" else f"{split}_"
        for name, when, key, value in _own_metrics(results):
            points[name].append(Point(f"{prefix}{key}", value, when))
    return points


def _validation_metrics(config: RunConfig, counts: list[ValidationCount]) -> dict[str, float]:
    """Of the last epoch that was validated, on the run's own data set."""
    latest = {count.target: count.accuracy for count in counts if count.epoch == counts[-1].epoch}
    own = {}
    for target, accuracy in latest.items():
        dataset, classes, _ = target.split(":")
        if dataset == config.dataset:
            own[classes] = accuracy
    mean = _harmonic_mean(own)
    return {f"val_{name}": value for name, value in {**own, **({} if mean is None else {"hm": mean})}.items()}


def _harmonic_mean(accuracies: Mapping[str, float]) -> float | None:
    """Of the two halves that the classes are divided into, None where one is missing."""
    for halves in (("base", "novel"), ("dev-base", "dev-novel")):
        if all(half in accuracies for half in halves):
            return harmonic_mean(*(accuracies[half] for half in halves))
    return None


def _own_metrics(results: Mapping[str, tuple[str, EvalResult, int]]) -> Iterator[tuple[str, int, str, float]]:
    """Figures over the run's own data set: the file each comes with, when, its name, its value."""
    for classes, (name, result, when) in results.items():
        yield name, when, classes, result.accuracy
    common: dict[str, float] = {}
    if (mean := _harmonic_mean({classes: result.accuracy for classes, (_, result, _) in results.items()})) is not None:
        common["hm"] = mean
    timed = [result for _, result, _ in results.values()]
    if timed and all(result.images_per_second for result in timed):
        seconds = sum(result.total / (result.images_per_second or 1.0) for result in timed)
        common["fps"] = sum(result.total for result in timed) / seconds
    # Whichever half comes last brings the common figures with it, and a repeated half renews them.
    latest = max((when for _, _, when in results.values()), default=0)
    for name, _, _ in results.values():
        yield from ((name, latest, key, value) for key, value in common.items())


def _eval_metrics(result: EvalResult) -> dict[str, float]:
    target = result.target.replace(":", "-")
    # A part of the test images is another figure than all of them and must not stand in the same column.
    first = f"-first-{result.total}" if result.limited else ""
    return _known(
        {
            f"accuracy/{target}{first}": result.accuracy,
            f"fps/{target}{first}": result.images_per_second,
            f"fps_model/{target}{first}": result.images_per_second_model,
        }
    )


def _tags(config: RunConfig, folder: RunFolder, environment: Mapping[str, Any]) -> dict[str, str]:
    git = environment.get("git") or {}
    tags = {
        "method": config.method,
        "dataset": config.dataset,
        "classes": config.classes,
        "shots": config.shots,
        "seed": config.seed,
        "backbone": config.backbone,
        "recipe": config.recipe_name,
        "precision": config.precision,
        "config_hash": config.hash,
        "device": environment.get("gpu") or environment.get("device"),
        "commit": git.get("commit") and git["commit"] + ("+changes" if git.get("dirty") else ""),
        "folder": folder.path.resolve(),
        "mlflow.source.git.commit": git.get("commit"),
    }
    return user_tags() | {name: str(value) for name, value in tags.items() if value is not None}


def user_tags() -> dict[str, str]:
    """Who sends, and with what."""
    tags = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
