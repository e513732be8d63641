"""Result folders with figures made up, as many as are wanted: what trackers and their pages are measured on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from runner.collection import Collection
from runner.config import RunConfig, Target, plan_run
from runner.results import EpochLog, EvalResult, PeakMemory, PerClass, RunFolder, TrainResult, Use

METHODS = ("zeroshot", "coop", "cocoop", "maple", "procap")
DATASETS = ("shapes", "petals", "textures", "digits")
SPEED = {"zeroshot": 640.0, "coop": 600.0, "cocoop": 90.0, "maple": 585.0, "procap": 570.0}
PEAK = PeakMemory(process=700_000_000, gpu=None)
USE = Use(cpu_percent=150.0)


def configs() -> Iterator[RunConfig]:
    """Runs without end, method by method within a data set, with ever other seeds."""
    plans = {(method, dataset): plan_run(method=method, dataset=dataset, recipe="procap")
             for dataset in DATASETS for method in METHODS}  # fmt: skip
    for seed in itertools.count(1):
        for plan in plans.values():
            yield plan.model_copy(update={"seed": seed})


def make(results: Path, count: int, *, epochs: int = 10) -> list[str]:
    """Write `count` finished runs, each evaluated on both halves, below `results`; gives their paths."""
    paths = []
    for config in itertools.islice(configs(), count):
        folder = RunFolder(results / config.path)
        if not folder.train_file.exists():
            _write(folder, config, epochs if config.recipe.epochs else 0)
        paths.append(config.path)
    return paths


def suite(paths: list[str], name: str = "made-up") -> Collection:
    return Collection(kind="suite", name=name, runs=tuple(paths), status="finished", figures={"hm/procap": 75.0})


def _write(folder: RunFolder, config: RunConfig, epochs: int) -> None:
    rows = [
        EpochLog(
            epoch=epoch,
            lr=0.0035,
            terms={"ce": 2 / (epoch + 1), "infonce": 0.5 / (epoch + 1)},
            seconds=1.2,
            images_per_second=100.0,
        )
        for epoch in range(epochs)
    ]
    weights = hashlib.sha256(config.hash.encode()).digest() * 512
    digest = hashlib.sha256(weights).hexdigest()
    train = TrainResult(
        config_hash=config.hash, steps=10 * epochs, images=160 * epochs, epochs=rows, seconds=1.5 * epochs,
        images_per_second=100.0 if epochs else None, images_per_second_model=125.0 if epochs else None,
        warmup_steps=0, phases={"data": 1.0, "forward": 4.0, "backward": 5.0}, peak_memory_bytes=PEAK, use=USE,
        trainable_parameters=2048, fewshot=None, manifest_digest="d" * 64, checkpoint_sha256=digest,
        backbone_digest="b" * 16, environment={"device": "cpu", "git": {"commit": "0" * 40, "dirty": False}},
    )  # fmt: skip
    documents: dict[Path, BaseModel] = {folder.config_file: config, folder.train_file: train}
    for half, share in zip(("base", "novel"), _shares(config), strict=True):
        result = _evaluation(config, half, share, digest)
        documents[folder.eval_file(Target.recorded(result.target))] = result
    (folder.path / "eval").mkdir(parents=True, exist_ok=True)
    folder.checkpoint_file.write_bytes(weights)
    # Without the care that real results get: nobody misses these when the machine stops.
    for file, document in documents.items():
        file.write_text(json.dumps(document.model_dump(mode="json", by_alias=True), indent=1))


def _shares(config: RunConfig) -> tuple[float, float]:
    """Shares of right answers that differ between methods, data sets and seeds as real ones do."""
    rank, place = METHODS.index(config.method), DATASETS.index(config.dataset)
    noise = int(hashlib.sha256(config.path.encode()).hexdigest()[:8], 16) / 16**8 - 0.5
    return 0.6 + 0.07 * rank + 0.03 * math.sin(place) + 0.04 * noise, 0.55 + 0.04 * rank + 0.06 * math.cos(place)


def _evaluation(config: RunConfig, half: str, share: float, checkpoint: str) -> EvalResult:
    total, rate = 400, SPEED[config.method] * (1 + 0.02 * (config.seed % 5))
    correct = min(total, round(share * total))
    return EvalResult(
        config_hash=config.hash, target=f"{config.dataset}:{half}:test", correct=correct, total=total,
        per_class=PerClass(correct=[correct], total=[total]), limit=None, dataset_size=total, num_classes=1,
        precision="fp32", batch_size=100, workers=0, device="cpu", seconds=total / rate, images_per_second=rate,
        images_per_second_model=1.5 * rate, warmup_batches=1, peak_memory_bytes=PEAK, use=USE,
        manifest_digest="d" * 64, backbone_digest="b" * 16, checkpoint_sha256=checkpoint,
        environment={"device": "cpu"},
    )  # fmt: skip
