"""Store the image features of the tower without prompts, once per target, for all methods that use them.

<features>/<dataset>-<split>-<digest of the key>.safetensors: features [M, E] float32 of the target's first M images.
50,000 images take 103 MB at E = 512. The files are a cache: any of them can be deleted at any time.

Shapes: N images of an evaluation, M images stored, E joint embedding.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import PIL
import torch
from safetensors import SafetensorError
from torch import Tensor

from procap.classifier import Classifier
from procap.clip import CLIP
from runner.checkpoint import pack_tensors, unpack_tensors
from runner.config import Target
from shards.files import write_file
from shards.manifest import Manifest
from shards.transforms import EvalTransform

Key = Mapping[str, str]

SCHEMA = 2
"""Increment it when decoding, resizing or the image tower change their results beyond rounding."""


def feature_key(
    manifest: Manifest, target: Target, backbone: str, transform: EvalTransform, precision: str, device: torch.device
) -> Key:
    """Collect all that determines the features of a target, up to rounding; `backbone` is the digest of a CLIP."""
    return {
        "dataset": manifest.dataset,
        "classes": target.classes,
        "split": target.split,
        "manifest": manifest.digest,
        "backbone": backbone,
        "transform": repr(transform),
        "precision": precision,
        "device": device.type,
        "torch_version": str(torch.__version__),
        "pillow_version": PIL.__version__,
    }


def reads_plain_features(classifier: object, clip: CLIP) -> bool:
    """Whether a classifier sees images only as features of `clip` without prompts in the image tower."""
    return (
        isinstance(classifier, Classifier)
        and type(classifier).__call__ is Classifier.__call__
        and type(classifier).encode is Classifier.encode
        and "encode" not in vars(classifier)
        and classifier.clip is clip
        and not classifier.image_plan
    )


class FeatureStore:
    """The stored features of one key."""

    def __init__(self, folder: Path, key: Key) -> None:
        """key: from `feature_key`."""
        digest = hashlib.sha256(json.dumps({"schema": SCHEMA, **key}, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key['dataset']}-{key['split']}-{digest}.safetensors"
        self.key = dict(key)

    def load(self, count: int) -> Tensor | None:
        """Load the features [N, E] of the target's first `count` images, on the CPU; None if there are fewer.

        A file that cannot be used is a warning.
        """
        try:
            tensors, text = unpack_tensors(self.path.read_bytes())
            about, features = json.loads(text), tensors["features"]
            if about != self._describe(features):
                raise ValueError("it holds other features than its name says")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            warnings.warn(f"{self.path} cannot be used ({error}); its features are computed again", stacklevel=2)
            return None
        return features[:count] if len(features) >= count else None

    def save(self, features: Tensor) -> None:
        """Store features [N, E] unless one has overflowed; a disk that is full or read-only is a warning, no error."""
        if not torch.isfinite(features).all():
            return
        try:
            write_file(self.path, pack_tensors({"features": features}, self._describe(features)))
        except OSError as error:
            warnings.warn(
                f"image features cannot be stored in {self.path.parent} ({error.strerror or error}); "
                "the next evaluation computes them again",
                stacklevel=2,
            )

    def _describe(self, features: Tensor) -> dict[str, object]:
        return {"key": self.key, "sha256": hashlib.sha256(features.numpy().data).hexdigest()}
