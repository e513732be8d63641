"""Predict the images of a target with the method of a run, on all ranks: compute logits, collect predictions.

An image is named by its index in the target (0 .. N - 1), -1 for padding. Shapes: B images, C classes, E joint
embedding, N images of the target, S image size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier, OnlineClassifier
from procap.clip import CLIP
from procap.errors import UserError
from procap.text import LabelSpace
from runner.acceleration import Acceleration
from runner.calibration import DECIMALS, ImagePredictions
from runner.config import Precision
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import Ranks
from runner.engine import autocast, fitting_threads
from runner.feature_store import EncodedImages
from runner.meters import Meter
from runner.progress_bar import ProgressDisplay
from runner.results import PerClass
from runner.session import Run
from runner.setup import warn_of_names
from runner.stop_signals import StopRequest
from runner.trained_runs import load_trained
from shards.device.loader import device_evaluation_batches, resizes_on_device
from shards.eval_views import AnyEvalTransform
from shards.loader import deal_batches, evaluation_batches
from shards.reader import ImageList
from shards.rng import generator
from shards.transfer import upload

WARMUP_BATCHES = 2
SCORED = 4096
"""Images of an online classifier that are scored at once."""


@dataclass(frozen=True)
class LogitSettings:
    """What to compute from logits [B, C] beside the predicted class.

    base_classes: those trained on [K], where there are others as well; their highest probability is recorded.
    temperature: divides the logits before their softmax.
    scores: the confidence tells known images from others: it is not rounded, and the classifier's own score if any.
    """

    base_classes: NDArray[np.int64] | None = None
    temperature: float = 1.0
    scores: bool = False


class Inference:
    """A classifier at a precision.

    is_online: its logits depend on the images before; calls give features, of which `adapt` makes logits at the end.
    score_name: of the classifier's own score [B, 1], which is computed instead of logits; "" without one.
    meter: the time of the work; no batch is a warm-up.
    """

    def __init__(
        self,
        clip: CLIP,
        classifier: Classifier,
        precision: Precision,
        acceleration: Acceleration | None = None,
        logit_settings: LogitSettings | None = None,
    ) -> None:
        """acceleration: `images` resizes on the device."""
        self.clip, self.precision = clip, precision
        self.logit_settings = logit_settings or LogitSettings()
        self.score_name = classifier.score_name if self.logit_settings.scores else ""
        self.acceleration = acceleration or Acceleration()
        self._classifier, self.is_online = classifier, isinstance(classifier, OnlineClassifier)
        self.meter = Meter(clip.device)

    @property
    def encodes_frozen(self) -> bool:
        """Whether features are those of the unchanged image tower, which other runs compute too."""
        classifier = self._classifier
        is_plain = all(getattr(type(classifier), name) is getattr(Classifier, name) for name in ("__call__", "encode"))
        return is_plain and not classifier.image_plan and classifier.clip is self.clip

    def warm_up(self, images: int) -> None:
        """Run batches of `images` blank images before rates are measured."""
        size, views = self.clip.geometry.image_size, self._classifier.views
        shape = (3, size, size) if views == 1 else (views, 3, size, size)
        blank = torch.zeros(self._batch_size(images), *shape, device=self.clip.device)
        for _ in range(WARMUP_BATCHES):
            self(blank)

    def _batch_size(self, images: int) -> int:
        """Return how many images with their views are as many inputs of the image tower as `images`."""
        return max(1, images // self._classifier.views)

    def batches(
        self, images: ImageList, transform: AnyEvalTransform, batch_size: int, workers: int, ranks: Ranks
    ) -> Iterator[tuple[torch.Tensor, NDArray[np.int64]]]:
        """Yield this rank's images [B, *transform.shape] and their indices [B]; an index of -1 is padding.

        batch_size: most inputs of the image tower; each view of an image is one.
        """
        make_batches = evaluation_batches
        if self.acceleration.images and resizes_on_device(transform):
            make_batches = partial(device_evaluation_batches, device=self.clip.device)
        size = self._batch_size(batch_size)
        batches = make_batches(images, transform, size, workers, rank=ranks.rank, world_size=ranks.size)
        with closing(batches):
            # Indices stay on the host, where labels are looked up by them.
            for pixels, _, indices in batches:
                yield upload(pixels, self.clip.device), indices.numpy()

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits [B, C] of a batch from `batches`, or features [B, E] if `is_online`."""
        if self.is_online or self.score_name:
            features = self.encode(images)
            return features if self.is_online else self.logits(features)
        # Methods that adapt to the views of an image compute gradients.
        with autocast(self.precision, self.clip.device):
            return self._classifier(images)

    @torch.inference_mode()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Compute features [B, E] of images."""
        with autocast(self.precision, self.clip.device):
            return self._classifier.encode(images)

    @torch.inference_mode()
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute logits [B, C], or scores [B, 1], of features [B, E]."""
        with autocast(self.precision, self.clip.device):
            return self._classifier.score(features)[:, None] if self.score_name else self._classifier.logits(features)

    @torch.inference_mode()
    def adapt(self, features: torch.Tensor, seed: int) -> torch.Tensor:
        """Compute logits [N, C] of the features [N, E] of all images by an online classifier.

        Its stream has the images in the classifier's own order, else in that of the stream of random numbers "test
        order" of the run's `seed`.
        """
        assert isinstance(self._classifier, OnlineClassifier)
        if draw := self._classifier.order:
            order = draw(len(features), seed)
        else:
            order = torch.randperm(len(features), generator=generator(seed, "test order"))
        logits = self._classifier.logits(features[order].to(self.clip.device))
        return logits[order.argsort().to(logits.device)]


