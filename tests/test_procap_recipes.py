"""Published recipes and the learning rate of every epoch, as the trainers of the CoOp family step it."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from procap.errors import UsageError
from procap.methods import METHODS, method_class
from procap.recipe import Recipe, learning_rate, step_rate

OWN = {
    # method, task, shots, data set: optimizer, lr, weight decay, epochs, batch, warm-up and its epochs, crop
    ("coop", "base-to-novel", 16, "dtd"): ("sgd", 0.002, 5e-4, 200, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "base-to-novel", 16, "imagenet"): ("sgd", 0.002, 5e-4, 50, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "cross-dataset", 16, "imagenet"): ("sgd", 0.002, 5e-4, 50, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "few-shot", 1, "dtd"): ("sgd", 0.002, 5e-4, 50, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "few-shot", 2, "dtd"): ("sgd", 0.002, 5e-4, 100, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "few-shot", 4, "dtd"): ("sgd", 0.002, 5e-4, 100, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "few-shot", 8, "dtd"): ("sgd", 0.002, 5e-4, 200, 32, "constant", 1, (0.08, 1.0)),
    ("coop", "few-shot", 16, "imagenet"): ("sgd", 0.002, 5e-4, 50, 32, "constant", 1, (0.08, 1.0)),
    ("cocoop", "base-to-novel", 16, "dtd"): ("sgd", 0.002, 5e-4, 10, 1, "constant", 1, (0.08, 1.0)),
    ("cocoop", "cross-dataset", 16, "imagenet"): ("sgd", 0.002, 5e-4, 10, 1, "constant", 1, (0.08, 1.0)),
    ("maple", "base-to-novel", 16, "dtd"): ("sgd", 0.0035, 5e-4, 5, 4, "constant", 1, (0.08, 1.0)),
    ("maple", "cross-dataset", 16, "imagenet"): ("sgd", 0.0026, 5e-4, 2, 4, "constant", 1, (0.08, 1.0)),
    ("maple", "domain-generalization", 16, "imagenet"): ("sgd", 0.0026, 5e-4, 2, 4, "constant", 1, (0.08, 1.0)),
    ("coprompt", "base-to-novel", 16, "dtd"): ("sgd", 0.0035, 5e-4, 8, 4, "constant", 1, (0.08, 1.0)),
    ("coprompt", "base-to-novel", 16, "food101"): ("sgd", 0.0035, 5e-4, 5, 4, "constant", 1, (0.08, 1.0)),
    ("procap", "base-to-novel", 16, "dtd"): ("adamw", 2.5e-4, 0.03, 50, 32, "linear", 3, (0.8, 1.0)),
    ("procap", "few-shot", 1, "imagenet"): ("adamw", 2.5e-4, 0.03, 50, 32, "linear", 3, (0.8, 1.0)),
}


@pytest.mark.parametrize("case", OWN, ids=lambda case: "-".join(map(str, case)))
def test_each_method_has_its_published_recipe(case):
    method, task, shots, dataset = case
    r = method_class(method).recipe(task, shots, dataset)
    got = (r.optimizer, r.lr, r.weight_decay, r.epochs, r.batch_size, r.warmup, r.warmup_epochs, r.crop_scale)
    assert got == OWN[case]
    assert (r.momentum, r.betas, r.warmup_lr, r.flip, r.test_batch_size) == (0.9, (0.9, 0.999), 1e-5, True, 100)


def test_only_eurosat_is_augmented_further_by_procap():
    plain, eurosat = (method_class("procap").recipe(dataset=name) for name in ("dtd", "EuroSAT"))
    assert (plain.colour_jitter, plain.rotation) == (0, 0)
    assert 0 < eurosat.colour_jitter <= 0.3 and 0 < eurosat.rotation <= 15
    assert plain == eurosat.model_copy(update={"colour_jitter": 0.0, "rotation": 0.0})


def test_options_that_a_published_recipe_changes_are_known_and_valid():
    assert method_class("maple").task_options("cross-dataset") == {"depth": 3}
    assert method_class("coop").task_options("few-shot") == {"n_ctx": 16, "ctx_init": ""}
    for name in METHODS:
        for task in ("base-to-novel", "cross-dataset", "domain-generalization", "few-shot"):
            kind = method_class(name)
            kind.Options(**kind.task_options(task))
            assert isinstance(kind.recipe(task), Recipe)
        with pytest.raises(UsageError, match="did you mean base-to-novel"):
            method_class(name).recipe("base-to-new")


def test_constant_warmup_then_a_cosine_that_never_arrives():
    """One epoch at 1e-5, then full rate; the last rate over the peak depends on the epochs alone."""
    for epochs, last in ((2, 1.0), (5, 0.3455), (10, 0.0955), (50, 0.0039)):
        recipe = Recipe(lr=0.0035, epochs=epochs, batch_size=4)
        rates = [learning_rate(recipe, epoch) for epoch in range(epochs)]
        assert rates[:2] == [1e-5, 0.0035]
        assert rates[-1] / 0.0035 == pytest.approx(last, abs=5e-5)


def test_a_warm_up_per_step_is_that_of_torch_followed_by_a_cosine_to_the_end():
    recipe = Recipe(lr=0.01, min_lr=1e-4, epochs=4, batch_size=1, schedule="warmup-step")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15, eta_min=1e-4)
    after = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])
    for step in range(20):
        assert step_rate(recipe, step, 20, warm=5) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        after.step()


@pytest.mark.parametrize("scale", [(0.0, 1.0), (0.9, 0.1), (0.5, 1.5)])
def test_a_crop_that_is_no_range_of_area_is_refused(scale):
    with pytest.raises(ValidationError, match="range of the image's area"):
        Recipe(lr=0.1, epochs=1, batch_size=1, crop_scale=scale)


@pytest.mark.parametrize("betas", [(1.5, 2.0), (0.9, 1.0), (-0.1, 0.999), (math.nan, 0.9)])
def test_decay_rates_that_adamw_cannot_use_are_refused(betas):
    with pytest.raises(ValidationError, match="decay rates from 0 up to, not including, 1"):
        Recipe(lr=0.1, epochs=1, batch_size=1, optimizer="adamw", betas=betas)


@pytest.mark.parametrize("warmup, length", [("none", 1), ("constant", 1), ("constant", 2), ("linear", 3)])
def test_after_warmup_the_rates_are_those_of_torch(warmup, length):
    """Torch's cosine annealing over all epochs, its clock started after the warm-up."""
    recipe = Recipe(lr=0.01, epochs=12, batch_size=1, warmup=warmup, warmup_epochs=length)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for epoch in range(0 if warmup == "none" else length, 12):
        assert math.isclose(learning_rate(recipe, epoch), optimizer.param_groups[0]["lr"], rel_tol=1e-9)
        optimizer.step()
        cosine.step()
