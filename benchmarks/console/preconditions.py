"""Check requirements before many runs begin, so that a common error is reported once and nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.console.output import note
from procap.errors import UserError
from procap.recipe import warmup_warning
from runner.config import RunConfig, RuntimeConfig
from runner.run_folders import RunFolder
from runner.run_state import RunSpec
from shards.image_selection import check_few_shot, select_labels
from shards.reader import open_dataset
from shards.resolve import is_packed, resolve_dataset


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


def list_needs(run: RunSpec, data: Path) -> list[str]:
    """List what a run needs and is not on this machine, each with what gets it.

    A generated data set is none of that: the command packs it.
    """
    from procap.methods import method_class
    from procap.methods.hooks import TaughtMethod
    from runner.earlier_runs import preliminary_run

    config, needs = run.config, list[str]()
    cls = method_class(config.method)
    for name in dict.fromkeys([config.dataset, *(target.dataset for target in run.parse_targets())]):
        if resolve_dataset(name, data).images_from == "published" and not is_packed(data, name):
            needs.append(f"{name}, not packed: procap data fetch {name}")
    try:
        check_training_images([config], data)
    except UserError as error:
        needs.append(str(error))
    needs += _missing_weights(config.backbone, config.pretrained)
    if config.recipe.epochs and (option := cls.missing_option(config.options)):
        needs.append(f"--option {config.method}.{option}=...")
    elif issubclass(cls, TaughtMethod):
        folder = cls.teacher_run(cls.Options(**config.options))
        if folder and not RunFolder(folder).train_file.exists():
            needs.append(f"teacher {folder}, not finished")
        elif not folder:
            backbone, _, tag = config.options["teacher"].partition(":")
            needs += _missing_weights(backbone, tag or None)
    if earlier := preliminary_run(config):
        needs += [need for need in list_needs(RunSpec(config=earlier), data) if need.partition(" ")[0] != "--option"]
    return list(dict.fromkeys(needs))


def _missing_weights(backbone: str, pretrained: str | None) -> list[str]:
    """Describe weights that are not on this machine; empty for others."""
    from procap.weights.architectures import model_configs

    try:
        check_weights([(backbone, pretrained)])
    except UserError as error:
        tag = f" --pretrained {pretrained}" if pretrained else ""
        get = f"weights of {backbone}: --download, or procap fetch backbone {backbone}{tag}"
        return [get if backbone in model_configs() else str(error)]
    return []


def check_training_images(configs: Iterable[RunConfig], data: Path) -> None:
    """Raise UsageError if a packed data set has too few classes or images for a run."""
    fields = ("dataset", "classes", "shots", "sampling")
    drawn = {tuple(getattr(config, name) for name in fields) for config in configs if config.recipe.epochs}
    for dataset, classes, shots, sampling in sorted(drawn):
        # A generated set may not be packed yet; its training makes the same checks.
        if is_packed(data, dataset):
            check_few_shot(open_dataset(data, dataset), shots, classes, sampling)


def note_warmup(configs: Iterable[RunConfig], data: Path) -> None:
    """Warn once of runs of which most epochs are warm-up epochs; the reason of the first is printed."""
    warned: dict[str, str] = {}
    for config in configs:
        classes = select_labels(range(resolve_dataset(config.dataset, data).num_classes), config.classes)
        # All images of a data set are more than one batch.
        if why := warmup_warning(config.recipe, config.shots * len(classes) or sys.maxsize):
            warned[config.path] = why
    for path, why in [*warned.items()][:1]:
        what = path if len(warned) == 1 else f"{len(warned)} runs, such as {path},"
        note(f"procap: warning: {what} {why}")
