"""Predict images with the method of a run, on all ranks."""

from __future__ import annotations

import numpy as np
import torch

from procap.errors import UserError
from procap.text import LabelSpace
from runner.calibration import ImagePredictions
from runner.distributed.collectives import ProcessGroup
from runner.engine import autocast
from runner.feature_store import EncodedImages
from runner.inference import FeatureCollector, Inference, LogitSettings, PredictionCollector, RowCollector
from runner.meters import Meter
from runner.progress_bar import ProgressDisplay
from runner.session import Run
from runner.setup import warn_of_names
from runner.stop_signals import StopRequest
from runner.threads import fitting_threads
from runner.trained_runs import load_trained
from shards.eval_views import AnyEvalTransform
from shards.reader import ImageList
from shards.rng import generator
from shards.transfer import upload

SCORED = 4096
"""Images of an online classifier that are scored at once."""


def prepare_inference(
    run: Run, images: ImageList, space: LabelSpace, logit_settings: LogitSettings | None = None
) -> Inference:
    """Make the classifier of the classes of `space`, with draws of its Gaussian tokens if asked for, and warm up."""
    config, session, settings, trained = run.config, run.session, run.settings, load_trained(run)
    method, precision, meter = trained.method, settings.precision or config.precision, Meter(session.device, warmup=0)
    with meter.phase("classes", rated=False), autocast(precision, session.device):
        warn_of_names(method, space)
        if settings.samples:
            # The first draws are the same for any number of samples, and on every process and device.
            draws = (method.draw(generator(config.seed, "samples", number)) for number in range(settings.samples))
            noise = [tuple(upload(tensor, session.device) for tensor in draw) for draw in draws]
            classifier = method.sampled_classifier(noise, space)
        else:
            classifier = method.classifier(space)
    inference = Inference(trained.clip, classifier, images, precision, session.acceleration, logit_settings)
    inference.meter = meter
    with meter.phase("warm-up", rated=False):
        # GPU kernels and memory pools depend on the batch size, so warm up with full batches there. On a CPU one image
        # is enough: two full batches could cost as much as the evaluation.
        full_batch = min(config.recipe.test_batch_size, len(images))
        inference.warm_up(full_batch if session.device.type == "cuda" else 1)
    meter.settle()
    return inference


def predict_images(
    run: Run,
    inference: Inference,
    transform: AnyEvalTransform,
    stop: StopRequest,
    display: ProgressDisplay | None = None,
) -> ImagePredictions:
    """Predict the images of `inference`, of which each rank encodes its share; features may be stored.

    An online classifier adapts on each rank to the features of all images, and its time counts in the rates.
    Raises UserError if a logit is not finite, and `Interrupted` on all ranks for a signal to one of them.
    """
    config, session, group, meter = run.config, run.session, run.session.group, inference.meter
    images, batch_size = inference.images, config.recipe.test_batch_size
    own_score, features = bool(inference.score_name), RowCollector(len(images))
    collector = PredictionCollector(images.labels, inference.logit_settings, own_score=own_score)
    added, remaining = features if inference.is_online else collector, len(images)
    with fitting_threads(inference.clip, min(batch_size, remaining), "eval"):
        key = _read_features(run, inference, transform) if inference.encodes_frozen else ""
        batches = inference.batches(transform, batch_size, session.decoders, group.ranks)
        for batch, indices in meter.iterate("data", batches):
            # Predictions stay on the device until the end, so the next batch is decoded while this one is computed.
            with meter.phase("model"):
                # Rank 0, which reports, has a batch in every step.
                evaluated = min(group.size * added.add(inference(batch, indices), indices), remaining)
            remaining -= evaluated
            meter.step(evaluated)
            if display:
                display.update(display.done + evaluated)
            stop.check_ranks(group, f"stopped the predictions of {config.path}; they start over when repeated")
        if inference.is_online:
            with meter.phase("adaptation"):
                rows = inference.adapt(features.gather(group), config.seed)
                for part in np.array_split(np.arange(len(rows)), range(SCORED, len(rows), SCORED)):
                    collector.add(rows[torch.from_numpy(part)], part)
            # Every rank has the logits of all images.
            group = ProcessGroup()
        meter.settle()
    if (predictions := collector.gather_predictions(group)) is None:
        lower = f"evaluate in {config.precision}" if inference.precision != config.precision else ""
        hint = lower or f"train with {config.stability_hint}"
        raise UserError(f"{config.path} gives logits on {images.dataset} that are not finite: {hint}")
    if kept := inference.kept:
        kept.meter.settle()
        encoded = kept.gather(session.group).to(kept.dtype)
        if session.is_first:
            seconds = {"data": meter.rate.seconds.get("data", 0.0), **kept.meter.phases}
            session.features.write(key, EncodedImages(encoded, seconds))
    return predictions


def _read_features(run: Run, inference: Inference, transform: AnyEvalTransform) -> str:
    """Give `inference` the stored features of its images, with their time, or make it keep those that it computes.

    Returns the key under which these are stored; "" without a store.
    """
    how = {"transform": repr(transform), "precision": inference.precision, "batch": run.config.recipe.test_batch_size}
    clip, images, acceleration = inference.clip, inference.images, inference.acceleration
    key, stored = run.session.read_features(clip, images, acceleration=acceleration, **how)
    if stored:
        inference.features = stored.features
        inference.meter.add(stored.seconds)
    elif key:
        inference.kept = FeatureCollector(len(images), clip.device)
    return key
