"""A run's name: short where it is as published, and told apart from its neighbours where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from procap.methods import METHODS
from procap.methods.method import TASKS
from runner.config import RunConfig, plan_run
from runner.naming import run_name


def planned(**changes: Any) -> RunConfig:
    return plan_run(**{"method": "coop", "dataset": "digits", **changes})


@pytest.mark.parametrize("method", METHODS)
def test_a_run_as_published_is_called_by_its_method_data_classes_and_seed(method: str) -> None:
    for task in TASKS:
        classes = "base" if task == "base-to-novel" else "all"
        for dataset in ("digits", "imagenet", "eurosat"):
            config = planned(method=method, dataset=dataset, classes=classes, task=task, seed=2)
            assert run_name(config) == f"{method} · {dataset} · {classes} · seed 2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"overrides": {"lr": 0.1}}, "lr 0.1"),
        ({"recipe": "procap"}, "recipe procap"),
        ({"recipe": "procap", "overrides": {"lr": 1e-5, "epochs": 3}}, "recipe procap, lr 1e-05, epochs 3"),
        ({"options": {"n_ctx": 16, "ctx_init": ""}}, 'n_ctx 16, ctx_init ""'),
        ({"overrides": {"weight_decay": 0}, "shots": 4}, "weight_decay 0.0, shots 4"),
        ({"overrides": {"epochs": 0}}, "epochs 0"),
        ({"shots": 0}, "shots full"),
        ({"overrides": {"optimizer": "adamw"}}, "optimizer adamw"),
        ({"backbone": "ViT-B/32", "precision": "bf16"}, "backbone ViT-B-32, precision bf16"),
        ({"backbone": "ViT-B/16"}, "precision fp32"),
        ({"precision": "bf16"}, "precision bf16"),
        ({"backbone": "/weights/tiny.safetensors"}, "backbone tiny.safetensors"),
        ({"picks": "0123456789abcdef"}, "picks 0123456789abcdef"),
    ],
)
def test_changes_from_the_published_run_follow(changes: dict[str, Any], said: str) -> None:
    assert run_name(planned(**changes)) == f"coop · digits · base · seed 1 · {said}"


def test_a_run_of_a_method_that_is_not_installed_has_a_name() -> None:
    config = planned(overrides={"lr": 0.1}).model_copy(update={"method": "elsewhere"})
    assert run_name(config) == "elsewhere · digits · base · seed 1"
