"""Compute the frozen image features of a packed data set, for analyses of a user's own.

Shapes: N images, E joint embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.config import Precision
from runner.devices import num_decoders, resolve_device
from runner.engine import autocast
from runner.setup import make_eval_transform
from runner.threads import fitting_threads
from shards.default_paths import data_root
from shards.image_selection import select_target_images
from shards.loader import evaluation_batches
from shards.reader import open_dataset
from shards.transfer import to_device

BATCH = 100


class ImageFeatures(NamedTuple):
    """features [N, E] float32, not normalised; labels [N], indices of `classnames`; paths of the images."""

    features: Tensor
    labels: Tensor
    classnames: tuple[str, ...]
    paths: list[str]


@torch.no_grad()
def image_features(
    dataset: str,
    split: str = "test",
    *,
    classes: str = "all",
    backbone: str = "mini",
    pretrained: str | None = None,
    data: Path | str | None = None,
    precision: Precision = "fp32",
    device: str = "auto",
    workers: int | None = None,
) -> ImageFeatures:
    """Encode the images of `classes` in a packed split with the frozen image tower, in list order.

    Images are prepared as in an evaluation. Raises UserError for data or weights that are not here.
    """
    chosen = resolve_device(device)
    selection = select_target_images(open_dataset(data_root(str(data or "")), dataset), classes, split)
    images = selection.images
    clip = load_clip(backbone, pretrained).to(chosen)
    Acceleration().prepare(clip)
    batches = evaluation_batches(images, make_eval_transform(clip), BATCH, num_decoders(workers, chosen))
    with fitting_threads(clip, BATCH, "eval"), autocast(precision, chosen):
        # Each batch goes to the host, because the features of a large split may not fit next to the backbone.
        encoded = [clip.encode_image(pixels).float().cpu() for pixels, _, _ in to_device(batches, chosen, moved=(0,))]
    return ImageFeatures(torch.cat(encoded), torch.from_numpy(images.labels), selection.classnames, images.paths)
