"""Check requirements before many runs begin, so that a common error is reported once and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from procap.errors import UsageError
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.ranks import Ranks
from shards.fewshot import check_classes, check_shots
from shards.reader import open_dataset
from shards.resolve import is_packed


def check_weights(backbones: Iterable[tuple[str, str | None]]) -> None:
    """Raise UsageError for an unknown backbone, UserError if its weights are not on this machine."""
    from procap.weights.loading import weights_file

    for name, pretrained in dict.fromkeys(backbones):
        weights_file(name, pretrained)


def check_engine(configs: Iterable[RunConfig], runtime: RuntimeConfig, processes: int) -> None:
    """Raise UsageError for an engine that no run can use with so many processes."""
    if runtime.engine == "ddp":
        return
    from runner.setup import engine_settings

    refused: list[UsageError] = []
    for config in configs:
        try:
            engine_settings(config, runtime, Ranks(size=processes, local_size=processes))
            return
        except UsageError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def check_training_images(configs: Iterable[RunConfig], data: Path) -> None:
    """Raise DataUsageError if a packed data set has too few classes or images for a run."""
    trained = [config for config in configs if config.recipe.epochs]
    for dataset, classes, shots in dict.fromkeys(
        (one.dataset, one.classes, one.shots) for one in trained if not one.picks
    ):
        if is_packed(data, dataset):
            shards = open_dataset(data, dataset)
            check_shots(shards, shots)
            check_classes(shards, classes)
