"""Images that only fill up a batch are never counted: not as answers, not as images, not in any rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from small_runs import make_runtime

import runner.inference
from runner.config import Target, plan_run
from runner.evaluate import evaluate
from runner.meters import Meter
from runner.train import train
from shards.loader import evaluation_batches


def test_padding_is_never_counted(short_checkpoint, few_digits, tmp_path, monkeypatch):
    runtime = make_runtime(few_digits, tmp_path)
    quick = {"epochs": 1, "batch_size": 5}
    config = plan_run(method="coop", dataset="digits", shots=1, backbone=str(short_checkpoint), overrides=quick)
    train(config, runtime)
    target = Target("digits", "all")
    padding: list[int] = []
    rated: list[int] = []

    def of_seven_processes(*args: object, **options: object) -> Iterator[tuple[torch.Tensor, ...]]:
        for rank in range(7):
            for batch in evaluation_batches(*args, **options | {"rank": rank, "world_size": 7}):  # type: ignore[arg-type]
                padding.append(int((batch[2] < 0).sum()))
                yield batch

    step = Meter.step
    monkeypatch.setattr(Meter, "step", lambda meter, images: (rated.append(images), step(meter, images))[1])
    monkeypatch.setattr(runner.inference, "evaluation_batches", of_seven_processes)
    for limit in (1, 20, None):
        padding.clear()
        rated.clear()
        result = evaluate(config, target, dataclasses.replace(runtime, limit=limit))
        assert sum(padding) > 0
        assert result.total == sum(rated) == (limit or result.dataset_size)
    monkeypatch.undo()
    again = evaluate(config, target, runtime, force=True)
    assert again.per_class == result.per_class
    assert again.calibration and result.calibration
    assert again.calibration.equal_mass.count == result.calibration.equal_mass.count
    assert again.calibration.nll == pytest.approx(result.calibration.nll, rel=1e-5)
