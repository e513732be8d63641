"""CLIP-LoRA equals its public code with and without dropout, whose masks depend on no order of computation."""

from dataclasses import dataclass, field, replace

import numpy as np
import public_code
import pytest
import torch
from public_code import LABELS, draws, figures_of, images, near, near_condensed, take_steps

from procap import recipe, reference
from procap.low_rank import Dropout
from procap.methods import method_class
from procap.methods.public import public_parameters
from procap.plan import Plan
from runner.engine import Batch, Engine
from runner.planning import plan_run


def built(**options):
    method = public_code.build("cliplora", **options)
    public_code.load_drawn(method, lambda name, shape: 0.05)
    return method


def compare_gradients(method, start):
    measured, public = figures_of("cliplora"), public_parameters(method)
    names = [key for key in measured.files if key.startswith(start)]
    assert len(names) == 48
    for key in names:
        near_condensed(public[key.removeprefix(start)].grad, measured[key])


@dataclass(frozen=True)
class DrawnDropout(Dropout):
    """The masks that the public code was given."""

    masks: dict = field(default_factory=dict)

    def random_words(self, x):
        return x

    def factors(self, words, projection):
        return self.masks[projection][:, : words.shape[1]]


def drawn_masks():
    """Draw the masks in the recorded order; by tower and block, then by projection: [N, L, D]."""
    measured, masks = figures_of("cliplora"), {}
    source = draws(int(measured["dropout/seed"]))
    for line in measured["dropout/order"].tolist():
        name, shape = line.split("=")
        length, batch, width = map(int, shape.split("x"))
        kept = source.random((length, batch, width), dtype=np.float32) >= 0.25
        tower = "visual" if name.startswith("visual") else "text"
        block = int(name.split("resblocks.")[1].split(".")[0])
        projection = name.split("attn.")[1][0]
        masks.setdefault((tower, block), {})[projection] = torch.from_numpy(kept).transpose(0, 1) / 0.75
    return masks


def with_drawn_masks(method, monkeypatch):
    masks, plans = drawn_masks(), method.plans

    def patched(prompts, noise=None):
        towers = zip(("visual", "text"), plans(prompts, noise), strict=True)
        return tuple(
            Plan(
                branches={
                    block: replace(branch, dropout=DrawnDropout(0.25, noise[0], masks=masks[tower, block]))
                    for block, branch in plan.branches.items()
                }
            )
            for tower, plan in towers
        )

    monkeypatch.setattr(type(method), "plans", lambda self, prompts, noise=None: patched(prompts, noise))


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
def test_without_dropout_merged_weights_equal_the_public_code(encoders):
    measured, method = figures_of("cliplora"), built(dropout=0.0)
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    loss = run.loss(images(), LABELS, method.draw(torch.Generator()))["ce"]
    near(loss.detach(), measured["loss/total"])
    loss.backward()
    compare_gradients(method, "grad/")
    near(run.classifier()(images()), measured["eval_logits"])
    near(run.classifier(public_code.novel_space(method, measured))(images()), measured["novel_logits"])
    engine = Engine(run, plan_run(method="cliplora", dataset="dtd"))
    batches = [Batch(images(), LABELS, ())] * 3
    assert len([*take_steps(engine, batches, measured["steps/lr"], measured["steps/loss"])]) == 3


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
def test_with_dropout_the_loss_and_its_gradients_equal_the_public_code(encoders, monkeypatch):
    measured, method = figures_of("cliplora"), built()
    with_drawn_masks(method, monkeypatch)
    if encoders == "plain":
        # It computes the masks by itself.
        monkeypatch.setattr(
            reference, "_dropout_factors", lambda dropout, number, x: dropout.factors(x, "qkvo"[number])
        )
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    loss = run.loss(images(), LABELS, (torch.zeros((), dtype=torch.int64),))["ce"]
    near(loss.detach(), measured["dropout/loss/ce"])
    loss.backward()
    compare_gradients(method, "dropout/grad/")


def test_the_plain_reference_gives_the_same_loss_with_masks_that_it_computes_by_itself(monkeypatch):
    method, noise = built(), (torch.tensor(2**61 + 12345),)
    with torch.no_grad():
        fast = method.loss(images(), LABELS, noise)["ce"]
        other = method.loss(images(), LABELS, (noise[0] + 1,))["ce"]
        for name in ("factors", "random_words"):
            monkeypatch.setattr(Dropout, name, None)
        plain = reference.with_plain_encoders(method).loss(images(), LABELS, noise)["ce"]
    near(plain, fast)
    assert abs(other - fast) > 100 * abs(plain - fast)


def test_recipe_and_sizes_are_those_of_the_public_code():
    measured, cls = figures_of("cliplora"), method_class("cliplora")
    for shots, steps in measured["rule/iterations"].tolist():
        assert cls.recipe(shots=shots).iterations == steps
    rates = [recipe.step_rate(cls.recipe(shots=1), step, 500) for step in range(500)]
    assert rates == pytest.approx(measured["rule/lr_1shot"].tolist(), rel=1e-9)
    method = public_code.build("cliplora")
    for width, bound in measured["rule/init_bound_A"].tolist():
        drawn = torch.cat([value.flatten() for value in method.parameters() if value.shape == (2, int(width))])
        assert 0.99 * bound < drawn.abs().max() <= bound


def test_masks_depend_on_seed_item_row_and_column_alone():
    dropout = Dropout(0.25, torch.tensor(2**61 + 12345))
    words = dropout.random_words(torch.zeros(6, 5, 64))
    assert torch.equal(dropout.starting_at(2).random_words(torch.zeros(4, 5, 64)), words[2:])
    for rank in (0, 1):
        share = replace(dropout, first=rank, step=2).random_words(torch.zeros(3, 3, 64))
        assert torch.equal(share, words[rank::2, :3]), "a process draws the masks of its share of the batch"
    other = replace(dropout, seed=dropout.seed + 1).random_words(torch.zeros(6, 5, 64))
    assert (other == words).float().mean() < 0.01
