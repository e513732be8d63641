"""Classify new images with a trained run.

    from runner.predict import ImageClassifier

    classify = ImageClassifier.load("results/base/petals/procap/mini/16shot/seed1-9c6ad2e1")
    probabilities = classify(["one.jpg", "two.jpg"])    # a row per image, a column per class
    print([classify.classnames[i] for i in probabilities.argmax(dim=1)])

Shapes: B images, C classes, N images in all, S image size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.devices import num_decoders
from runner.engine import autocast
from runner.hub import load_run
from runner.session import TrainedRun
from runner.setup import make_eval_transform, warn_of_names
from runner.threads import fitting_threads
from shards.image_files import EncodedImage, OnError, load_batches, raise_error
from shards.images import ImageError, Picture, convert


class ImageClassifier:
    """Map images to probabilities of classes, as an evaluation of the run does it."""

    def __init__(self, run: TrainedRun, classnames: Sequence[str] = ()) -> None:
        """classnames: any names, in the order of the probabilities; default: the classes that the run learned."""
        self.run, clip = run, run.clip
        self.space = replace(run.method.space, classnames=tuple(classnames)) if classnames else run.method.space
        self.classnames = self.space.names()
        warn_of_names(run.method, self.space)
        self.batch_size = run.config.recipe.test_batch_size
        self.transform = make_eval_transform(clip)
        with autocast(run.config.precision, clip.device):
            self._classifier = run.method.classifier(self.space)

    @classmethod
    def load(cls, folder: str | Path, classnames: Sequence[str] = (), device: str = "auto") -> ImageClassifier:
        """Load the run in `folder`, or at `hf://NAMESPACE/NAME`. Raises UserError if it is not a finished run."""
        return cls(load_run(folder, RuntimeConfig(device=device)), classnames)

    def __call__(self, images: Tensor | Sequence[Picture]) -> Tensor:
        """Return probabilities [B, C] of images of any size, or of transformed images [B, 3, S, S].

        Raises UsageError that names an image which cannot be read.
        """
        if not isinstance(images, Tensor):
            images = torch.stack([self._transformed(number, picture) for number, picture in enumerate(images)])
        config, device = self.run.config, self.run.clip.device
        with fitting_threads(self.run.clip, self.batch_size, "eval"), autocast(config.precision, device):
            logits = self._classifier(images.to(device))
        if not torch.isfinite(logits).all():
            raise UserError(f"{config.path} gives logits that are not finite")
        return logits.float().softmax(dim=1)

    def _transformed(self, number: int, picture: Picture) -> Tensor:
        try:
            return self.transform(convert(picture))
        except (ImageError, OSError) as error:
            name = f"{picture}" if isinstance(picture, str | PathLike) else f"images[{number}]"
            raise UsageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error

    def predict(
        self, images: Iterator[EncodedImage], workers: int | None = None, on_error: OnError = raise_error
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and probabilities [C] of every image of `shards.image_files.find_images`, in order.

        on_error: called for an image that cannot be read, which is then left out; by default raises UsageError.
        """
        device = self.run.clip.device
        batches = load_batches(images, self.transform, self.batch_size, num_decoders(workers, device), on_error)
        for names, pixels in batches:
            yield from zip(names, self(pixels).cpu(), strict=True)
