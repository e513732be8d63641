"""Compute the frozen image features of a packed data set, for analyses of a user's own.

Shapes: N images, E joint embedding.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.config import Precision, RuntimeConfig
from runner.devices import num_decoders
from runner.engine import autocast
from runner.feature_store import EncodedImages, feature_key
from runner.session import Session
from runner.setup import make_eval_transform
from runner.threads import fitting_threads
from shards.default_paths import data_root
from shards.image_selection import select_target_images
from shards.loader import evaluation_batches
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
    precision: Precision = "fp32",
    **settings: Any,
) -> ImageFeatures:
    """Encode the images of `classes` in a packed split with the frozen image tower, in list order.

    Images are prepared as in an evaluation. Features that an earlier call or training has stored are read.
    settings: fields of `runner.config.RuntimeConfig`: data, device, workers.
    Raises UserError for data or weights that are not here.
    """
    session = Session(RuntimeConfig(**settings | {"data": data_root(str(settings.get("data") or ""))}))
    device, store = session.device, session.features
    selection = select_target_images(session.dataset(dataset), classes, split)
    images = selection.images
    clip = load_clip(backbone, pretrained).to(device)
    Acceleration().prepare(clip)
    transform, workers = make_eval_transform(clip), num_decoders(session.runtime.workers, device)
    # As a training on features describes its plain views (`runner.feature_training`).
    how = {"transform": f"{transform}, mirrored False", "precision": precision, "batch": BATCH, "ranks": 1}
    with fitting_threads(clip, BATCH, "eval"), autocast(precision, device):
        key = feature_key(clip, images, Acceleration(), **how, workers=workers)
        if not (encoded := store.read(key)):
            start, batches = time.perf_counter(), evaluation_batches(images, transform, BATCH, workers)
            # Each batch goes to the host, because the features of a large split may not fit next to the backbone.
            parts = [clip.encode_image(pixels).float().cpu() for pixels, _, _ in to_device(batches, device, moved=(0,))]
            encoded = EncodedImages(torch.cat(parts), {"features": time.perf_counter() - start})
            store.write(key, encoded)
    return ImageFeatures(encoded.features, torch.from_numpy(images.labels), selection.classnames, images.paths)
