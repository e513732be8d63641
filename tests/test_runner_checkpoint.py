"""Checkpoints and resumable states: what is written comes back, what is broken is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from procap.errors import UserError
from procap.recipe import Recipe
from runner.checkpoint import (
    CheckpointCard,
    StateFiles,
    TrainState,
    fill_optimizer,
    load_into,
    optimizer_slots,
    read_checkpoint,
    save_checkpoint,
    split_training_tensors,
    training_tensors,
)
from runner.config import RunConfig

CARD = CheckpointCard(
    config=RunConfig(method="coop", recipe=Recipe(lr=0.1, epochs=1, batch_size=1), dataset="digits"),
    classnames=("zero", "one"),
    template="a photo of the digit {}.",
    templates=("a photo of the digit {}",),
    backbone_digest="00",
    manifest_digest="11",
)
IDENTITY = {"config_hash": "aa", "backbone_digest": "bb"}


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.tokens = nn.Parameter(torch.randn(4, 8, generator=draw))
        self.scale = nn.Parameter(torch.randn((), generator=draw))


def walk(method: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([((parameter - 1) ** 4).sum() for parameter in method.parameters()]).sum().backward()
        optimizer.step()


def optimizers():
    yield lambda method: torch.optim.SGD(method.parameters(), 1e-3, momentum=0.9, weight_decay=0.1)
    yield lambda method: torch.optim.AdamW(method.parameters(), 1e-2, weight_decay=0.1)


def test_prompts_come_back_bit_for_bit_with_their_card(tmp_path):
    method = Small(0)
    sha256 = save_checkpoint(tmp_path / "c.safetensors", method, CARD)
    tensors, card = read_checkpoint(tmp_path / "c.safetensors", sha256)
    assert card == CARD
    other = Small(1)
    load_into(other, tensors, tmp_path / "c.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(method.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop("scale"), "lacks scale"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "unknown more"),
        (lambda tensors: tensors.update(tokens=torch.zeros(4, 9)), r"tokens is \[4, 9\], expected"),
    ],
)
def test_tensors_that_do_not_fit_the_method_are_named(change, word):
    tensors = dict(Small(0).state_dict())
    change(tensors)
    with pytest.raises(UserError, match=word):
        load_into(Small(0), tensors, Path("c.safetensors"))


def save(keeper, state, method, optimizer):
    return keeper.save(
        state, training_tensors(method, optimizer_slots(method, optimizer), GradScaler("cpu", enabled=False))
    )


def restore(keeper, method, optimizer):
    found = keeper.newest()
    if found is None:
        return None
    state, tensors = keeper.unpack(found[0])
    learned, slots = split_training_tensors(tensors)
    load_into(method, learned, found[1])
    fill_optimizer(method, optimizer, slots)
    return state


@pytest.mark.parametrize("build", optimizers())
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path, build):
    straight, stopped, resumed = Small(0), Small(0), Small(1)
    walk(straight, build(straight), 7)
    optimizer = build(stopped)
    walk(stopped, optimizer, 4)
    keeper = StateFiles(tmp_path, IDENTITY)
    save(keeper, TrainState(step=4), stopped, optimizer)
    optimizer = build(resumed)
    restore(keeper, resumed, optimizer)
    walk(resumed, optimizer, 3)
    assert torch.equal(resumed.tokens, straight.tokens)
    assert not torch.equal(stopped.tokens, straight.tokens)


def test_two_states_are_kept_and_a_broken_newest_falls_back(tmp_path, caplog):
    method = Small(0)
    optimizer = torch.optim.SGD(method.parameters(), 0.1)
    keeper = StateFiles(tmp_path, IDENTITY)
    paths = [save(keeper, TrainState(step=step), method, optimizer) for step in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == paths[1:]
    paths[2].write_bytes(paths[2].read_bytes()[:-3])
    state = restore(keeper, method, optimizer)
    assert state is not None
    assert state.step == 2
    assert str(paths[2]) in caplog.text
    paths[1].write_bytes(b"")
    assert restore(keeper, method, optimizer) is None


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    method = Small(0)
    optimizer = torch.optim.SGD(method.parameters(), 0.1)
    keeper = StateFiles(tmp_path, IDENTITY)
    good = save(keeper, TrainState(step=1), method, optimizer)
    with torch.no_grad():
        method.tokens[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"tokens is not finite after step 2"):
        save(keeper, TrainState(step=2), method, optimizer)
    assert list(tmp_path.iterdir()) == [good]
