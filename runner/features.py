"""Store the image features of the tower without prompts, once per test split, for all methods that use them.

<features>/<dataset>-<split>-<digest of the key>.safetensors, of the M images stored so far:
    positions [M] int64 in the packed split, ascending; features [M, E] float32 as the tower gives them
That is 103 MB for 50,000 images at E = 512. The files are a cache: any of them can be deleted at any time.

Shapes: N images of a selection, M images stored, E joint embedding.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from procap.classifier import Classifier
from procap.clip import CLIP
from runner.checkpoint import pack_tensors, unpack_tensors
from shards.files import file_lock, write_file
from shards.manifest import Manifest
from shards.transforms import EvalTransform

Key = Mapping[str, str]
Rows = tuple[NDArray[np.int64], NDArray[np.float32]]

SCHEMA = 1
"""Increment it when decoding, resizing or the image tower change their results beyond rounding."""


def feature_key(
    manifest: Manifest, split: str, backbone: str, transform: EvalTransform, precision: str, device: torch.device
) -> Key:
    """Collect all that determines the features of a split, up to rounding; `backbone` is the digest of a CLIP."""
    return {
        "dataset": manifest.dataset,
        "split": split,
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
        and classifier.clip is clip
        and not classifier.image_plan
    )


class FeatureStore:
    """The stored features of one key, and those that an evaluation adds; other processes can add to the file, too."""

    def __init__(self, folder: Path, key: Key, *, read: bool = True) -> None:
        """key: from `feature_key`. read: False ignores the file, so that all features are computed and replaced."""
        digest = hashlib.sha256(json.dumps({"schema": SCHEMA, **key}, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key['dataset']}-{key['split']}-{digest}.safetensors"
        self.key = key
        self._stored = self._read() if read else None
        self._added: list[tuple[NDArray[np.int64], Tensor]] = []

    def contains(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the features of the images at `positions` [N] of the split are stored."""
        return np.isin(positions, self._stored[0]) if self._stored else np.zeros(len(positions), bool)

    def add(self, features: Tensor, positions: NDArray[np.int64]) -> None:
        """Add features [B, E] of the images at `positions` [B], for `save`; negative positions are padding."""
        self._added.append((positions, features))

    def load(self, positions: NDArray[np.int64]) -> Tensor:
        """Load the stored features [B, E] of the images at `positions` [B], on the CPU."""
        assert self._stored is not None
        stored, features = self._stored
        return torch.from_numpy(features[np.searchsorted(stored, positions)])

    def save(self) -> None:
        """Add the new features to the file; a disk that is full or read-only is a warning, not an error."""
        if not self._added:
            return
        positions = np.concatenate([batch for batch, _ in self._added])
        features = torch.cat([batch for _, batch in self._added]).float().cpu().numpy()
        # Features that overflowed are not stored.
        valid = (positions >= 0) & np.isfinite(features).all(axis=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Lock and merge, because another process may evaluate other classes of the split and write the same file.
            with file_lock(self.path.parent / ".lock"):
                positions, features = positions[valid], features[valid]
                if stored := self._read(quiet=True):
                    # An image that both have keeps its new features.
                    others = ~np.isin(stored[0], positions)
                    positions = np.concatenate([stored[0][others], positions])
                    features = np.concatenate([stored[1][others], features])
                order = np.argsort(positions)
                rows = positions[order], features[order]
                tensors = dict(zip(("positions", "features"), map(torch.from_numpy, rows), strict=True))
                about = {"schema": SCHEMA, "key": dict(self.key), "sha256": _sha256(rows)}
                write_file(self.path, pack_tensors(tensors, about))
        except OSError as error:
            warnings.warn(
                f"image features cannot be stored in {self.path.parent} ({error.strerror or error}); "
                "the next evaluation computes them again",
                stacklevel=1,
            )

    def _read(self, *, quiet: bool = False) -> Rows | None:
        try:
            tensors, text = unpack_tensors(self.path.read_bytes())
            about = json.loads(text)
            rows = tensors["positions"].numpy(), tensors["features"].numpy()
            if about["schema"] != SCHEMA or about["key"] != self.key:
                raise ValueError("it holds other features than its name says")
            if about["sha256"] != _sha256(rows):
                raise ValueError("its SHA-256 is not the one it was written with")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            if not quiet:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                warnings.warn(f"{self.path} cannot be used ({reason}); its features are computed again", stacklevel=1)
            return None
        return rows


def _sha256(rows: Rows) -> str:
    sha = hashlib.sha256()
    for array in rows:
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(array.ravel().data)
    return sha.hexdigest()
