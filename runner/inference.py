"""Compute logits of the images of a target, with the whole classifier or from image features stored on disk.

Shapes: B images, C classes, E joint embedding, N images of the target, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier, SampledClassifier
from procap.clip import CLIP
from runner.cuda_graphs import CudaGraphs, GraphedFunction
from runner.distributed.ranks import Ranks
from shards.loader import evaluation_batches
from shards.reader import Split
from shards.transfer import to_device
from shards.transforms import EvalTransform

WARMUP_BATCHES = 2

Forward = Callable[[torch.Tensor], torch.Tensor]
"""Images [B, 3, S, S] to logits [B, C] or to features [B, E]."""


class Inference:
    """Logits of N images."""

    def __init__(
        self,
        clip: CLIP,
        classifier: Classifier | SampledClassifier,
        images: Split,
        graphs: CudaGraphs | None = None,
        *,
        stored: torch.Tensor | None = None,
        keep: bool = False,
    ) -> None:
        """stored: the features [N, E] of the images, for which the tower then does not run. keep: for `features`."""
        self.clip, self.classifier, self.images = clip, classifier, images
        self._stored, self._keep = stored, keep
        self._encoded: list[tuple[NDArray[np.int64], torch.Tensor]] = []
        self._logits: Forward = classifier
        # Inference mode from the warm-up on, because torch.compile compiles separately for each gradient mode.
        self._encode: Forward = torch.inference_mode()(clip.encode_image)
        if graphs:
            self._logits, self._encode = GraphedFunction(self._logits, graphs), GraphedFunction(self._encode, graphs)

    def warm_up(self, images: int) -> int:
        """Run batches of `images` blank images before rates are measured; returns the number of batches."""
        if self._stored is not None:
            return 0
        size = self.clip.geometry.image_size
        blank = torch.zeros(images, 3, size, size, device=self.clip.device)
        for _ in range(WARMUP_BATCHES):
            self._encode(blank) if self._keep else self._logits(blank)
        return WARMUP_BATCHES

    def batches(
        self, transform: EvalTransform, batch_size: int, workers: int, ranks: Ranks
    ) -> Iterator[tuple[torch.Tensor | None, NDArray[np.int64]]]:
        """Yield this rank's images [B, 3, S, S], None if their features are stored, and indices [B], -1 for padding."""
        if self._stored is not None:
            for start in range(0, len(self.images), batch_size):
                yield None, np.arange(start, min(start + batch_size, len(self.images)))
            return
        share = {"rank": ranks.rank, "world_size": ranks.size}
        decoded = evaluation_batches(self.images, transform, batch_size, workers, **share)
        for pixels, _, indices in to_device(decoded, self.clip.device, moved=(0,)):
            yield pixels, indices.numpy()

    def __call__(self, pixels: torch.Tensor | None, indices: NDArray[np.int64]) -> torch.Tensor:
        """Compute logits [B, C] of a batch from `batches`."""
        if pixels is not None and not self._keep:
            return self._logits(pixels)
        assert isinstance(self.classifier, Classifier)
        with torch.inference_mode():
            if pixels is not None:
                features = self._encode(pixels)
                self._encoded.append((indices, features))
            else:
                assert self._stored is not None
                features = self._stored[indices].to(self.clip.device)
            return self.classifier.logits(features)

    def features(self) -> torch.Tensor:
        """Return the features [N, E] that one process has computed for all images, on the CPU, in their order."""
        order = np.argsort(np.concatenate([indices for indices, _ in self._encoded]))
        return torch.cat([batch for _, batch in self._encoded]).float().cpu()[torch.from_numpy(order)]
