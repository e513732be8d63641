"""Plan a command: its runs, which of them are done, and the state of their data and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import columns, plural, show, show_json
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.remote_results import RemoteResults
from runner.results import RunFolder
from shards.errors import DataError, DataUsageError
from shards.fewshot import select_labels
from shards.manifest import read_manifest
from shards.resolve import is_packed, resolve_dataset


@dataclass(frozen=True)
class PlannedTarget:
    """One evaluation; `images` is how many would be classified, 0 if its result exists."""

    target: Target
    done: bool
    images: int


@dataclass(frozen=True)
class PlannedRun:
    """One run; `train_images` is epochs times images still to train on after the last checkpoint."""

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


@dataclass(frozen=True)
class Plan:
    """What a command will do. data, weights: the state of each data set and backbone, by name."""

    runs: list[PlannedRun]
    data: dict[str, str]
    weights: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {"data": self.data, "weights": self.weights, "runs": [run.to_dict() for run in self.runs]}

    def show(self, output: OutputFlags) -> None:
        """Print the plan."""
        show(describe(self.runs, self.data, self.weights))
        if output.json:
            show_json(self.to_dict())


def make_plan(work: Sequence[tuple[RunConfig, RuntimeConfig, Sequence[Target]]], *, force: bool = False) -> Plan:
    """Plan runs and their evaluations in order, from existing results; results behind a URL are copied here first."""
    for runtime in dict.fromkeys(runtime for _, runtime, _ in work):
        RemoteResults.of(runtime).pull_all()
    runs = [_plan_run(config, runtime, targets, force) for config, runtime, targets in work]
    used = [run.config.dataset for run in runs if run.state != "finished"]
    used += [planned.target.dataset for run in runs for planned in run.targets]
    data = data_states(used, work[0][1].data) if work else {}
    return Plan(runs, data, weights_states(config for config, _, _ in work))


def _plan_run(config: RunConfig, runtime: RuntimeConfig, targets: Sequence[Target], force: bool) -> PlannedRun:
    folder = RunFolder(runtime.results / config.path)
    training = folder.train()
    state = "finished" if training else "resume" if folder.state.is_dir() else "new"
    state = "repeat" if force and state != "new" else state
    planned = []
    for target in targets:
        known = None if state == "repeat" else folder.evaluation(target)
        done = bool(known and training and known.is_current(training, runtime.limit))
        planned.append(PlannedTarget(target, done, 0 if done else _test_images(target, runtime)))
    saved = 0
    if state == "resume":
        from runner.checkpoint import saved_steps

        saved = max(saved_steps(folder.state), default=0)
    left = 0 if state == "finished" else _train_images(config, runtime.data, saved)
    return PlannedRun(config, state, left, tuple(planned))


def _train_images(config: RunConfig, data: Path, steps: int) -> int:
    """Compute how many images remain after so many steps."""
    dataset = resolve_dataset(config.dataset, data)
    classes = len(select_labels(range(dataset.classes), config.classes))
    each = dataset.counts["train"] / dataset.classes
    images = classes * (min(config.shots, each) if config.shots else each)
    epochs = config.recipe.epochs - steps / max(1, round(images) // config.recipe.batch_size)
    return round(images * max(0.0, epochs))


def _test_images(target: Target, runtime: RuntimeConfig) -> int:
    dataset = resolve_dataset(target.dataset, runtime.data)
    classes = len(select_labels(range(dataset.classes), target.classes))
    images = round(dataset.counts[target.split] * classes / dataset.classes)
    return images if runtime.limit is None else min(runtime.limit, images)


def data_states(names: Iterable[str], data_root: Path) -> dict[str, str]:
    """Return the number of shards of each data set, or why there are none."""
    return {name: _data_state(name, data_root) for name in dict.fromkeys(names)}


def _data_state(name: str, data_root: Path) -> str:
    if not is_packed(data_root, name):
        try:
            able = resolve_dataset(name, data_root).source != "folder"
        except DataUsageError:
            able = False
        return "to be packed" if able else "missing"
    try:
        manifest = read_manifest(data_root / name, name)
    except DataError as error:
        return f"broken: {error}"
    return plural(sum(len(split.shards) for split in manifest.splits.values()), "shard")


def weights_states(configs: Iterable[RunConfig]) -> dict[str, str]:
    """Return the weights file of each backbone, or that it is missing on this machine.

    Raises UsageError for an unknown backbone.
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
    """Format the plan as text."""
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
