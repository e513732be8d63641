"""Collect what MLflow shows of a run, a suite or a sweep from the files of its folder."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from procap.errors import UserError
from procap.recipe import format_value
from runner.config import RunConfig
from runner.planning import changed_settings
from runner.results import EpochLog, EvalResult, Progress, TrainResult, harmonic_mean
from runner.run_collection import FILE, Collection, read_collection
from runner.run_folders import RunFolder

MEGABYTE = 1e6
STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "paused": "KILLED", "interrupted": "KILLED"}
"""MLflow's status of a run or a collection."""

MOST_NAMED = 4
"""Largest number of settings that differ from the published ones in the name of a run."""

MAX_NAME = 250
"""Largest number of characters of a name in MLflow."""

Metrics = Mapping[str, float | None]


class Point(NamedTuple):
    """One value of a metric; `time` in milliseconds since 1970. step: None if a later value replaces it."""

    key: str
    value: float
    time: int
    step: int | None = None


@dataclass(frozen=True)
class RunContent:
    """The content that an MLflow run should have.

    key: differs between trainings of one configuration, so that two users of one server get a run each.
    name: makes the name, for which the method is imported, and with it torch.
    points: in the order in which MLflow's comparison shows their metrics.
    status: a name of MLflow's RunStatus. start, end: in milliseconds. checkpoint: SHA-256 of a finished run's.
    """

    key: str
    name: Callable[[], str]
    tags: dict[str, str]
    points: list[Point]
    status: str
    start: int
    end: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    checkpoint: str | None = None


def read_content(path: Path) -> RunContent | None:
    """Read the content of a run or a collection from its folder; None for a run before the end of its first epoch.

    Raises UserError for a broken file.
    """
    if collection := read_collection(path):
        return _collection_content(path, collection)
    folder = RunFolder(path)
    config = folder.config()
    train = folder.train()
    progress = None if train else folder.progress()
    if train is None and progress is None:
        # The run may have finished, and its progress file be gone, between the two reads.
        train = folder.train()
    state = train or progress
    if config is None or state is None or not (state.epochs or train):
        return None
    # The first epoch's log contains measured seconds: another training has others, a resumed training keeps them.
    identity = state.epochs[0].model_dump_json().encode() if state.epochs else folder.train_file.read_bytes()
    start = _modified(folder.config_file)
    points = [*_validation_points(config, folder), *_epoch_points(state.epochs, start)]
    if train:
        points = [*_eval_points(config, folder), *_points(_train_metrics(train), _modified(folder.train_file)), *points]
    return RunContent(
        key=f"{config.hash}-{hashlib.sha256(identity).hexdigest()[:16]}",
        name=partial(_name_run, config),
        tags=_tags(config, folder, state),
        points=points,
        status=STATUS[state.status],
        start=start,
        end=_modified(folder.train_file) if train else None,
        params=dict(_flatten(config.model_dump(mode="json"))),
        checkpoint=train.checkpoint_sha256 if train else None,
    )


def _name_run(config: RunConfig) -> str:
    shots = [f"{config.shots or 'full'} shot{'s' * (config.shots != 1)}"] if config.recipe.epochs else []
    names = [config.method, config.dataset, config.classes, *shots, f"seed {config.seed}"]
    return " · ".join([*names, *_describe_changes(config)])


def _describe_changes(config: RunConfig) -> list[str]:
    """List the options and the fields of a custom recipe that are not those published for the task, if they are few."""
    recipe, changes = config.recipe_name, list[str]()
    # The plug-in may not be installed here.
    with suppress(UserError):
        options, fields = changed_settings(config, recipe="procap" if recipe == "procap" else "published")
        found = options | (fields if recipe == "custom" else {})
        changes = [f"{name} {value}" for name, value in found.items()]
    named = [] if recipe == "published" or (recipe == "custom" and changes) else [f"{recipe} recipe"]
    return [*named, *changes] if len(changes) <= MOST_NAMED else [f"{recipe} recipe"]


def _collection_content(path: Path, collection: Collection) -> RunContent:
    tags = {collection.kind: collection.name, "procap.collection": collection.tag, "folder": str(path.resolve())}
    # Settings are tags, because MLflow's parameters cannot change when a suite is started again with other settings.
    for name, value in collection.settings.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        tags[make_name(f"settings.{name}")] = text
    return RunContent(
        key=f"{collection.tag}-{collection.started}",
        name=lambda: f"{collection.kind} · {collection.name}",
        tags=tags | _user_tags(),
        points=_points({"runs": len(collection.runs), **collection.metrics}, _modified(path / FILE)),
        status=STATUS[collection.status],
        start=collection.started,
        end=collection.ended if collection.status != "running" else None,
    )


def _points(metrics: Metrics, time: int, step: int | None = None, prefix: str = "") -> list[Point]:
    found = {make_name(prefix + key): value for key, value in metrics.items() if value is not None}
    return [Point(name, float(value), time, step) for name, value in found.items()]


def _epoch_points(epochs: list[EpochLog], start: int) -> Iterator[Point]:
    clock = float(start)
    for epoch in epochs:
        clock += 1000 * epoch.seconds
        metrics: dict[str, float | None] = {f"loss/{name}": value for name, value in epoch.terms.items()}
        metrics |= {"loss": sum(epoch.terms.values()), "lr": epoch.lr, "epoch_seconds": epoch.seconds}
        metrics |= {"images_per_second": epoch.images_per_second, "skipped_steps": epoch.skipped or None}
        yield from _points(metrics, int(clock), epoch.epoch)