class RowCollector:
    """Collects a row of numbers per image by its index in the target; they stay on the device until `gather`."""

    def __init__(self, count: int) -> None:
        """count: the number N of images of the target."""
        self._count = count
        self._indices: list[NDArray[np.int64]] = []
        self._rows: list[torch.Tensor] = []
        self.dtype = torch.float32

    def add(self, rows: torch.Tensor, indices: NDArray[np.int64]) -> int:
        """Add rows [B, ...] of the images at `indices` [B], -1 for padding; returns the number of real images."""
        self._indices.append(indices)
        self._rows.append(rows.float())
        self.dtype = rows.dtype
        return int((indices >= 0).sum())

    def gather(self, group: ProcessGroup) -> torch.Tensor:
        """Return the rows [N, ...] of all images on the CPU of every rank; exactly one must have added each image."""
        # Ranks have equally many batches, but not all have the last one, which can be smaller, or one of padding.
        counts = group.all_gather_object(sum(map(len, self._indices)))
        indices = group.gather_uneven(torch.from_numpy(np.concatenate(self._indices)), counts)
        rows = group.gather_uneven(torch.cat(self._rows).cpu(), counts)
        real = indices >= 0
        order = indices[real].argsort()
        if not torch.equal(indices[real][order], torch.arange(self._count)):
            raise RuntimeError("not every image was evaluated exactly once")
        return rows[real][order]


class PredictionCollector(RowCollector):
    """Collects predictions of images."""

    def __init__(
        self, labels: NDArray[np.int64], logit_settings: LogitSettings | None = None, *, own_score: bool = False
    ) -> None:
        """labels: the true classes [N] of the target. own_score: the classifier gives a score [B, 1] instead."""
        super().__init__(len(labels))
        self._labels, self._logit_settings, self._own_score = labels, logit_settings or LogitSettings(), own_score

    def add(self, logits: torch.Tensor, indices: NDArray[np.int64]) -> int:
        """Add logits [B, C] of the images at `indices` [B], -1 for padding; returns the number of real images."""
        # Padding (-1) gets the label of the last image; `gather` drops its row.
        labels = upload(torch.from_numpy(self._labels[indices]), logits.device)
        rows = _predict_rows(logits, labels, self._logit_settings)
        if self._own_score:
            rows[:, 2] = logits[:, 0]
        return super().add(rows, indices)

    def gather_predictions(self, group: ProcessGroup) -> ImagePredictions | None:
        """Return the predictions of all N images on every rank, as `gather` does; None if a logit is not finite."""
        # [N, 5] or [N, 6] to columns [N], in the order of the target.
        is_finite, predicted, confidence, nll, brier, *base = self.gather(group).numpy().astype(np.float64).T
        if not is_finite.all():
            return None
        if not self._logit_settings.scores:
            confidence, *base = np.round([confidence, *base], DECIMALS)
        return ImagePredictions(self._labels, predicted.astype(np.int64), confidence, nll, brier, *base)


def count_by_class(labels: NDArray[np.int64], is_correct: NDArray[np.bool_], names: Sequence[str]) -> PerClass:
    """Count correct and all images of each class. labels [N]: indices of `names`; is_correct [N]."""
    correct, total = np.bincount(labels[is_correct], minlength=len(names)), np.bincount(labels, minlength=len(names))
    return PerClass(correct=correct.tolist(), total=total.tolist(), names=list(names))


def _predict_rows(logits: torch.Tensor, labels: torch.Tensor, logit_settings: LogitSettings) -> torch.Tensor:
    """Compute rows [B, 5] of logits [B, C] and labels [B]: if finite, predicted class, confidence, NLL, Brier score.

    With base classes, rows [B, 6]: the last column is their highest probability.
    """
    true = labels[:, None]
    # In float32: a softmax in bf16 would keep three digits.
    log_probabilities = (logits.float() / logit_settings.temperature).log_softmax(dim=1)
    probabilities = log_probabilities.exp()
    # Subtracting from 0 gives no -0.0, where a target has a single class.
    nll = 0 - log_probabilities.gather(1, true)[:, 0]
    brier = probabilities.scatter_add(1, true, -torch.ones_like(nll)[:, None]).square().sum(dim=1)
    is_finite = torch.isfinite(logits).all(dim=1).float()
    columns = [is_finite, logits.argmax(dim=1).float(), probabilities.amax(dim=1), nll, brier]
    if logit_settings.base_classes is not None:
        base_classes = upload(torch.from_numpy(logit_settings.base_classes), logits.device)
        columns.append(probabilities.index_select(1, base_classes).amax(dim=1))
    # One tensor for one copy to the host; float32 holds class numbers up to 2^24 exactly.
    return torch.stack(columns, dim=1)


