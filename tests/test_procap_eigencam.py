"""EigenCAM is the first principal component of what the last block gives for the patches, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_geometry import GEOMETRY

from procap.clip import CLIP
from procap.eigencam import eigencam, image_maps, last_tokens
from procap.methods.prompts import deep_plans
from procap.plan import INPUT, Plan, TokenOp

GRID, DEPTH = 6, 3
PATCHES = GRID * GRID


@pytest.fixture(scope="module")
def clip() -> CLIP:
    """Six by six patches, 36 of width 128."""
    geometry = replace(GEOMETRY, image_size=48, patch_size=8, vision_layers=4, text_layers=3)
    return CLIP.random(geometry, seed=1, name="grid")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def deep(clip: CLIP, count: int) -> Plan:
    """Prompts of `count` tokens in `DEPTH` layers, in MaPLe's and ProCAP's slots; none for 0."""
    if not count:
        return Plan()
    vision = [drawn(count, 128, seed=layer) for layer in range(DEPTH)]
    return deep_plans(clip, vision, [drawn(count, 64)] * DEPTH)[0]


def by_svd(patches: np.ndarray, class_token: np.ndarray) -> tuple[np.ndarray, float]:
    """The map [N] and its share of one image, straight from the definition."""
    centred = patches - patches.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    direction = directions[0] * np.sign((class_token - patches.mean(axis=0)) @ directions[0])
    places = centred @ direction
    return (places - places.min()) / (places.max() - places.min()), sizes[0] ** 2 / (sizes**2).sum()


@pytest.mark.parametrize(("grid", "width"), [(2, 64), (7, 64), (8, 64), (9, 64), (14, 96)])
def test_maps_are_those_of_a_direct_svd(grid, width):
    """Fewer patches than dimensions, as many, and more."""
    for seed in range(3):
        # Directions of different strengths, as real tokens have them, and a mean far from zero.
        spread = torch.linspace(3, 0.1, width)
        patches = drawn(3, grid * grid, width, seed=seed) * spread + 5 * drawn(width, seed=seed + 100)
        class_token = drawn(3, width, seed=seed + 200, scale=10)
        found = eigencam(patches, class_token)
        assert found.maps.shape == (3, grid, grid)
        for image in range(3):
            expected, share = by_svd(patches[image].double().numpy(), class_token[image].double().numpy())
            np.testing.assert_allclose(found.maps[image].flatten().numpy(), expected, atol=1e-9)
            assert float(found.share[image]) == pytest.approx(share, rel=1e-9)


def test_high_is_the_side_of_the_class_token():
    patches = drawn(1, 16, 32)
    mean, towards = patches.mean(dim=1), drawn(1, 32, seed=1)
    one, other = (eigencam(patches, mean + side * towards).maps for side in (1, -1))
    torch.testing.assert_close(one, 1 - other)
    assert one.min() == 0 and one.max() == 1


def test_a_map_that_is_given_decides_the_side():
    patches, class_token = drawn(4, 16, 32), drawn(4, 32, seed=1)
    own = eigencam(patches, class_token).maps
    for like in (own, own + 0.1 * drawn(4, 4, 4, seed=2)):
        torch.testing.assert_close(eigencam(patches, -class_token, like).maps, own)
        torch.testing.assert_close(eigencam(patches, class_token, 1 - like).maps, 1 - own)
    torch.testing.assert_close(eigencam(patches, class_token, torch.zeros(4, 4, 4)).maps, own)


def test_maps_with_prompts_never_oppose_those_without(clip):
    images = drawn(8, 3, 48, 48)
    plain = image_maps(clip, images).maps.flatten(1)
    for count in (2, 4):
        found = image_maps(clip, images, deep(clip, count)).maps.flatten(1)
        assert all(np.corrcoef(a, b)[0, 1] > 0 for a, b in zip(found.numpy(), plain.numpy(), strict=True))
        assert not torch.allclose(found, plain, atol=1e-3)


def insertions(count: int) -> Plan:
    """Tokens before the class token, between it and the patches, among the patches, and behind them, layer by layer."""
    return Plan(
        (
            TokenOp(INPUT, "insert", drawn(count, 128, seed=1), start=0),
            TokenOp(1, "insert", drawn(count, 128, seed=2), start=count + 1),
            TokenOp(2, "append", drawn(count, 128, seed=3)),
            TokenOp(3, "insert", drawn(count, 128, seed=4), start=2 * count + 4),
        )
    )


@pytest.mark.parametrize("count", [0, 2, 4])
@pytest.mark.parametrize("optimizations", ["all", "none"])
def test_tokens_are_what_the_last_block_gives_without_prompts(clip, count, optimizations):
    """Seen by a hook on the block, which sees every row in the plain tower."""
    images, plain = drawn(2, 3, 48, 48), clip.without_optimizations()
    seen: list[torch.Tensor] = []
    hook = clip.visual.transformer.resblocks[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    rows = {
        "slots": (deep(clip, count), [0, *range(1, 1 + PATCHES)]),
        "everywhere": (
            insertions(count) if count else Plan(),
            [count, *range(2 * count + 1, 2 * count + 4), *range(3 * count + 4, 3 * count + 1 + PATCHES)],
        ),
    }
    try:
        for plan, kept in rows.values():
            with torch.no_grad():
                plain.encode_image(images, plan)
                patches, class_token = last_tokens(clip if optimizations == "all" else plain, images, plan)
            torch.testing.assert_close(patches, seen[0][:, kept[1:]], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(class_token, seen[0][:, kept[0]], atol=1e-4, rtol=1e-4)
            assert patches.shape == (2, PATCHES, 128)
            seen.clear()
    finally:
        hook.remove()


def test_equal_patches_have_an_empty_map():
    patches = drawn(1, 1, 32, scale=100).expand(2, 9, 32)
    found = eigencam(patches, drawn(2, 32))
    assert not found.maps.any() and not found.share.any()
