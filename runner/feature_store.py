"""Keep frozen image features in files, so that a later run on the same images reads them instead of encoding.

A file holds the features of one list of images. Its name is the digest of everything that decides their bits: content
and order of the images, weights, preparation, precision, batches, device and code. Nothing but the time that a run
takes depends on whether a file is there. `procap clean` deletes them. Shapes: N images, E joint embedding.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.acceleration import Acceleration
from runner.provenance import cpu_name
from shards.files import write_file

if TYPE_CHECKING:
    from torch import Tensor

    from procap.clip import CLIP
    from shards.reader import ImageList

MOST_OF_LIMIT = 0.25
"""A file takes at most this share, so that a large list does not replace all others."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedImages:
    """Features [N, E] of a list of images, on the CPU, and the seconds by phase that their computation took."""

    features: Tensor
    seconds: Mapping[str, float]


class FeatureStore:
    """A folder of features with at most `most_bytes`, 0 for none; those that were used least recently go first.

    Several processes may use it: files appear whole, and a reader does not depend on a file's name after opening it.
    """

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def read(self, key: str) -> EncodedImages | None:
        """Return the features stored under `key`; None if there are none. Deletes a file whose SHA-256 differs."""
        from safetensors import SafetensorError, safe_open

        file = self._file(key)
        if not self.most_bytes or not file.is_file():
            return None
        try:
            with safe_open(str(file), "pt") as stored:
                facts, features = stored.metadata(), stored.get_tensor("features").clone()
            if (facts["key"], facts["sha256"]) != (key, _sha256(features)):
                raise ValueError("its SHA-256 differs")
            seconds = json.loads(facts["seconds"])
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            log.warning("%s is no whole file of features (%s); it is computed again", file, error)
            with suppress(OSError):
                file.unlink()
            return None
        # The time of the last use, by which files are deleted; those of a different user have the one of their making.
        with suppress(OSError):
            os.utime(file)
        return EncodedImages(features, seconds)

    def write(self, key: str, encoded: EncodedImages) -> None:
        """Store features under `key`, unless they are too large or the folder cannot be written to."""
        from safetensors.torch import save

        features = encoded.features.contiguous()
        if features.nbytes > MOST_OF_LIMIT * self.most_bytes:
            return
        facts = {"key": key, "sha256": _sha256(features), "seconds": json.dumps(encoded.seconds)}
        content = save({"features": features}, facts)
        try:
            self._make_room(len(content))
            write_file(self._file(key), content)
        except OSError as error:
            warnings.warn(f"features are not stored in {self.folder} ({error.strerror})", stacklevel=2)

    def _file(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def _make_room(self, size: int) -> None:
        """Delete the files that were used least recently until `size` bytes fit."""
        files = list[tuple[float, int, Path]]()
        for file in self.folder.glob("*.safetensors"):
            # Another process may delete it.
            with suppress(OSError):
                files.append((file.stat().st_mtime, file.stat().st_size, file))
        total = size + sum(stored for _, stored, _ in files)
        for _, freed, file in sorted(files):
            if total <= self.most_bytes:
                return
            file.unlink(missing_ok=True)
            total -= freed


def read_limit() -> float:
    """Return the most bytes of the store, from $PROCAP_FEATURES_GB. Raises UsageError for a text that is no size."""
    text = os.environ.get("PROCAP_FEATURES_GB") or "2"
    with suppress(ValueError):
        if (gigabytes := float(text)) >= 0:
            return 1e9 * gigabytes
    raise UsageError(f"PROCAP_FEATURES_GB = {text}: give a number of gigabytes, or 0 to store no features")


def feature_key(clip: CLIP, images: ImageList, *, acceleration: Acceleration, **how: Any) -> str:
    """Describe in canonical JSON what decides the bits of the features of `images`, and the time that they take.

    It must be called under the number of threads that encode. how: transform, precision, batch, ranks and workers.
    """
    import torch

    is_gpu = clip.device.type == "cuda"
    positions = hashlib.sha256(images.positions.astype("<i8").tobytes()).hexdigest()
    facts = {
        "images": (*images.identity, positions),
        "weights": clip.digest(),
        "device": torch.cuda.get_device_name(clip.device) if is_gpu else cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "accelerations": asdict(acceleration),
        "code": _code_digest(),
        **how,
    }
    return json.dumps(facts, sort_keys=True)


@functools.cache
def _code_digest() -> str:
    """Hash the code that encodes images: the towers, the preparation of images, and the libraries."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    runner = ("api", "engine", "feature_training", "inference")
    patterns = ("procap/*.py", "shards/*.py", "shards/device/*.py")
    for pattern in (*patterns, *(f"runner/{name}.py" for name in runner)):
        for file in sorted(root.glob(pattern)):
            digest.update(file.read_bytes())
    for package in ("torch", "open_clip_torch", "numpy", "pillow", "simplejpeg"):
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    return digest.hexdigest()[:16]


def _sha256(features: Tensor) -> str:
    import torch

    # numpy has no bfloat16.
    return hashlib.sha256(features.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
