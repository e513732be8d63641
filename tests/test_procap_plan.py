"""Plans do what they say: the fast towers equal the plain reference in features and in gradients, for any plan."""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch
from torch import Tensor

from procap import reference
from procap.clip import CLIP
from procap.errors import UserError
from procap.geometry import Geometry
from procap.plan import INPUT, Plan, TokenOp

LAYERS = 4
WORDS = ("cat", "annual crop land", "centrifuge", "red", "photo of a small", "dog and horse and cow and sheep")


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return CLIP.random(Geometry(24, 8, 96, LAYERS, 3, 64, LAYERS, 2, 77, 49408, 40, quick_gelu=True), seed=11)


Mode = Literal["replace", "insert", "append"]
MODES: tuple[Mode, ...] = ("replace", "insert", "append")


def draw_plan(chance: random.Random, width: int, rows: int, length: int, modes: tuple[Mode, ...] = MODES) -> Plan:
    """Some operations on the first `length` rows of a sequence; the first of all is never replaced."""
    ops = []
    for layer in sorted(chance.choices(range(INPUT, LAYERS), k=chance.randint(1, 5))):
        mode = chance.choice(modes)
        count = chance.randint(1, 3)
        start = chance.randint(1, length - count) if mode == "replace" else chance.randint(0, length)
        shape = (count, width) if chance.random() < 0.5 else (rows, count, width)
        tokens = torch.randn(shape, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
        ops.append(TokenOp(layer, mode, tokens.requires_grad_(), start))
        length += 0 if mode == "replace" else count
    return Plan(tuple(ops))


def gradients(features: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, features.numel()).view_as(features)
    tokens = [op.tokens for op in plan.tokens]
    found = torch.autograd.grad((features * weight).sum(), tokens, allow_unused=True, retain_graph=True)
    return tuple(torch.zeros_like(op.tokens) if g is None else g for op, g in zip(plan.tokens, found, strict=True))


def assert_equal_with_gradients(fast: Tensor, plain: Tensor, plan: Plan) -> None:
    assert (fast - plain).abs().max() <= 1e-5 * plain.abs().max()
    for ours, theirs in zip(gradients(fast, plan), gradients(plain, plan), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("seed", range(12))
def test_vision_tower_equals_reference(clip, seed):
    chance = random.Random(seed)
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(seed))
    plan = draw_plan(chance, width=96, rows=3, length=clip.visual.num_tokens)
    assert_equal_with_gradients(clip.encode_image(images, plan), reference.encode_image(clip, images, plan), plan)


@pytest.mark.parametrize("seed", range(12))
def test_text_tower_equals_reference_with_and_without_optimizations(clip, seed):
    chance = random.Random(seed)
    ids = clip.tokenize([f"X X X X {chance.choice(WORDS)}." for _ in range(3)])
    # Six rows hold the start token, four placeholders and a word: no operation may overwrite an end token.
    plan = draw_plan(chance, width=64, rows=3, length=6, modes=("replace", "insert"))
    plain = reference.encode_text(clip, ids, plan)
    assert_equal_with_gradients(clip.encode_text(ids, plan), plain, plan)
    assert_equal_with_gradients(clip.without_optimizations().encode_text(ids, plan), plain, plan)


def test_rows_name_where_tokens_ended_up(clip):
    """Tokens inserted before the last block can be found among the inputs of that block, whatever was shifted since."""
    images = torch.randn(1, 3, 24, 24, generator=torch.Generator().manual_seed(6))
    plan = Plan(
        (
            TokenOp(1, "insert", torch.zeros(2, 96), 4),
            TokenOp(INPUT, "append", torch.zeros(3, 96)),
            TokenOp(2, "replace", torch.zeros(2, 96), 4),
            TokenOp(3, "insert", torch.zeros(1, 96), 0),
        )
    )
    out = clip.visual(images, plan, keep_states=True)
    n = clip.visual.num_tokens
    assert out.op_rows == (slice(5, 7), slice(n + 3, n + 6), slice(5, 7), slice(0, 1))
    assert out.tokens.shape == (1, n + 6, 96)


def test_read_out_row_follows_tokens_put_before_it(clip):
    """The feature is the class token's state, also when rows come before it at the last block."""
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(7))
    out = clip.visual(images, Plan((TokenOp(LAYERS - 1, "insert", torch.ones(3, 96), 0),)), keep_states=True)
    expected = clip.visual.ln_post(out.tokens[:, 3]) @ clip.visual.proj
    torch.testing.assert_close(out.features, expected)


def test_prompts_beyond_the_context_are_refused_and_padding_is_not(clip):
    ids = clip.tokenize(["cat", "word " * 70])
    room = 77 - (int(ids.argmax(dim=1).max()) + 1)
    fits = Plan((TokenOp(INPUT, "insert", torch.zeros(room, 64), 1),))
    for over in (clip, clip.without_optimizations()):
        assert over.encode_text(ids, fits).shape == (2, 40)
        with pytest.raises(UserError, match="a prompt needs 78 tokens, CLIP reads 77"):
            over.encode_text(ids, Plan((TokenOp(INPUT, "insert", torch.zeros(room + 1, 64), 1),)))


@pytest.mark.parametrize(
    "op",
    [
        TokenOp(LAYERS, "append", torch.zeros(1, 96)),
        TokenOp(-2, "append", torch.zeros(1, 96)),
        TokenOp(0, "replace", torch.zeros(2, 96), start=9),
        TokenOp(0, "insert", torch.zeros(2, 96), start=11),
        TokenOp(0, "replace", torch.zeros(2, 96), start=-1),
    ],
)
def test_operations_that_do_not_fit_are_refused(clip, op):
    with pytest.raises(ValueError, match=r"does not fit|the tower has blocks"):
        clip.encode_image(torch.zeros(1, 3, 24, 24), Plan((op,)))


def test_reference_training_gives_the_same_loss_and_gradients(tiny_clip, tiny_space):
    from procap.methods import build_method

    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(9))
    labels = torch.tensor([0, 1, 3, 4])
    method = build_method("maple", tiny_clip, tiny_space, {}, torch.Generator().manual_seed(1))
    found = []
    for runner in (method, reference.with_plain_encoders(method)):
        terms = runner.loss(images, labels, runner.draw(torch.Generator().manual_seed(2)))
        total = torch.stack(list(terms.values())).sum()
        found.append((total, torch.autograd.grad(total, list(method.parameters()), allow_unused=True)))
    (fast, fast_grads), (plain, plain_grads) = found
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=0)
    for ours, theirs in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
