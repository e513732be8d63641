"""Compute EigenCAM maps of the image tower: the first principal component of the last block's patch tokens.

Source: Muhammad and Yeasin 2020, "Eigen-CAM: Class Activation Map using Principal Components". It needs neither
labels nor gradients, so it is the same computation for every method; only the prompts in the tower differ.

Shapes: B images, N patches of an image (grid x grid), D width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from procap.clip import CLIP
from procap.plan import NO_CHANGE, Plan

SIGN_RULE = (
    "the map of the tower without prompts is turned so that the class token lies on the positive side of the patches' "
    "mean; a map with prompts is turned so that it correlates positively with that one"
)


class EigenCAM(NamedTuple):
    """maps: [B, grid, grid], 0 to 1 in each image; share: [B], of the patches' variance that the component explains."""

    maps: Tensor
    share: Tensor


def image_maps(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> EigenCAM:
    """Compute EigenCAM of images [B, 3, H, W] under the prompts of `plan`, with the sign chosen by `SIGN_RULE`.

    If each map took its sign from its own class token, two nearly equal maps could be shown with opposite signs.
    """
    with torch.inference_mode():
        plain = eigencam(*last_tokens(clip, images))
        return eigencam(*last_tokens(clip, images, plan), plain.maps) if plan else plain


def last_tokens(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> tuple[Tensor, Tensor]:
    """Return the last block's output: patch tokens [B, N, D], row by row from the top left, and class token [B, D].

    Tokens that `plan` appends or inserts are left out.
    """
    output = clip.visual(images, plan, clip.optimized, keep_states=True)
    assert output.tokens is not None
    is_own = torch.ones(output.tokens.shape[1], dtype=torch.bool)
    for op, rows in zip(plan.tokens, output.op_rows, strict=True):
        if op.mode != "replace":
            is_own[rows] = False
    # Inserted prompts do not reorder the tower's own rows: the class token comes first, then the patches.
    own = is_own.nonzero().flatten().to(output.tokens.device)
    return output.tokens[:, own[1:]], output.tokens[:, own[0]]


def eigencam(patches: Tensor, class_token: Tensor, like: Tensor | None = None) -> EigenCAM:
    """Project the patch tokens [B, N, D] of each image on their first principal component, as a map.

    Tokens are centred per image, projected, and scaled to 0..1. The sign of a component is arbitrary: it is chosen so
    that the map correlates positively with `like` [B, grid, grid]. If there is no such map, or a flat one, the class
    token [B, D] gets the positive side of the patches' mean: a high value then means "similar to the class token along
    this direction", not "object". Equal patches give zeros.
    Computed in float64 on the CPU, image by image, so that neither batch nor device changes the result.
    Raises ValueError if N is not a square number.
    """
    batch, count, _ = patches.shape
    grid = math.isqrt(count)
    if grid * grid != count:
        raise ValueError(f"{count} patches do not form a square grid")
    maps, share = torch.zeros(batch, count).double(), torch.zeros(batch).double()
    given = torch.zeros(batch, count) if like is None else like.flatten(1)
    tokens, class_tokens, likes = (x.detach().cpu().double() for x in (patches, class_token, given))
    for image in range(batch):
        maps[image], share[image] = _map(tokens[image], class_tokens[image], likes[image])
    return EigenCAM(maps.reshape(batch, grid, grid), share)


def _map(tokens: Tensor, class_token: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    mean = tokens.mean(dim=0)
    centred = tokens - mean
    size = centred.square().sum()
    # Centring equal tokens leaves only rounding errors (relative size 1e-16), whose direction is meaningless.
    if size <= 1e-24 * tokens.square().sum():
        return torch.zeros(len(tokens), dtype=tokens.dtype), size.new_zeros(())
    direction = _first_component(centred)
    scores = centred @ direction
    side = (like - like.mean()) @ scores or (class_token - mean) @ direction
    scores = -scores if side < 0 else scores
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low), scores.square().sum() / size


def _first_component(centred: Tensor) -> Tensor:
    """Return the first right singular vector [D] of centred tokens [N, D], with either sign."""
    if len(centred) >= centred.shape[1]:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    # Decompose the smaller of the two Gram matrices: ViT-B/16 has 196 patches and a width of 768.
    direction = centred.T @ torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1]
    return direction / direction.norm()
