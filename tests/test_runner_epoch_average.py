"""A recipe with an average ends with the Gaussian-weighted mean of the weights at the ends of its epochs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from public_code import FIGURES
from safetensors.torch import load_file
from small_runs import make_runtime

from runner.config import RunConfig, plan_run
from runner.epoch_average import gaussian_weights
from runner.run_folders import RunFolder
from runner.train import train


@pytest.mark.parametrize(
    "name, epochs, mean, std",
    [("e20_mean15_std1", 20, 15, 1), ("e20_mean6_std10", 20, 6, 10), ("e50_mean45_std5", 50, 45, 5)],
)
def test_weights_of_the_epochs_are_those_of_the_public_code(name, epochs, mean, std):
    figures = np.load(FIGURES / "promptsrc.npz")
    assert gaussian_weights(epochs, mean, std) == pytest.approx(figures[f"gauss/{name}"].tolist(), rel=1e-9)


@pytest.fixture(scope="module")
def config(short_checkpoint) -> RunConfig:
    overrides = {"epochs": 3, "average": (2.0, 1.0), "warmup": "none", "batch_size": 20}
    return plan_run(
        method="ivlp", dataset="digits", shots=4, backbone=str(short_checkpoint), overrides=overrides,
        options={"depth": 2, "vision_depth": 2},
    )  # fmt: skip


def trained(config: RunConfig, data: Path, results: Path, until: int | None = None) -> dict[str, torch.Tensor]:
    runtime = make_runtime(data, results)
    train(config, runtime, until=until)
    return {} if until else load_file(RunFolder(results / config.path).checkpoint_file)


def test_a_paused_run_ends_with_the_average_of_an_uninterrupted_one(config, few_digits, tmp_path):
    straight = trained(config, few_digits, tmp_path / "straight")
    for epoch in (1, 2):
        trained(config, few_digits, tmp_path / "paused", until=epoch)
    paused = trained(config, few_digits, tmp_path / "paused")
    assert straight.keys() == paused.keys() and all(torch.equal(straight[name], paused[name]) for name in straight)


def test_the_result_is_the_weighted_sum_of_the_epochs(config, few_digits, tmp_path):
    """Without the average the run passes through the same weights, which its saved states hold."""
    plain = config.model_copy(update={"recipe": config.recipe.model_copy(update={"average": None})})
    total: dict[str, torch.Tensor] = {}
    for epoch, weight in enumerate(gaussian_weights(3, 2.0, 1.0), start=1):
        tensors = trained(plain, few_digits, tmp_path / "plain", until=epoch if epoch < 3 else None)
        if not tensors:
            state = load_file(max((tmp_path / "plain").rglob("step-*")))
            tensors = {name.removeprefix("param/"): tensor for name, tensor in state.items() if "param/" in name}
        for name, tensor in tensors.items():
            total[name] = total.get(name, 0) + weight * tensor
    averaged = trained(config, few_digits, tmp_path / "averaged")
    assert averaged.keys() == total.keys()
    for name in averaged:
        torch.testing.assert_close(averaged[name], total[name], atol=1e-7, rtol=1e-5)