def prepare_inference(
    run: Run, images: ImageList, space: LabelSpace, logit_settings: LogitSettings | None = None
) -> Inference:
    """Make the classifier of the classes of `space`, with draws of its Gaussian tokens if asked for, and warm up.

    Raises UserError for scores of a method that adapts to all images of a target.
    """
    config, session, settings, trained = run.config, run.session, run.eval_settings, load_trained(run)
    method, precision, meter = trained.method, settings.precision or config.precision, Meter(session.device)
    with meter.phase("classes", in_step=False), autocast(precision, session.device):
        warn_of_names(method, space)
        if settings.samples:
            # The first draws are the same for any number of samples, and on every process and device.
            draws = (method.draw(generator(config.seed, "samples", number)) for number in range(settings.samples))
            noise = [tuple(upload(tensor, session.device) for tensor in draw) for draw in draws]
            classifier = method.sampled_classifier(noise, space)
        else:
            classifier = method.classifier(space)
    inference = Inference(trained.clip, classifier, precision, session.acceleration, logit_settings)
    inference.meter = meter
    if inference.is_online and inference.logit_settings.scores:
        # In a stream of both, which a detector meets, the images have other scores than in a stream of each set.
        why = "adapts to a set of test images as a whole, so that scores in known and in unknown sets do not compare"
        raise UserError(f"--unknown: {config.method} {why}")
    with meter.phase("warm-up", in_step=False):
        # GPU kernels and memory pools depend on the batch size, so warm up with full batches there. On a CPU one image
        # is enough: two full batches could cost as much as the evaluation.
        full_batch = min(config.recipe.test_batch_size, len(images))
        inference.warm_up(full_batch if session.device.type == "cuda" else 1)
    meter.settle()
    return inference


def predict_images(
    run: Run,
    inference: Inference,
    images: ImageList,
    transform: AnyEvalTransform,
    stop: StopRequest,
    display: ProgressDisplay | None = None,
) -> ImagePredictions:
    """Predict images, of which each rank encodes its share; features may be stored.

    An online classifier adapts on each rank to the features of all images, and its time counts in the rates.
    Raises UserError if a logit is not finite, and `Interrupted` on all ranks for a signal to one of them.
    """
    config, session, group, meter = run.config, run.session, run.session.group, inference.meter
    batch_size = config.recipe.test_batch_size
    collector = PredictionCollector(images.labels, inference.logit_settings, own_score=bool(inference.score_name))
    features: torch.Tensor | None = None

    def collect(rows: RowCollector, compute: Callable[[torch.Tensor], torch.Tensor]) -> RowCollector:
        """Collect the rows that `compute` makes of this rank's images."""
        remaining = len(images)
        batches = inference.batches(images, transform, batch_size, session.decoders, group.ranks)
        for batch, indices in meter.iterate("data", batches):
            # Rows stay on the device until the end, so the next batch is decoded while this one is computed.
            with meter.phase("model"):
                # Rank 0, which reports, has a batch in every step.
                evaluated = min(group.size * rows.add(compute(batch), indices), remaining)
            remaining -= evaluated
            meter.step(evaluated)
            if display:
                display.update(display.done + evaluated)
            what = display.what if display else config.path
            stop.check_ranks(group, f"stopped the predictions of {what}; they start over when repeated")
        return rows

    def encode() -> EncodedImages:
        rows = collect(RowCollector(len(images)), inference.encode)
        meter.settle()
        return EncodedImages(rows.gather(group).to(rows.dtype), dict(meter.rate.seconds))

    with fitting_threads(inference.clip, min(batch_size, len(images)), "eval"):
        if inference.encodes_frozen:
            how = {"transform": repr(transform), "precision": inference.precision, "batch": batch_size}
            encoded, was_stored = session.encode_once(
                inference.clip, images, encode, acceleration=inference.acceleration, **how
            )
            features = encoded.features
            if was_stored:
                meter.add(encoded.seconds)
                meter.step(len(images))
                if display:
                    display.update(display.done + len(images))
        elif inference.is_online:
            features = collect(RowCollector(len(images)), inference.encode).gather(group)
        if features is None:
            collect(collector, inference)
        elif inference.is_online:
            with meter.phase("adaptation"):
                rows = inference.adapt(features.float(), config.seed)
                for part in np.array_split(np.arange(len(rows)), range(SCORED, len(rows), SCORED)):
                    collector.add(rows[torch.from_numpy(part)], part)
            # Every rank has the logits of all images.
            group = ProcessGroup()
        else:
            with meter.phase("model"):
                for batch in deal_batches(len(images), batch_size, group.rank, group.size):
                    collector.add(inference.logits(features[batch].to(inference.clip.device)), np.array(batch))
        meter.settle()
    if (predictions := collector.gather_predictions(group)) is None:
        lower = f"evaluate in {config.precision}" if inference.precision != config.precision else ""
        hint = lower or f"train with {config.stability_hint}"
        raise UserError(f"{config.path} gives logits on {images.dataset} that are not finite: {hint}")
    return predictions