def _validation_points(config: RunConfig, folder: RunFolder) -> Iterator[Point]:
    """Yield validation accuracy per epoch on the run's own data set."""
    by_epoch: dict[int, dict[str, float]] = {}
    for count in folder.validation():
        dataset, classes, _ = count.target.split(":")
        if dataset == config.dataset:
            by_epoch.setdefault(count.epoch, {})[classes] = count.accuracy
    for epoch, accuracies in sorted(by_epoch.items()):
        metrics = {**accuracies, "hm": _harmonic_mean(accuracies)}
        yield from _points(metrics, _modified(folder.validation_file), epoch, prefix="val_")


def _train_metrics(train: TrainResult) -> dict[str, float | None]:
    metrics: dict[str, float | None] = {
        "train_seconds": train.seconds,
        "epochs": len(train.epochs),
        "gpus": _count_used_gpus(train),
        "train_images_per_second": train.images_per_second,
        "train_images_per_second_model": train.images_per_second_model,
        "trainable_parameters": train.trainable_parameters,
        **{f"phase/{name}_seconds": seconds for name, seconds in train.phases.items()},
    }
    peaks = {"system": train.peak_memory_bytes}
    for prefix, peak in peaks.items():
        metrics[f"{prefix}/peak_memory_megabytes"] = peak.process / MEGABYTE
        metrics[f"{prefix}/peak_gpu_memory_megabytes"] = None if peak.gpu is None else peak.gpu / MEGABYTE
    return metrics


def _count_used_gpus(train: TrainResult) -> int:
    return train.processes if train.environment.get("gpu") else 0


def _eval_points(config: RunConfig, folder: RunFolder) -> list[Point]:
    """List `hm`, `base`, `novel`, `fps` of the run's own data set, then accuracy and speed of each target."""
    points: list[Point] = []
    own: dict[str, dict[str, tuple[EvalResult, int]]] = {"": {}, "val_": {}}
    for path in folder.eval_files():
        result = folder.read_evaluation(path)
        if result is None:
            continue
        # An accuracy on a part of the test images is a metric of its own, so that it is not compared with whole splits.
        target = result.target.replace(":", "-") + (f"-first-{result.total}" if result.limited else "")
        # The same holds for other settings of the evaluation.
        target += f" {result.settings.label}".rstrip().replace(",", "")
        metrics = {
            f"accuracy/{target}": result.accuracy,
            f"macro_accuracy/{target}": result.macro_accuracy,
            f"fps/{target}": result.images_per_second,
            f"fps_model/{target}": result.images_per_second_model,
        }
        if fit := result.calibration:
            metrics |= {f"nll/{target}": fit.nll, f"brier/{target}": fit.brier, f"ece/{target}": fit.equal_width.ece}
        points += _points(metrics, _modified(path))
        dataset, classes, split = result.target.split(":")
        if dataset == config.dataset and not (result.limited or result.settings.label) and split in ("test", "val"):
            # Metrics of val and test splits have different names, because only test accuracies may be reported.
            own["" if split == "test" else "val_"][classes] = result, _modified(path)
    headlines: list[Point] = []
    for prefix, found in own.items():
        accuracies = {classes: result.accuracy for classes, (result, _) in found.items()}
        seconds = [result.images_per_second and result.total / result.images_per_second for result, _ in found.values()]
        # The rate over all evaluations, if each was timed.
        images = sum(result.total for result, _ in found.values())
        rate = images / sum(filter(None, seconds)) if seconds and all(seconds) else None
        metrics = {"hm": _harmonic_mean(accuracies), **accuracies, "fps": rate}
        headlines += _points(metrics, max((time for _, time in found.values()), default=0), prefix=prefix)
    return headlines + points


def _harmonic_mean(accuracies: Mapping[str, float]) -> float | None:
    """Compute the harmonic mean of the accuracies on base and novel classes; None if one is missing."""
    for halves in (("base", "novel"), ("dev-base", "dev-novel")):
        if all(half in accuracies for half in halves):
            return harmonic_mean(*(accuracies[half] for half in halves))
    return None


def _tags(config: RunConfig, folder: RunFolder, state: TrainResult | Progress) -> dict[str, str]:
    environment, git = state.environment, state.environment.get("git") or {}
    names = ("method", "dataset", "classes", "shots", "seed", "backbone", "precision")
    tags = {name: getattr(config, name) for name in names} | {
        "recipe": config.recipe_name,
        "config_hash": config.hash,
        "device": environment.get("gpu") or environment.get("device"),
        "gpus": _count_used_gpus(state) if isinstance(state, TrainResult) else None,
        "manifest_digest": state.manifest_digest if isinstance(state, TrainResult) else None,
        "imported": state.imported and state.imported.sha256 if isinstance(state, TrainResult) else None,
        "commit": git.get("commit") and git["commit"] + ("+changes" if git.get("dirty") else ""),
        "folder": folder.path.resolve(),
        "mlflow.source.git.commit": git.get("commit"),
    }
    return _user_tags() | {name: str(value) for name, value in tags.items() if value is not None}


def _user_tags() -> dict[str, str]:
    tags = {"mlflow.source.name": "procap", "mlflow.source.type": "LOCAL"}
    with suppress(KeyError, OSError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield make_name(f"{prefix}{name}"), format_value(value)


def make_name(text: str) -> str:
    """Make a name that MLflow accepts for a metric, a parameter or a tag; it has to be a normal relative path."""
    parts = re.sub(r"[^/\w.\- ]", "_", text)[:MAX_NAME].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000
