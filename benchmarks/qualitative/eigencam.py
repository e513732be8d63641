"""Compute EigenCAM maps of the image tower: the first principal component of the last block's patch tokens.

Source: Muhammad and Yeasin 2020, "Eigen-CAM: Class Activation Map using Principal Components". It needs neither
labels nor gradients, so it is the same computation for every method; only the prompts in the tower differ.

Shapes: B images, N patches of an image (grid x grid), D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from procap.clip import CLIP
from procap.plan import NO_CHANGE, Plan, TokenSequence
from procap.weights.architectures import check_towers

CAM_RULE = (
    "first principal component of the patches after the last block, without prompts and class token, each map from its "
    "lowest value, 0, to its highest, 1; high without prompts is the side of the class token, with prompts the side "
    "that correlates with the map without them"
)


def image_maps(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> Tensor:
    """Compute EigenCAM maps [B, grid, grid] of images [B, 3, H, W] under the prompts of `plan`, by `CAM_RULE`.

    If each map took its sign from its own class token, two nearly equal maps could be shown with opposite signs.
    """
    with torch.inference_mode():
        plain = eigencam(*last_tokens(clip, images))
        return eigencam(*last_tokens(clip, images, plan), plain) if plan else plain


def last_tokens(clip: CLIP, images: Tensor, plan: Plan = NO_CHANGE) -> tuple[Tensor, Tensor]:
    """Return the last block's output: patch tokens [B, N, D], row by row from the top left, and class token [B, D].

    Tokens that `plan` appends or inserts are left out.
    """
    check_towers("a map of the image tower", ("image",), clip.name, clip.plain_towers)
    seen: list[TokenSequence] = []
    # The third argument of a forward hook is the module's output.
    hook = clip.visual.transformer.register_forward_hook(lambda *call: seen.append(call[2]))
    try:
        # The shortcuts would leave out rows of the last block.
        clip.visual(images, plan, optimized=False)
    finally:
        hook.remove()
    [sequence] = seen
    # Inserted prompts do not reorder the tower's own rows: the class token comes first, then the patches.
    rows = sequence.own_rows(plan)
    return rows[:, 1:], rows[:, 0]


def eigencam(patches: Tensor, class_token: Tensor, like: Tensor | None = None) -> Tensor:
    """Project the patch tokens [B, N, D] of each image on their first principal component, as a map [B, grid, grid].

    Tokens are centred per image, projected, and scaled to 0..1. The sign of a component is arbitrary: it is chosen so
    that the map correlates positively with `like` [B, grid, grid]. If there is no such map, or a flat one, the class
    token [B, D] gets the positive side of the patches' mean: a high value then means "similar to the class token along
    this direction", not "object". Equal patches give zeros. Computed in float64 on the CPU.
    Raises ValueError if N is not a square number.
    """
    batch, count, _ = patches.shape
    grid = math.isqrt(count)
    if grid * grid != count:
        raise ValueError(f"{count} patches do not form a square grid")
    reference = torch.zeros(batch, count) if like is None else like.flatten(1)
    tokens, class_token, reference = (x.detach().cpu().double() for x in (patches, class_token, reference))
    mean = tokens.mean(dim=1)
    centred = tokens - mean[:, None]
    # The first right singular vector of the centred tokens is their first principal component [B, D].
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[:, 0]
    # [B, N]: the coordinate of each patch along the component.
    scores = torch.einsum("bnd,bd->bn", centred, direction)
    # [B]: its sign is that of the correlation with the reference, and it is 0 without one.
    side = ((reference - reference.mean(dim=1, keepdim=True)) * scores).sum(dim=1)
    side = torch.where(side == 0, ((class_token - mean) * direction).sum(dim=1), side)
    scores = torch.where(side[:, None] < 0, -scores, scores)
    low, high = torch.aminmax(scores, dim=1, keepdim=True)
    # Centring equal tokens leaves only rounding errors (relative size 1e-16), whose direction is meaningless.
    flat = centred.square().sum(dim=(1, 2)) <= 1e-24 * tokens.square().sum(dim=(1, 2))
    return torch.where(flat[:, None], 0, (scores - low) / (high - low)).unflatten(1, (grid, grid))
