"""What consecutive runs of a process share: the frozen backbone and the digests of weights."""

from __future__ import annotations

from contextlib import suppress

import torch

from procap.clip import CLIP
from procap.errors import UserError
from procap.weights.loading import WeightsKey, load_clip, weights_key
from runner.acceleration import Acceleration
from runner.config import RunConfig
from runner.results import TrainResult


class Backbones:
    """Keeps one backbone, on the device that used it last, for the runs after it: a loop over runs owns one of these.

    It is shared, so a method must not change its weights.
    """

    def __init__(self) -> None:
        self._clip: CLIP | None = None
        self._key: WeightsKey | None = None
        self._is_compiled = False
        self._digests: dict[WeightsKey, str] = {}

    def load(self, config: RunConfig, device: torch.device, acceleration: Acceleration) -> CLIP:
        """Load the frozen CLIP of a run on `device`. Raises UserError if its weights have changed since the plan."""
        if config.weights_digest and self.digest(config) != config.weights_digest:
            raise UserError(f"the weights {config.pretrained or config.backbone} changed after this run was planned")
        # Compiled blocks cannot be undone: forget the key, so that the backbone is loaded again.
        if self._is_compiled and not acceleration.compile:
            self._key = None
        clip = self._load(config).to(device)
        acceleration.prepare(clip)
        self._is_compiled = acceleration.compile
        return clip

    def digest(self, config: RunConfig) -> str:
        """Return the digest of the backbone's weights; they are read once. Raises what `load_clip` does."""
        key = weights_key(config.backbone, config.pretrained)
        if key not in self._digests:
            self._digests[key] = self._load(config).digest()
        return self._digests[key]

    def check(self, config: RunConfig, training: TrainResult) -> None:
        """Raise UserError if the backbone's weights on this machine are not those that trained a finished run."""
        digest = training.backbone_digest
        with suppress(UserError):
            digest = self.digest(config)
        if digest != training.backbone_digest:
            raise UserError(
                f"{config.path} was trained on weights {training.backbone_digest} of {config.backbone_name}, and here "
                f"they are {digest}: name the weights it was trained on, or train again with --force"
            )

    def _load(self, config: RunConfig) -> CLIP:
        key = weights_key(config.backbone, config.pretrained)
        if self._clip is None or key != self._key:
            # Release the memory of the last backbone before the next is loaded.
            self._clip, self._key = None, None
            self._clip = load_clip(config.backbone, config.pretrained)
            self._key, self._is_compiled = key, False
        return self._clip
