"""Plans do what they say: the fast towers equal the plain reference in features and in gradients, for any plan."""

from __future__ import annotations

import pytest
import torch

from procap.clip import CLIP
from procap.geometry import Geometry
from procap.plan import INPUT, Plan, TokenOp

LAYERS = 4


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return CLIP.random(Geometry(24, 8, 96, LAYERS, 3, 64, LAYERS, 2, 77, 49408, 40, quick_gelu=True), seed=11)


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
