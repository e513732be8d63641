"""Plan a command: its runs, which of them are done, and the state of their data and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
    """One evaluation of a run, and the images that are still to be classified for it."""

    target: str
    done: bool
    images: int


@dataclass(frozen=True)
class PlannedRun:
    """One run and what is left of it. train_images: epochs times images after the last checkpoint."""

    run: str
    state: str
    train_images: int
    targets: list[PlannedTarget]


@dataclass(frozen=True)
class Plan:
    """What a command will do. data, weights: the state of each data set and backbone, by name."""

    data: dict[str, str]
    weights: dict[str, str]
    runs: list[PlannedRun]

    def show(self, output: OutputFlags) -> None:
        """Print the plan."""
        rows = []
        for run in self.runs:
            targets = " ".join(f"{one.target}{'=done' if one.done else ''}" for one in run.targets)
            images = sum(one.images for one in run.targets)
            rows.append((run.state, run.run, run.train_images, images, targets or "-"))
        show(columns(("data set", "shards"), list(self.data.items())) + "\n")
        for name, state in self.weights.items():
            show(f"weights of {name}: {state}")
        show("\n" + columns(("state", "run", "train images", "test images", "targets"), rows))
        show(
            f"\n{plural(len(rows), 'run')}, {sum(row[0] != 'finished' for row in rows)} to train; "
            f"about {sum(row[2] for row in rows):,} images to train on, "
            f"{sum(row[3] for row in rows):,} to evaluate. Nothing was written."
        )
        if output.json:
            show_json(asdict(self))


def make_plan(work: Sequence[tuple[RunConfig, RuntimeConfig, Sequence[Target]]], *, force: bool = False) -> Plan:
    """Plan runs and their evaluations in order, from existing results; results behind a URL are copied here first."""
    for runtime in dict.fromkeys(runtime for _, runtime, _ in work):
        RemoteResults.of(runtime).pull_all()
    runs = []
    used: dict[str, None] = {}
    for config, runtime, targets in work:
        run = _plan_run(config, runtime, targets, force)
        runs.append(run)
        used |= dict.fromkeys([config.dataset] if run.state != "finished" else [])
        used |= dict.fromkeys(target.dataset for target in targets)
    data = data_states(used, work[0][1].data) if work else {}
    return Plan(data, weights_states(config for config, _, _ in work), runs)


def _plan_run(config: RunConfig, runtime: RuntimeConfig, targets: Sequence[Target], force: bool) -> PlannedRun:
    folder = RunFolder(runtime.results / config.path)
    training = folder.train()
    state = "finished" if training else "resume" if folder.state.is_dir() else "new"
    state = "repeat" if force and state != "new" else state
    planned = []
    for target in targets:
        result = folder.evaluation(target) if state == "finished" else None
        done = bool(result and training and result.is_current(training, runtime.limit))
        planned.append(PlannedTarget(str(target), done, 0 if done else _test_images(target, runtime)))
    steps = 0
    if state == "resume":
        from runner.checkpoint import saved_steps

        steps = max(saved_steps(folder.state), default=0)
    train_images = 0 if state == "finished" else _train_images(config, runtime.data, steps)
    return PlannedRun(config.path, state, train_images, planned)


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
    states = {}
    for name in names:
        try:
            if is_packed(data_root, name):
                splits = read_manifest(data_root / name, name).splits.values()
                states[name] = plural(sum(len(split.shards) for split in splits), "shard")
            else:
                states[name] = "missing" if resolve_dataset(name, data_root).source == "folder" else "to be packed"
        except DataUsageError:
            states[name] = "missing"
        except DataError as error:
            states[name] = f"broken: {error}"
    return states


def weights_states(configs: Iterable[RunConfig]) -> dict[str, str]:
    """Return the weights file of each backbone, or that it is missing on this machine.

    Raises UsageError for an unknown backbone.
    """
    from procap.weights.loading import weights_file

    states = {}
    for backbone, pretrained in dict.fromkeys((config.backbone, config.pretrained) for config in configs):
        name = f"{backbone} {pretrained}" if pretrained else backbone
        try:
            file = weights_file(backbone, pretrained)
            states[name] = str(file) if file else "drawn at random" if pretrained == "random" else "in the program"
        except UsageError:
            raise
        except UserError as error:
            states[name] = f"missing: {error}"
    return states
