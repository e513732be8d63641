"""What a list of runs would cost and what of it is done already: read from files, written to none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.console.output import columns, plural
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.results import RunFolder
from shards.errors import DataError, DataUsageError
from shards.fewshot import select_labels
from shards.manifest import read_manifest
from shards.resolve import is_packed, known

TargetsOf = Callable[[RunConfig], list[Target]]


@dataclass(frozen=True)
class PlannedTarget:
    """One evaluation; `images` is how many would be classified, 0 when its result is there."""

    target: Target
    done: bool
    images: int


@dataclass(frozen=True)
class PlannedRun:
    """One run; `train_images` are epochs times images still to be trained on, after the last saved step."""

    config: RunConfig
    state: str
    train_images: int
    targets: tuple[PlannedTarget, ...]

    @property
    def eval_images(self) -> int:
        return sum(target.images for target in self.targets)

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.config.path,
            "state": self.state,
            "train_images": self.train_images,
            "targets": [{"target": str(t.target), "done": t.done, "images": t.images} for t in self.targets],
        }


def plan(
    configs: Iterable[RunConfig], place: RuntimeConfig, targets_of: TargetsOf, *, force: bool = False
) -> list[PlannedRun]:
    """What would be done for `configs`, in their order."""
    return [_planned(config, place, targets_of(config), force) for config in configs]


def _planned(config: RunConfig, place: RuntimeConfig, targets: list[Target], force: bool) -> PlannedRun:
    folder = RunFolder(place.results / config.path)
    training = folder.train()
    state = "finished" if training else "resume" if folder.state.is_dir() else "new"
    state = "repeat" if force and state != "new" else state
    planned = []
    for target in targets:
        known = None if state == "repeat" else folder.evaluation(target)
        done = bool(known and training and known.is_current(training, place.limit))
        planned.append(PlannedTarget(target, done, 0 if done else _test_images(target, place)))
    saved = 0
    if state == "resume":
        from runner.checkpoint import saved_steps

        saved = max(saved_steps(folder.state), default=0)
    left = 0 if state == "finished" else _train_images(config, place.data, saved)
    return PlannedRun(config, state, left, tuple(planned))


def _train_images(config: RunConfig, data: Path, steps: int) -> int:
    """Of the epochs that are left after so many steps."""
    dataset = known(config.dataset, data)
    classes = len(select_labels(range(dataset.classes), config.classes))
    each = dataset.counts["train"] / dataset.classes
    images = classes * (min(config.shots, each) if config.shots else each)
    epochs = config.recipe.epochs - steps / max(1, round(images) // config.recipe.batch_size)
    return round(images * max(0.0, epochs))


def _test_images(target: Target, place: RuntimeConfig) -> int:
    dataset = known(target.dataset, place.data)
    classes = len(select_labels(range(dataset.classes), target.classes))
    images = round(dataset.counts[target.split] * classes / dataset.classes)
    return images if place.limit is None else min(place.limit, images)


def data_states(names: Iterable[str], data_root: Path) -> dict[str, str]:
    """For every data set: how many shards are there, or what will be done about their absence."""
    return {name: _data_state(name, data_root) for name in dict.fromkeys(names)}


def _data_state(name: str, data_root: Path) -> str:
    if not is_packed(data_root, name):
        try:
            able = known(name, data_root).source != "folder"
        except DataUsageError:
            able = False
        return "to be packed" if able else "missing"
    try:
        manifest = read_manifest(data_root / name, name)
    except DataError as error:
        return f"broken: {error}"
    return plural(sum(len(split.shards) for split in manifest.splits.values()), "shard")


def weights_states(configs: Iterable[RunConfig]) -> dict[str, str]:
    """For every backbone: the file of its weights, or that there is none here.

    Raises UsageError for a backbone that nobody knows.
    """
    from procap.weights.loading import weights_file

    found = {}
    for backbone, pretrained in dict.fromkeys((config.backbone, config.pretrained) for config in configs):
        name = f"{backbone} {pretrained}" if pretrained else backbone
        try:
            file = weights_file(backbone, pretrained)
            found[name] = str(file) if file else "drawn at random" if pretrained == "random" else "in the program"
        except UsageError:
            raise
        except UserError as error:
            found[name] = f"missing: {error}"
    return found


def describe(runs: list[PlannedRun], data: dict[str, str], weights: dict[str, str]) -> str:
    """The plan for people."""
    rows = [
        (
            run.state,
            run.config.path,
            run.train_images,
            run.eval_images,
            " ".join(f"{t.target}{'=done' if t.done else ''}" for t in run.targets) or "-",
        )
        for run in runs
    ]
    work = columns(("state", "run", "train images", "test images", "targets"), rows)
    there = f"{columns(('data set', 'shards'), list(data.items()))}\n\n"
    there += "".join(f"weights of {name}: {state}\n" for name, state in weights.items())
    todo = sum(run.state != "finished" for run in runs)
    return (
        f"{there}\n{work}\n\n{plural(len(runs), 'run')}, {todo} to train; "
        f"about {sum(run.train_images for run in runs):,} images to train on, "
        f"{sum(run.eval_images for run in runs):,} to evaluate. Nothing was written."
    )
