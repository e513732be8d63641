"""Published recipes and the learning rate of every epoch, as the trainers of the CoOp family step it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from procap.errors import UsageError
from procap.methods import METHODS, method_class
from procap.methods.method import TASKS
from procap.recipe import Recipe, learning_rate, step_rate
from runner.config import plan_run

DASSL = {"optimizer": "sgd", "weight_decay": 5e-4, "momentum": 0.9, "warmup": "constant", "warmup_lr": 1e-5}
DASSL |= {"warmup_epochs": 1, "schedule": "epoch", "batches": "random", "drop_last": True, "crop_scale": (0.08, 1.0)}
DASSL |= {"betas": (0.9, 0.999), "eps": 1e-8, "flip": True, "augmentation": "crop", "test_batch_size": 100}
"""What the public trainers do unless their configurations say otherwise."""

PROCAP = {"optimizer": "adamw", "weight_decay": 0.03, "warmup": "linear", "warmup_epochs": 3, "crop_scale": (0.8, 1.0)}
MMRL = {"optimizer": "adamw", "crop_scale": (0.5, 1.0), "test_batch_size": 250}
TWO_STAGES = {"optimizer": "adamw", "weight_decay": 0.01, "drop_last": False, "test_batch_size": 32, "warmup": "none"}
TWO_STAGES |= {"schedule": "step", "min_lr": 1e-6, "epochs": 10}
ONE_CLASS = {"batches": "class", "warmup_lr": 1e-6}

OWN = [
    # method, task, shots, data set, learning rate, epochs, batch; and what differs from `DASSL`
    ("coop", "base-to-novel", 16, "dtd", 0.002, 200, 32, {}),
    ("coop", "base-to-novel", 16, "imagenet", 0.002, 50, 32, {}),
    ("coop", "cross-dataset", 16, "imagenet", 0.002, 50, 32, {}),
    ("coop", "few-shot", 1, "dtd", 0.002, 50, 32, {}),
    ("coop", "few-shot", 2, "dtd", 0.002, 100, 32, {}),
    ("coop", "few-shot", 4, "dtd", 0.002, 100, 32, {}),
    ("coop", "few-shot", 8, "dtd", 0.002, 200, 32, {}),
    ("coop", "few-shot", 16, "imagenet", 0.002, 50, 32, {}),
    ("cocoop", "base-to-novel", 16, "dtd", 0.002, 10, 1, {}),
    ("cocoop", "cross-dataset", 16, "imagenet", 0.002, 10, 1, {}),
    ("kgcoop", "base-to-novel", 16, "imagenet", 0.002, 100, 128, {}),
    ("kgcoop", "few-shot", 4, "dtd", 0.002, 100, 128, {}),
    ("vpt", "base-to-novel", 16, "dtd", 0.0025, 5, 4, {}),
    ("ivlp", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("ivlp", "cross-dataset", 16, "imagenet", 0.0035, 5, 4, {}),
    ("maple", "base-to-novel", 16, "dtd", 0.0035, 5, 4, {}),
    ("maple", "cross-dataset", 16, "imagenet", 0.0026, 2, 4, {}),
    ("maple", "domain-generalization", 16, "imagenet", 0.0026, 2, 4, {}),
    ("promptsrc", "base-to-novel", 16, "dtd", 0.0025, 20, 4, {"average": (15, 1)}),
    ("promptsrc", "cross-dataset", 16, "imagenet", 0.0025, 20, 4, {"average": (6, 10)}),
    ("promptsrc", "few-shot", 1, "dtd", 0.0025, 50, 4, {"average": (45, 5)}),
    ("promptsrc", "few-shot", 16, "ucf101", 0.0025, 50, 4, {"average": (30, 30)}),
    ("coprompt", "base-to-novel", 16, "dtd", 0.0035, 8, 4, {"augmentation": "randaugment"}),
    ("coprompt", "base-to-novel", 16, "food101", 0.0035, 5, 4, {"augmentation": "randaugment"}),
    ("tcp", "base-to-novel", 16, "dtd", 0.002, 50, 32, {"optimizer": "adam", "eps": 1e-3, "test_batch_size": 500}),
    ("tcp", "base-to-novel", 16, "sun397", 0.002, 25, 32, {"optimizer": "adam", "eps": 1e-3, "test_batch_size": 500}),
    ("mma", "base-to-novel", 16, "dtd", 0.0015, 5, 16, {"warmup": "none"}),
    ("mma", "cross-dataset", 16, "imagenet", 0.0015, 5, 128, {"warmup": "none"}),
    ("mmrl", "base-to-novel", 16, "dtd", 0.001, 10, 4, MMRL),
    ("mmrl", "base-to-novel", 16, "imagenet", 0.001, 5, 32, MMRL),
    ("mmrl", "few-shot", 1, "dtd", 0.001, 50, 32, MMRL),
    ("mmrl", "few-shot", 16, "imagenet", 0.001, 5, 32, MMRL),
    ("mmrl", "cross-dataset", 16, "imagenet", 0.001, 1, 32, {**MMRL, "warmup": "none"}),
    ("2sfs", "base-to-novel", 16, "dtd", 2e-4, 10, 32, {**TWO_STAGES, "iterations": 4800}),
    ("2sfs", "few-shot", 1, "dtd", 2e-4, 10, 32, {**TWO_STAGES, "iterations": 300}),
    ("skipt", "base-to-novel", 16, "dtd", 2e-5, 20, 4, {**ONE_CLASS, "vision_lr": 5e-6}),
    ("skipt", "base-to-novel", 16, "food101", 2e-5, 5, 4, {**ONE_CLASS, "vision_lr": 5e-6}),
    ("skipt", "cross-dataset", 16, "imagenet", 1e-5, 5, 4, {**ONE_CLASS, "vision_lr": 1e-6, "warmup_lr": 1e-8}),
    ("skipt", "few-shot", 4, "dtd", 1e-5, 40, 4, {**ONE_CLASS, "warmup": "none"}),
    ("skipt", "few-shot", 2, "sun397", 1e-5, 10, 4, {**ONE_CLASS, "warmup": "none", "batches": "random"}),
    ("mmlop", "base-to-novel", 16, "dtd", 0.0025, 30, 4, {}),
    ("mmlop", "few-shot", 1, "dtd", 0.0025, 50, 4, {}),
    ("mmlop", "domain-generalization", 16, "imagenet", 0.0025, 50, 4, {}),
    ("procap", "base-to-novel", 16, "dtd", 2.5e-4, 50, 32, PROCAP),
    ("procap", "few-shot", 1, "imagenet", 2.5e-4, 50, 32, PROCAP),
]


@pytest.mark.parametrize("case", OWN, ids=lambda case: "-".join(map(str, case[:4])))
def test_each_method_has_its_published_recipe(case):
    method, task, shots, dataset, lr, epochs, batch, changes = case
    fields = {**DASSL, "lr": lr, "epochs": epochs, "batch_size": batch, **changes}
    assert method_class(method).recipe(task, shots, dataset) == Recipe.model_validate(fields)


def test_every_method_has_a_row():
    assert {case[0] for case in OWN} == {*METHODS} - {"zeroshot"}


REG_WEIGHTS = {"stanford-cars": 7.0, "fgvc-aircraft": 6.0, "sun397": 6.0, "dtd": 6.0, "food101": 5.0, "ucf101": 3.0}
REG_WEIGHTS |= {"oxford-flowers": 4.0, "imagenet": 0.5, "caltech101": 0.5, "oxford-pets": 0.2, "eurosat": 0.01}
CONSISTENCY = {"imagenet": (12, 4, 8.0), "caltech101": (12, 4, 4.0), "oxford-pets": (12, 2, 0.1), "dtd": (12, 2, 8.0)}
CONSISTENCY |= {"stanford-cars": (12, 4, 4.0), "oxford-flowers": (9, 4, 8.0), "food101": (9, 4, 0.5)}
CONSISTENCY |= {"fgvc-aircraft": (9, 4, 2.0), "sun397": (12, 4, 8.0), "eurosat": (12, 2, 0.1), "ucf101": (12, 4, 2.0)}


def test_methods_have_the_options_published_for_each_task_and_data_set():
    def options(method: str, task: str = "base-to-novel", dataset: str = "dtd") -> dict[str, object]:
        return method_class(method).task_options(task, 16, dataset)

    for dataset, weight in REG_WEIGHTS.items():
        wide = {"width": 2048} if dataset == "eurosat" else {}
        assert (
            options("mmrl", dataset=dataset) == options("mmrl", "few-shot", dataset) == {"reg_weight": weight, **wide}
        )
    assert options("mmrl", "cross-dataset", "imagenet") == {"reg_weight": 0.2}
    for dataset, (depth, n_ctx, weight) in CONSISTENCY.items():
        assert options("coprompt", dataset=dataset) == {"depth": depth, "n_ctx": n_ctx, "weight": weight}
    for task in ("cross-dataset", "domain-generalization"):
        assert options("maple", task) == options("mmlop", task) == {"depth": 3}
        assert options("promptsrc", task) == {"depth": 3, "vision_depth": 3}
    assert options("coop", "few-shot") == {"n_ctx": 16, "ctx_init": ""}
    assert options("skipt") == {"keep_labels": False}
    assert not any(map(options, ("kgcoop", "vpt", "ivlp", "maple", "promptsrc", "tcp", "mma", "2sfs", "mmlop")))


def test_every_method_takes_the_recipe_of_procap():
    """Nothing is left of the method's own: no average over epochs, no second rate, no batches of one class."""
    same = plan_run(method="procap", dataset="dtd").recipe
    for name in {*METHODS} - {"zeroshot"}:
        assert plan_run(method=name, dataset="dtd", recipe="procap").recipe == same


def test_only_eurosat_is_augmented_further_by_procap():
    plain, eurosat = (method_class("procap").recipe(dataset=name) for name in ("dtd", "EuroSAT"))
    assert (plain.colour_jitter, plain.rotation) == (0, 0)
    assert 0 < eurosat.colour_jitter <= 0.3 and 0 < eurosat.rotation <= 15
    assert plain == eurosat.model_copy(update={"colour_jitter": 0.0, "rotation": 0.0})


def test_recipes_and_options_are_valid_for_every_task_and_another_task_is_refused():
    for name, task in itertools.product(METHODS, TASKS):
        kind = method_class(name)
        kind.Options(**kind.task_options(task))
        assert isinstance(kind.recipe(task), Recipe)
    with pytest.raises(UsageError, match="unknown task 'base-to-new': did you mean base-to-novel"):
        plan_run(method="maple", dataset="dtd", task="base-to-new")


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
