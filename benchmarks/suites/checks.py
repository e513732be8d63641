"""Check requirements before many runs begin, so that a common error is reported once and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.console.output import note, plural
from benchmarks.console.packing import find_unpacked
from benchmarks.suites.planning import count_images
from cluster.run import RunSpec
from procap.errors import UsageError, UserError
from procap.methods import METHODS
from procap.recipe import warmup_warning
from runner.acceleration import Acceleration
from runner.config import RunConfig, RuntimeConfig, Target
from runner.run_folders import RunFolder
from shards.fewshot import check_classes, check_shots, select_labels
from shards.mirror import is_mirror
from shards.reader import open_dataset
from shards.resolve import is_packed, resolve_dataset

if TYPE_CHECKING:
    from procap.clip import CLIP


def check_weights(backbones: Iterable[tuple[str, str | None]]) -> None:
    """Raise UsageError for an unknown backbone, UserError if its weights are not on this machine."""
    from procap.weights.loading import weights_file

    for name, pretrained in dict.fromkeys(backbones):
        weights_file(name, pretrained)


def check_weights_of(configs: Iterable[RunConfig], runtime: RuntimeConfig) -> None:
    """Check the weights of runs of which nothing exists yet, as far as the results folder is on this machine."""
    new = (one for one in configs if not (runtime.store or RunFolder(runtime.results / one.path).train_file.exists()))
    check_weights((one.backbone, one.pretrained) for one in new)


def check_setup(configs: Iterable[RunConfig], runtime: RuntimeConfig, processes: int) -> None:
    """Select the training images of every data set, and set up one run of each method and backbone here.

    This raises what would stop runs of so many processes before their first step.
    Where its data set is not packed yet, or lies at a URL, the method is built on the two longest class names instead.
    """
    from runner.distributed.collectives import ProcessGroup
    from runner.environment import resolve_device
    from runner.setup import load_backbone, load_training_images, set_up

    configs = [*configs]
    device = resolve_device(runtime.device)
    acceleration = Acceleration.parse(runtime.accelerate, device)
    local = {one.dataset for one in configs if is_packed(runtime.data, one.dataset) and not is_mirror(runtime.data)}
    images = {(one.dataset, one.classes, one.shots, one.recipe): one for one in configs}
    for config in images.values():
        if config.dataset in local:
            load_training_images(config, open_dataset(runtime.data, config.dataset), processes)
    backbones: dict[tuple[str, str | None], CLIP] = {}
    for config in {(one.method, one.backbone, one.pretrained): one for one in configs}.values():
        weights = config.backbone, config.pretrained
        if weights not in backbones:
            backbones[weights] = load_backbone(config, device, acceleration)
        if config.dataset in local:
            set_up(config, replace(runtime, engine="ddp", zero_stage=None), device, ProcessGroup(), backbones[weights])
        else:
            _build(config, runtime.data, backbones[weights])


def check_runs(runs: Sequence[RunSpec], runtime: RuntimeConfig, processes: int, *, force: bool) -> None:
    """Raise what would stop runs here before their first step or image, or what forbids to keep a finished one."""
    from runner.distributed.collectives import ProcessGroup
    from runner.train import read_finished

    configs, group = [run.config for run in runs], ProcessGroup()
    if not force:
        check_code((config.path for config in configs), runtime.results)
    kept = [] if force else [(config, RunFolder(runtime.results / config.path)) for config in configs]
    finished = {config.path for config, folder in kept if read_finished(config, runtime, folder, group)}
    left = [config for config in configs if config.path not in finished]
    check_training_images(left, runtime.data)
    find_unpacked((config.dataset for config in left), runtime.data)
    check_targets((Target.parse_unchecked(target) for run in runs for target in run.targets), runtime.data)
    check_weights((config.backbone, config.pretrained) for config in configs)
    check_setup(left, runtime, processes)


def check_code(paths: Iterable[str], results: Path) -> None:
    """Raise UserError once if other code of plug-ins than is installed trained some of these runs."""
    found: dict[str, str] = {}
    for path in (path for path in paths if path.split("/")[2] not in METHODS):
        folder = RunFolder(results / path)
        if (config := folder.config()) and (training := folder.train()) and (why := training.changed_code(config)):
            found[path] = why
    if found:
        path, why = next(iter(found.items()))
        several = f"{plural(len(found), 'finished run')} were"
        raise UserError(why if len(found) == 1 else f"{several}{why.removeprefix(f'{path} was')}")


def _build(config: RunConfig, data: Path, clip: CLIP) -> None:
    """Build the method of a run on the two longest class names of its data set."""
    from procap.text import LabelSpace
    from runner.setup import make_method

    names = sorted(resolve_dataset(config.dataset, data).classnames, key=len)
    space = LabelSpace(tuple(names[-2:]) or ("one", "two"), dataset=config.dataset)
    make_method(config, clip, space)


def check_training_images(configs: Iterable[RunConfig], data: Path) -> None:
    """Apply `check_images` to every data set that is trained on."""
    trained = [config for config in configs if config.recipe.epochs]
    for dataset, classes, shots in dict.fromkeys((one.dataset, one.classes, one.shots) for one in trained):
        check_images(dataset, classes, shots, data)


def check_images(dataset: str, classes: str, shots: int, data: Path) -> None:
    """Raise UsageError if a data set has too few classes or images for a run, as far as its images are known."""
    if is_packed(data, dataset):
        shards = open_dataset(data, dataset)
        check_classes(shards, classes)
        check_shots(shards, shots, classes)
    elif shots > (most := resolve_dataset(dataset, data).counts.get("train", shots)):
        raise UsageError(f"--shots {shots}: '{dataset}' has {most} training images in all")


def check_targets(targets: Iterable[Target], data: Path) -> None:
    """Raise UserError for a target whose data set is not packed here, or whose shards are missing or altered."""
    wanted = dict.fromkeys(targets)
    find_unpacked((target.dataset for target in wanted), data)
    for target in wanted:
        if is_packed(data, target.dataset):
            shards = open_dataset(data, target.dataset)
            shards.check_sizes(target.split) if is_mirror(data) else shards.split(target.split)


def note_warmup(configs: Iterable[RunConfig]) -> None:
    """Warn once of runs of which most epochs are warm-up epochs."""
    note_warning((config.path, warmup_warning(config.recipe)) for config in configs)


def note_warning(reasons: Iterable[tuple[str, str]]) -> None:
    """Warn once of runs by their paths and reasons, as far as these are not empty; the first reason is printed."""
    found = {path: why for path, why in reasons if why}
    for path, why in [*found.items()][:1]:
        what = path if len(found) == 1 else f"{len(found)} runs, such as {path},"
        note(f"procap: warning: {what} {why}")


def note_small_classes(configs: Iterable[RunConfig], data: Path) -> None:
    """Note how many classes of packed data sets have fewer images than a run draws from each, so that it takes all."""
    drawn = [one for one in configs if one.recipe.epochs and is_packed(data, one.dataset)]
    for dataset, classes, shots in dict.fromkeys((one.dataset, one.classes, one.shots) for one in drawn):
        counts = _count_by_class(dataset, classes, data)
        if short := int((counts < shots).sum()):
            note(f"{dataset}: {short} of {len(counts)} classes have fewer than {shots} images, which are all used")


def count_training_images(config: RunConfig, data: Path) -> int:
    """Count the images that a run draws; an estimate by the size of the data set unless it is packed here."""
    if is_packed(data, config.dataset) and not is_mirror(data):
        with suppress(UserError):
            counts = _count_by_class(config.dataset, config.classes, data)
            return int(np.minimum(counts, config.shots or counts).sum())
    return round(count_images(config.dataset, config.classes, "train", data, most=config.shots)[2])


def _count_by_class(dataset: str, classes: str, data: Path) -> NDArray[np.int64]:
    labels = open_dataset(data, dataset).labels("train")
    return np.bincount(labels)[select_labels(labels, classes)]
