"""Classify new images with a trained run.

    from runner.predict import ImageClassifier

    classify = ImageClassifier.load("results/base/petals/procap/mini/16shot/seed1-9c6ad2e1")
    probabilities = classify(["one.jpg", "two.jpg"])    # a row per image, a column per class
    print([classify.classnames[i] for i in probabilities.argmax(dim=1)])

Shapes: B images, C classes, N images in all, S image size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from runner.devices import num_decoders
from runner.engine import autocast, fitting_threads
from runner.hub import load_run
from runner.inference import Inference
from runner.session import TrainedRun
from runner.setup import make_test_transform, warn_of_names
from shards.images import ImageError, Picture, convert
from shards.loose_images import EncodedImage, OnError, load_batches, raise_error


class ImageClassifier:
    """Map images to probabilities of classes, as an evaluation of the run does it."""

    def __init__(self, run: TrainedRun, classnames: Sequence[str] = ()) -> None:
        """classnames: any names, in the order of the probabilities; default: the classes that the run learned."""
        if not isinstance(run, TrainedRun):
            raise UsageError(f"{run!r} is no trained run: procap.Classifier.load(RUN), or classifier() of a run")
        self.run, clip = run, run.clip
        self.space = replace(run.method.space, classnames=tuple(classnames)) if classnames else run.method.space
        self.classnames = self.space.names()
        warn_of_names(run.method, self.space)
        self.transform = make_test_transform(run.method, self.space.dataset, run.config.seed)
        with autocast(run.config.precision, clip.device):
            classifier = run.method.classifier(self.space)
        self._inference = Inference(clip, classifier, run.config.precision)
        # Each view of an image is an input of the image tower.
        self.batch_size = max(1, run.config.recipe.test_batch_size // classifier.views)

    @classmethod
    def load(cls, folder: str | PathLike[str], classnames: Sequence[str] = (), device: str = "auto") -> ImageClassifier:
        """Load the run in `folder`, or at `hf://NAMESPACE/NAME`. Raises UserError if it is not a finished run."""
        return cls(load_run(folder, RuntimeConfig(device=device)), classnames)

    def __call__(self, images: Tensor | Sequence[Picture]) -> Tensor:
        """Return probabilities [B, C] of images of any size, or of transformed images [B, *transform.shape].

        A method that adapts at test time begins anew in each call, and adapts to the images in their order.
        Raises UsageError that names an image which cannot be read.
        """
        if not isinstance(images, Tensor):
            images = torch.stack([self._transformed(number, picture) for number, picture in enumerate(images)])
        return self._classify(self._encode(images))

    def _encode(self, images: Tensor) -> Tensor:
        with fitting_threads(self.run.clip, self.batch_size, "eval"):
            return self._inference.encode(images.to(self.run.clip.device))

    def _classify(self, features: Tensor) -> Tensor:
        """Compute probabilities [B, C] of image features [B, E]."""
        with fitting_threads(self.run.clip, self.batch_size, "eval"):
            logits = self._inference.logits(features)
        if not torch.isfinite(logits).all():
            raise UserError(f"{self.run.config.path} gives logits that are not finite")
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
        """Yield name and probabilities [C] of every image of `shards.loose_images.find_images`, in order.

        A method that adapts at test time adapts to all of them, in that order; the first one then waits for the last.
        on_error: called for an image that cannot be read, which is then left out; by default raises UsageError.
        """
        device = self.run.clip.device
        batches = load_batches(images, self.transform, self.batch_size, num_decoders(workers, device), on_error)
        encoded: Iterable[tuple[list[str], Tensor]] = ((names, self._encode(pixels)) for names, pixels in batches)
        if self._inference.is_online and (parts := list(encoded)):
            encoded = [([name for names, _ in parts for name in names], torch.cat([features for _, features in parts]))]
        for names, features in encoded:
            yield from zip(names, self._classify(features).cpu(), strict=True)
