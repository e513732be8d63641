"""Check requirements before many runs begin, so that a common error is reported once and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.console.output import note
from procap.errors import UserError
from procap.recipe import warmup_warning
from runner.config import RunConfig, RuntimeConfig
from runner.run_folders import RunFolder
from shards.image_selection import check_classes, check_shots
from shards.reader import open_dataset
from shards.resolve import is_packed


def check_weights(backbones: Iterable[tuple[str, str | None]]) -> None:
    """Raise UsageError for an unknown backbone, UserError if its weights are not on this machine."""
    from procap.weights.loading import find_source

    for name, pretrained in dict.fromkeys(backbones):
        find_source(name, pretrained)


def check_weights_of(configs: Iterable[RunConfig], runtime: RuntimeConfig) -> None:
    """Check the weights of runs of which nothing exists yet, as far as the results folder is on this machine."""
    if runtime.results_url is None:
        new = (config for config in configs if not RunFolder(runtime.results / config.path).train_file.exists())
        check_weights((config.backbone, config.pretrained) for config in new)


def check_code(paths: Iterable[str], results: Path) -> None:
    """Raise UserError if different code of a method than is installed trained one of these runs."""
    for path in paths:
        folder, why = RunFolder(results / path), ""
        # The run itself reports a file that cannot be read.
        with suppress(UserError):
            config, training = folder.read_config(), folder.read_training()
            why = training.changed_code(config) if config and training else ""
        if why:
            raise UserError(why)


def check_training_images(configs: Iterable[RunConfig], data: Path) -> None:
    """Raise UsageError if a packed data set has too few classes or images for a run."""
    fields = ("dataset", "classes", "shots", "sampling")
    drawn = {tuple(getattr(config, name) for name in fields) for config in configs if config.recipe.epochs}
    for dataset, classes, shots, sampling in sorted(drawn):
        # A generated set may not be packed yet; its training makes the same checks.
        if is_packed(data, dataset):
            shards = open_dataset(data, dataset)
            check_classes(shards, classes)
            check_shots(shards, shots, classes, sampling)


def note_warmup(configs: Iterable[RunConfig]) -> None:
    """Warn once of runs of which most epochs are warm-up epochs."""
    note_warning((config.path, warmup_warning(config.recipe)) for config in configs)


def note_warning(reasons: Iterable[tuple[str, str]]) -> None:
    """Warn once of runs by their paths and reasons, as far as these are not empty; the first reason is printed."""
    warned = {path: why for path, why in reasons if why}
    for path, why in [*warned.items()][:1]:
        what = path if len(warned) == 1 else f"{len(warned)} runs, such as {path},"
        note(f"procap: warning: {what} {why}")
