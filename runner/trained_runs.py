"""Load finished runs, and predict images with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier
from procap.errors import UsageError, UserError
from procap.methods import data_use, method_class, method_source
from procap.methods.hooks import TaughtMethod
from procap.methods.method import Method
from procap.text import LabelSpace
from runner.calibration import ImagePredictions
from runner.checkpoint import decode_checkpoint, load_into, read_checkpoint_bytes
from runner.config import RunConfig
from runner.devices import num_decoders, set_deterministic
from runner.distributed.collectives import ProcessGroup
from runner.earlier_runs import check_same_images
from runner.engine import autocast
from runner.feature_store import EncodedImages, feature_key
from runner.inference import FeatureCollector, Inference, LogitSettings, PredictionCollector, RowCollector
from runner.meters import Meter
from runner.progress_bar import ProgressDisplay
from runner.results import TrainResult
from runner.run_folders import locate_run
from runner.session import Run, TrainedRun
from runner.setup import build_initial_method, changed_file, warn_of_names
from runner.stop_signals import StopRequest
from shards.eval_views import AnyEvalTransform
from shards.reader import ImageList
from shards.rng import generator
from shards.transfer import upload

SCORED = 4096
"""Images of an online classifier that are scored at once."""


def load_trained(run: Run) -> TrainedRun:
    """Load a finished run, once. Raises UserError if it is not finished, was altered, or the backbone is another."""
    if run.trained is None:
        run.trained = _load(run)
    return run.trained


def _load(run: Run) -> TrainedRun:
    config, session = run.config, run.session
    session.remote.pull(run.path, weights=True)
    training = read_current_training(run)
    if training.method_source and not method_source(config.method):
        raise UserError(f"{run.path} was trained by {training.method_source}, which is not installed here")
    file = run.folder.checkpoint_file
    # The bytes are sent, not the path, because other machines may not have rank 0's folder.
    data = session.group.call_on_first(lambda: read_checkpoint_bytes(file, training.checkpoint_sha256))
    tensors, card = decode_checkpoint(data, file)
    if session.runtime.deterministic:
        set_deterministic()
    clip = session.workbench.load_backbone(config, session.device, session.acceleration)
    # Only the first rank has compared its weights with those of the training.
    session.group.check_same(f"the digest of the weights of {config.backbone}", clip.digest())
    method = build_initial_method(config, clip, card.space)
    load_into(method, tensors, file)
    if isinstance(method, TaughtMethod):
        # Loaded when the method asks for it, once: most need no teacher any more.
        recall = cache(partial(_recall_teacher, run, training))
        method.set_teacher(lambda space: teacher.classifier(space) if (teacher := recall()) else None)
    return TrainedRun(config, training, clip, method)


def _recall_teacher(run: Run, training: TrainResult) -> Method | None:
    """Load the run that taught a finished run; None if its teacher was none. Raises UserError if it has changed."""
    teacher = load_teacher(run)
    if changed_file(run.config, training.files):
        raise UserError(f"{run.path} learned from another teacher than {run.config.options['teacher']} is now")
    return teacher


def load_teacher(run: Run) -> Method | None:
    """Load the run that is the teacher of a run; None for another teacher, or none.

    Raises UsageError for a run that has seen other images of the data set or adapts to those of a test, UserError for
    one that is not finished.
    """
    config = run.config
    cls = method_class(config.method)
    folder = cls.teacher_run(cls.Options(**config.options)) if issubclass(cls, TaughtMethod) else None
    if folder is None:
        return None
    teacher, results = locate_run(folder)
    if data_use(teacher.method).unlabelled == "test":
        # Its logits would depend on the other images of a batch.
        raise UsageError(f"{teacher.path} adapts to test images: name a run of a different method as teacher")
    check_same_images(teacher, config)
    return load_trained(run.session.elsewhere(results, shares_backbone=False).get_run(teacher)).method


def read_current_training(run: Run) -> TrainResult:
    """Read `train.json`, on all ranks. Raises UserError if it is missing, or code or backbone have changed since."""
    session = run.session
    training = session.group.call_on_first(run.read_training)
    if training is None:
        raise UserError(
            f"{run.folder.path} holds no finished training: run procap train first, or name another --results"
        )
    if why := training.changed_code(run.config):
        raise UserError(why)
    session.group.call_on_first(lambda: session.workbench.check_backbone(run.config, training))
    return training


def trained_classifier(method: Method, config: RunConfig, space: LabelSpace, samples: int) -> Classifier:
    """Make the classifier of a trained method, with the means of its Gaussian tokens or with `samples` draws of them.

    The first draws are the same for any number of samples, and on every process and device.
    """
    if not samples:
        return method.classifier(space)
    draws = (method.draw(generator(config.seed, "samples", number)) for number in range(samples))
    return method.sampled_classifier(
        [tuple(upload(each, method.clip.device) for each in noise) for noise in draws], space
    )


def prepare_inference(
    run: Run, images: ImageList, space: LabelSpace, meter: Meter, scoring: LogitSettings | None = None
) -> Inference:
    """Make the classifier of the classes of `space`, and warm up."""
    config, session, trained = run.config, run.session, load_trained(run)
    settings, device = session.runtime.evaluation.for_run(config), session.device
    precision = settings.precision or config.precision
    with meter.phase("classes", rated=False), autocast(precision, device):
        warn_of_names(trained.method, space)
        classifier = trained_classifier(trained.method, config, space, settings.samples)
    inference = Inference(trained.clip, classifier, images, precision, session.acceleration, scoring)
    with meter.phase("warm-up", rated=False):
        # GPU kernels and memory pools depend on the batch size, so warm up with full batches there. On a CPU one image
        # is enough: two full batches could cost as much as the evaluation.
        full_batch = min(config.recipe.test_batch_size, len(images))
        inference.warm_up(full_batch if device.type == "cuda" else 1)
    meter.settle()
    return inference


def read_features(run: Run, inference: Inference, transform: AnyEvalTransform, meter: Meter) -> str:
    """Give `inference` the stored features of its images, with their time, or make it keep those that it computes.

    Returns the key that they are stored under by `store_features`; "" for images that a method encodes in its own way.
    """
    session, group = run.session, run.session.group
    if not (session.features.most_bytes and inference.encodes_frozen):
        return ""
    how = {"transform": repr(transform), "precision": inference.precision, "batch": run.config.recipe.test_batch_size}
    how |= {"ranks": group.size, "workers": num_decoders(session.runtime.workers, session.device)}
    key = feature_key(inference.clip, inference.images, inference.acceleration, **how)
    if stored := group.call_on_first(lambda: session.features.read(key)):
        inference.features = stored.features
        meter.add(stored.seconds)
    else:
        inference.kept = FeatureCollector(len(inference.images), inference.clip.device)
    return key


def store_features(run: Run, inference: Inference, key: str, meter: Meter) -> None:
    """Store the features that `inference` has kept of all images; all ranks call this."""
    if kept := inference.kept:
        kept.meter.settle()
        features = kept.gather(run.session.group).to(kept.dtype)
        if run.session.is_first:
            seconds = {"data": meter.rate.seconds.get("data", 0.0), **kept.meter.phases}
            run.session.features.write(key, EncodedImages(features, seconds))


def collect_predictions(
    run: Run,
    inference: Inference,
    batches: Iterator[tuple[torch.Tensor, NDArray[np.int64]]],
    meter: Meter,
    stop: StopRequest,
    display: ProgressDisplay | None = None,
) -> tuple[int, ImagePredictions | None]:
    """Predict this rank's `batches` and gather the predictions of all ranks.

    Returns 0 and the predictions, or on all ranks a stop signal that one of them has got, and None.
    An online classifier adapts on each rank to the features of all images, and its time counts in the rates.
    Raises UserError if a logit is not finite.
    """
    config, group = run.config, run.session.group
    collector = PredictionCollector(inference.images.labels, inference.scoring)
    features = RowCollector(len(inference.images))
    added = features if inference.is_online else collector
    remaining = len(inference.images)
    for images, indices in meter.iterate("data", batches):
        # Predictions stay on the device until the end, so the next batch is decoded while this one is computed.
        with meter.phase("model"):
            # Rank 0, which reports, has a batch in every step.
            evaluated = min(group.size * added.add(inference(images, indices), indices), remaining)
        remaining -= evaluated
        meter.step(evaluated)
        if display:
            display.update(display.done + evaluated)
        if signum := group.exchange_flags(signum=stop.signum).signum:
            return signum, None
    if inference.is_online:
        with meter.phase("adaptation"):
            rows = inference.adapt(features.gather(group), config.seed)
            for indices in np.array_split(np.arange(len(rows)), range(SCORED, len(rows), SCORED)):
                collector.add(rows[torch.from_numpy(indices)], indices)
        # Every rank has the logits of all images.
        group = ProcessGroup()
    meter.settle()
    if not collector.are_finite(group):
        lower = f"evaluate in {config.precision}" if inference.precision != config.precision else ""
        hint = lower or f"train with {config.stability_hint}"
        name = inference.images.dataset
        raise UserError(f"{config.path} gives logits on {name} that are not finite: {hint}")
    return 0, collector.gather(group)
