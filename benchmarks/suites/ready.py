"""Before many runs begin: what each of them would find missing, or refuse, is said once, and nothing was written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from procap.errors import UsageError
from runner.acceleration import WAYS, Acceleration
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.ranks import Ranks
from shards.fewshot import check_shots
from shards.reader import open_dataset
from shards.resolve import is_packed


def check_weights(backbones: Iterable[tuple[str, str | None]]) -> None:
    """Raises UsageError for an unknown backbone, UserError where its weights are not on this machine."""
    from procap.weights.loading import weights_file

    for name, pretrained in dict.fromkeys(backbones):
        weights_file(name, pretrained)


def check_ways(configs: Iterable[RunConfig], at: RuntimeConfig, processes: int) -> None:
    """Raises UsageError for a way to work that nobody knows, or that contradicts each run with so many processes."""
    import torch

    if not {*at.accelerate.split(",")} <= {*WAYS}:
        # Which of those that are known can be done is for the machine of a run to say.
        Acceleration.of(at.accelerate, torch.device("cpu"))
    if at.engine == "ddp":
        return
    from runner.engines import engine_settings

    refused: UsageError | None = None
    for config in configs:
        try:
            engine_settings(config, at, Ranks(size=processes, local_size=processes))
            return
        except UsageError as error:
            refused = refused or error
    if refused:
        raise refused


def check_training_images(configs: Iterable[RunConfig], data: Path) -> None:
    """Raises DataUsageError where a packed data set has fewer images of every class than a run asks for."""
    asked = {(config.dataset, config.shots): None for config in configs if config.recipe.epochs and not config.picks}
    for dataset, shots in asked:
        if is_packed(data, dataset):
            check_shots(open_dataset(data, dataset), shots)
