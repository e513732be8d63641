"""How the images of a target become logits: by the classifier, or by way of features that are kept on the disk.

Shapes: B images, C classes, E joint embedding, N images of the target, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier
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
    """Logits of the images at `positions` [N] of a split; a `store` of features saves the image tower for those it has.

    graphs: replays recordings of the towers, for a GPU. `fresh` and `cached` are the places among the N images that
    need the tower and that do not.
    """

    def __init__(
        self,
        clip: CLIP,
        classifier: Classifier,
        positions: NDArray[np.int64],
        store: FeatureStore | None,
        graphs: CudaGraphs | None,
    ) -> None:
        self.clip, self.classifier, self.store = clip, classifier, store
        self._positions = positions
        self._logits: Forward = classifier
        # In one mode from the warm-up on: what is compiled is compiled for a mode.
        self._encode: Forward = torch.inference_mode()(clip.encode_image)
        if graphs:
            self._logits, self._encode = GraphedFunction(self._logits, graphs), GraphedFunction(self._encode, graphs)
        known = store.known(positions) if store else np.zeros(len(positions), bool)
        self.fresh, self.cached = np.flatnonzero(~known), np.flatnonzero(known)

    @property
    def features(self) -> Literal["computed", "cached", "mixed"]:
        """Where the images' features come from, as a result names it."""
        if not len(self.cached):
            return "computed"
        return "mixed" if len(self.fresh) else "cached"

    def warm_up(self, images: int) -> int:
        """Run batches of so many blank images, so that none is decoded before the clock of the rates starts.

        Gives the number of batches, 0 where no image needs the tower.
        """
        if not len(self.fresh):
            return 0
        size = self.clip.geometry.image_size
        blank = torch.zeros(images, 3, size, size, device=self.clip.device)
        for _ in range(WARMUP_BATCHES):
            self._encode(blank) if self.store else self._logits(blank)
        return WARMUP_BATCHES

    def batches(
        self, images: Split, transform: EvalTransform, batch_size: int, workers: int, ranks: Ranks
    ) -> Iterator[tuple[torch.Tensor | None, NDArray[np.int64]]]:
        """This process's share of the N `images`, None where their features are known, and their places [B]."""
        missing, share = images.subset(self.fresh), {"rank": ranks.rank, "world_size": ranks.size}
        decoded = evaluation_batches(missing, transform, batch_size, workers, **share)
        for pixels, _, indices in to_device(decoded, self.clip.device, moved=(0,)):
            chosen = indices.numpy()
            yield pixels, np.where(chosen < 0, -1, self.fresh[chosen])
        for start in range(0, len(self.cached), batch_size):
            yield None, self.cached[start : start + batch_size]

    def __call__(self, pixels: torch.Tensor | None, places: NDArray[np.int64]) -> torch.Tensor:
        """Logits [B, C] of a batch as `batches` gives it; negative places are filling."""
        if self.store is None:
            assert pixels is not None
            return self._logits(pixels)
        with torch.inference_mode():
            if pixels is None:
                return self.classifier.logits(self.store.recall(self._positions[places]).to(self.clip.device))
            features = self._encode(pixels)
            self.store.add(features, np.where(places < 0, -1, self._positions[places]))
            return self.classifier.logits(features)

    @contextmanager
    def kept(self, meter: Meter) -> Iterator[None]:
        """Keep at the end what was encoded, also where the evaluation is stopped or an image is broken."""
        try:
            yield
        finally:
            if self.store:
                with meter.phase("features", rated=False):
                    self.store.keep()
