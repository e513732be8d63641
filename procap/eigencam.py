"""EigenCAM of the image tower: the first principal component of the last block's patch tokens, as a map.

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
from procap.plan import Plan

SIGN_RULE = (
    "the map of the tower without prompts is turned so that the class token lies on the positive side of the patches' "
    "mean; a map with prompts is turned so that it correlates positively with that one"
)


class EigenCAM(NamedTuple):
    """maps: [B, grid, grid], 0 to 1 in each image; share: [B], of the patches' variance that the component explains."""

    maps: Tensor
    share: Tensor


def image_maps(clip: CLIP, images: Tensor, plan: Plan = ()) -> EigenCAM:
    """EigenCAM of images [B, 3, H, W] under the prompts of `plan`, turned by `SIGN_RULE`.

    Were each map turned by its own class token, two methods whose maps agree but for a little would now and then be
    shown with opposite signs, which looks like the largest difference there can be.
    """
    with torch.inference_mode():
        plain = eigencam(*last_tokens(clip, images))
        return eigencam(*last_tokens(clip, images, plan), plain.maps) if plan else plain


def last_tokens(clip: CLIP, images: Tensor, plan: Plan = ()) -> tuple[Tensor, Tensor]:
    """What the last block gives: patch tokens [B, N, D], row by row from the top left, and the class token [B, D].

    Tokens that `plan` appends or inserts are left out.
    """
    output = clip.visual(images, plan, clip.optimizations, keep_states=True)
    assert output.tokens is not None
    kept = torch.ones(output.tokens.shape[1], dtype=torch.bool)
    for op, rows in zip(plan, output.rows, strict=True):
        if op.mode != "replace":
            kept[rows] = False
    # Wherever prompts go, the tower's own rows keep their order: the class token, then the patches.
    own = kept.nonzero().flatten().to(output.tokens.device)
    return output.tokens[:, own[1:]], output.tokens[:, own[0]]


def eigencam(patches: Tensor, class_token: Tensor, like: Tensor | None = None) -> EigenCAM:
    """The map of patch tokens [B, N, D]: their places along the direction in which those of one image differ most.

    Tokens are centred per image, projected on their first principal component, and brought to 0..1. A component has no
    sign of its own: it is turned to correlate positively with the map `like` [B, grid, grid]; where there is none, or
    a flat one, so that the class token [B, D], which the feature is read from, lies on the positive side of the
    patches' mean. High thus means "like the class token along this direction", not "object". Equal patches give zeros.
    Float64 on the CPU, image by image, whatever the batch and the device.
    Raises ValueError where the patches are no square.
    """
    batch, count, _ = patches.shape
    grid = math.isqrt(count)
    if grid * grid != count:
        raise ValueError(f"{count} patches do not form a square grid")
    maps, share = torch.zeros(batch, count).double(), torch.zeros(batch).double()
    given = torch.zeros(batch, count) if like is None else like.flatten(1)
    tokens, towards, known = (x.detach().cpu().double() for x in (patches, class_token, given))
    for image in range(batch):
        maps[image], share[image] = _map(tokens[image], towards[image], known[image])
    return EigenCAM(maps.reshape(batch, grid, grid), share)


def _map(tokens: Tensor, towards: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    mean = tokens.mean(dim=0)
    centred = tokens - mean
    size = centred.square().sum()
    # Centring equal tokens leaves rounding, about 1e-16 of their size, and its direction means nothing.
    if size <= 1e-24 * tokens.square().sum():
        return torch.zeros(len(tokens), dtype=tokens.dtype), size.new_zeros(())
    direction = _first_component(centred)
    places = centred @ direction
    side = (like - like.mean()) @ places or (towards - mean) @ direction
    places = -places if side < 0 else places
    low, high = places.min(), places.max()
    return (places - low) / (high - low), places.square().sum() / size


def _first_component(centred: Tensor) -> Tensor:
    """The first right singular vector [D] of centred tokens [N, D], with either sign."""
    if len(centred) >= centred.shape[1]:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    # Of the two Gram matrices the smaller one: ViT-B/16 has 196 patches and a width of 768.
    direction = centred.T @ torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1]
    return direction / direction.norm()
