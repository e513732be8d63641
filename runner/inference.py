"""Compute logits of the images of a target, with the whole classifier or from image features stored on disk.

Shapes: B images, C classes, E joint embedding, N images of the target, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier, SampledClassifier
from procap.clip import CLIP
from runner.cuda_graphs import CudaGraphs, GraphedFunction
from runner.distributed.ranks import Ranks
from runner.features import FeatureStore
from runner.meters import Meter
from shards.loader import evaluation_batches
from shards.reader import Split
from shards.transfer import to_device
from shards.transforms import EvalTransform

WARMUP_BATCHES = 2

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Images [B, 3, S, S] to logits [B, C] or to features [B, E]."""


class Inference:
    """Logits of N images; the image tower runs for the indices `to_encode`, and not for `stored`."""

    def __init__(
        self,
        clip: CLIP,
        classifier: Classifier | SampledClassifier,
        images: Split,
        store: FeatureStore | None,
        graphs: CudaGraphs | None,
    ) -> None:
        self.clip, self.classifier, self.images, self.store = clip, classifier, images, store
        self._logits: Forward = classifier
        # Inference mode from the warm-up on, because torch.compile compiles separately for each gradient mode.
        self._encode: Forward = torch.inference_mode()(clip.encode_image)
        if graphs:
            self._logits, self._encode = GraphedFunction(self._logits, graphs), GraphedFunction(self._encode, graphs)
        # The store identifies images by position in the packed split, so that other selections share their features.
        is_stored = store.contains(images.positions) if store else np.zeros(len(images), bool)
        self.to_encode, self.stored = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)

    @property
    def features(self) -> Literal["computed", "cached", "mixed"]:
        """The source of the image features, as results name it."""
        if not len(self.stored):
            return "computed"
        return "mixed" if len(self.to_encode) else "cached"

    def warm_up(self, images: int) -> int:
        """Run batches of `images` blank images before rates are measured; returns the number of batches."""
        if not len(self.to_encode):
            return 0
        size = self.clip.geometry.image_size
        blank = torch.zeros(images, 3, size, size, device=self.clip.device)
        for _ in range(WARMUP_BATCHES):
            self._encode(blank) if self.store else self._logits(blank)
        return WARMUP_BATCHES

    def batches(
        self, transform: EvalTransform, batch_size: int, workers: int, ranks: Ranks
    ) -> Iterator[tuple[torch.Tensor | None, NDArray[np.int64]]]:
        """Yield this rank's images [B, 3, S, S], None if their features are stored, and indices [B], -1 for padding."""
        split, share = self.images.subset(self.to_encode), {"rank": ranks.rank, "world_size": ranks.size}
        decoded = evaluation_batches(split, transform, batch_size, workers, **share)
        for pixels, _, rows in to_device(decoded, self.clip.device, moved=(0,)):
            # `rows` are indices among the images to encode.
            row = rows.numpy()
            yield pixels, np.where(row < 0, -1, self.to_encode[row])
        for start in range(0, len(self.stored), batch_size):
            yield None, self.stored[start : start + batch_size]

    def __call__(self, pixels: torch.Tensor | None, indices: NDArray[np.int64]) -> torch.Tensor:
        """Compute logits [B, C] of a batch from `batches`."""
        if self.store is None:
            assert pixels is not None
            return self._logits(pixels)
        with torch.inference_mode():
            if pixels is None:
                features = self.store.load(self.images.positions[indices]).to(self.clip.device)
            else:
                features = self._encode(pixels)
                self.store.add(features, np.where(indices < 0, -1, self.images.positions[indices]))
            assert isinstance(self.classifier, Classifier)
            return self.classifier.logits(features)

    @contextmanager
    def saving_features(self, meter: Meter) -> Iterator[None]:
        """Save the new features after the block, even if the evaluation is stopped or an image is broken."""
        try:
            yield
        finally:
            if self.store:
                with meter.phase("features", rated=False):
                    self.store.save()
