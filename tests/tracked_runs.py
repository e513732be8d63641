"""Run folders as training and evaluation leave them, with figures made up: what a tracker has to send."""

import numpy as np
import torch

from procap.recipe import Recipe
from runner.calibration import ImagePredictions, measure_calibration
from runner.checkpoint import save_checkpoint
from runner.config import RunConfig
from runner.provenance import provenance
from runner.results import (
    CheckpointCard,
    EpochLog,
    EvalResult,
    PerClass,
    Progress,
    TrainResult,
    write_json,
)
from runner.run_folders import RunFolder

ENVIRONMENT = {"device": "cpu", "gpu": None, "git": {"commit": "0123abcd" * 5, "dirty": True}}


def begin(results, seed=1, method="maple", lr=0.0035):
    """A run that has just been begun."""
    config = RunConfig(
        method=method, options={"tokens": 2, "depth": 9}, recipe=Recipe(lr=lr, epochs=5, batch_size=4),
        dataset="shapes", classes="base", seed=seed,
    )  # fmt: skip
    folder = RunFolder(results / config.path)
    write_json(folder.config_file, config)
    return folder


def rows(epochs: int, attempt: float = 0.0) -> list[EpochLog]:
    """`attempt` stands for the measured times, which no second training repeats."""
    return [
        EpochLog(
            epoch=epoch, lr=0.0035 / (epoch + 1), terms={"ce": 2.0 / (epoch + 1), "kl": 0.5 / (epoch + 1)},
            seconds=2.0 + attempt, images_per_second=100.0,
        )
        for epoch in range(epochs)
    ]  # fmt: skip


def go_on(folder: RunFolder, epochs: int, attempt: float = 0.0) -> None:
    """The run has `epochs` epochs behind it."""
    progress = Progress(
        config_hash=_hash(folder), step=10 * epochs, steps=50, epochs=rows(epochs, attempt), seconds=2.0 * epochs,
        environment=ENVIRONMENT,
    )  # fmt: skip
    write_json(folder.progress_file, progress)


def finish(folder: RunFolder, epochs: int = 5, attempt: float = 0.0) -> None:
    config, digests = folder.read_config(), {"manifest_digest": "ab" * 8, "backbone_digest": "cd" * 8}
    card = CheckpointCard(config=config, classnames=("a",), template="{}", templates=("{}",), **digests)
    train = TrainResult(
        config_hash=_hash(folder), steps=10 * epochs, images=40 * epochs, epochs=rows(epochs, attempt),
        seconds=10.5 + attempt, images_per_second=98.5, images_per_second_model=120.0, warmup_steps=5,
        phases={"data": 1.0, "forward": 4.0, "backward": 5.0},
        trainable_parameters=4096, fewshot=None, **provenance(ENVIRONMENT), **digests,
        checkpoint_sha256=save_checkpoint(folder.checkpoint_file, torch.nn.Linear(2, 2), card),
    )  # fmt: skip
    write_json(folder.train_file, train)
    folder.forget_progress()


def evaluate(folder: RunFolder, classes: str, correct: int, total: int = 80, size: int = 80, **more) -> None:
    even = np.full(total, 0.5)
    labels, predicted = np.zeros(total, int), (np.arange(total) >= correct).astype(int)
    images = ImagePredictions(labels, predicted, confidence=even, nll=even + 0.75, brier=even)
    result = EvalResult(
        config_hash=_hash(folder), target=f"shapes:{classes}:test", correct=correct, total=total,
        per_class=PerClass(correct=[correct], total=[total]), calibration=measure_calibration(images),
        limit=total if total < size else None, dataset_size=size, num_classes=1, precision="fp32", batch_size=100,
        workers=0, seconds=1.0, images_per_second=300.0, images_per_second_model=400.0,
        manifest_digest="ab" * 8, backbone_digest="cd" * 8,
        checkpoint_sha256="ef" * 32, **provenance(ENVIRONMENT) | more,
    )  # fmt: skip
    write_json(folder.path / "eval" / f"shapes-{classes}-test.json", result)


def evaluated(results, seed):
    """A finished run with accuracies of 75 % on base and 50 % on novel classes; returns its path below the results."""
    folder = begin(results, seed)
    finish(folder)
    evaluate(folder, "base", 60)
    evaluate(folder, "novel", 40)
    return folder.path.relative_to(results).as_posix()


def _hash(folder: RunFolder) -> str:
    return folder.path.name.rpartition("-")[2]
