"""Evaluate a trained run: each image of a target once, with integer counts and the calibration of its probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier
from procap.errors import UserError
from procap.methods import method_source
from procap.methods.method import Method
from procap.text import LabelSpace
from runner.calibration import DECIMALS, ImagePredictions, measure_calibration
from runner.checkpoint import decode_checkpoint, load_into, read_checkpoint_bytes
from runner.config import RunConfig, RuntimeConfig, Target
from runner.devices import num_decoders, set_deterministic
from runner.distributed.collectives import ProcessGroup
from runner.engine import autocast
from runner.inference import Inference, PredictionCollector, Scoring, count_by_class
from runner.meters import Meter, peak_memory, start_memory_peak
from runner.progress_bar import ProgressDisplay
from runner.provenance import describe_environment, provenance
from runner.results import EvalResult, TrainResult, write_json
from runner.session import Run, Session, TrainedRun
from runner.setup import build_initial_method, label_space, make_eval_transform, warn_of_names
from runner.stop_signals import Interrupted, StopRequest
from runner.threads import fitting_threads
from shards.image_selection import TargetImages, select_class_labels, select_target_images
from shards.reader import ImageList
from shards.rng import generator
from shards.transfer import upload


def load_trained(run: Run) -> TrainedRun:
    """Load a finished run, once. Raises UserError if it is not finished, was altered, or the backbone is another."""
    if run.trained is None:
        run.trained = _load(run)
    return run.trained


def _load(run: Run) -> TrainedRun:
    config, session = run.config, run.session
    session.remote.pull(run.path, weights=True)
    training = _read_training(run)
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
    return TrainedRun(config, training, clip, method)


def evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
) -> EvalResult:
    """Evaluate one finished run in a new session, as `evaluate_run` does."""
    return evaluate_run(Session(runtime, group).run(config), target, force=force)


def evaluate_run(run: Run, target: Target, *, force: bool = False) -> EvalResult:
    """Count the correct images of a finished run on `target` and return the content of the result's file in `eval`.

    An existing result of the same checkpoint is returned, unless `force` is set or it counts too few images.
    The session's `evaluation` sets the precision, the resizing and the samples, which come from named streams of the
    run's seed; nothing else is random.
    All ranks of a group call this; each image is counted on one rank, and rank 0 reads and writes the results.
    Raises UserError when the run is not finished, when data or weights have changed, when a limited result would
    replace a whole one, and for an image or shard that cannot be read.
    """
    session = run.session
    # A result that exists needs no weights; `load_trained` downloads them for a new one.
    session.remote.pull(run.path)
    if existing := find_result(run, target, force=force):
        session.remote.push(run.path)
        return existing
    with StopRequest() as stop:
        result = _evaluate(run, target, stop)
        if session.is_first:
            write_json(run.folder.eval_file(target, result.settings), result)
            session.remote.push(run.path)
        result = session.group.broadcast_object(result)
        # Signals that arrived since the last batch are obeyed here, when the result is safe.
        stop.check(f"evaluated {run.path} on {target}")
    if session.is_first:
        session.exporter.post(run.path)
    return result


def find_result(run: Run, target: Target, *, force: bool) -> EvalResult | None:
    """Find the existing result that `evaluate` returns; None if it evaluates. Raises what `evaluate` raises before."""
    session, settings = run.session, run.session.runtime.evaluation.for_run(run.config)
    training, limit = _read_training(run), run.session.runtime.limit
    if target.dataset == run.config.dataset:
        session.check_content(run.config, target.dataset, training.manifest_digest)
    existing = None
    if session.is_first:
        # `force` replaces a broken file.
        with suppress(UserError) if force else nullcontext():
            existing = run.folder.read_evaluation(target, settings)
        # A result of earlier weights is no result of this run; one of fewer images can still be too short, see below.
        if existing and not existing.is_current(training, existing.limit):
            existing = None
    existing = session.group.broadcast_object(existing)
    if existing and force and not existing.limited and limit and limit < existing.total:
        raise UserError(
            f"{run.folder.eval_file(target, settings)} counts all {existing.total} images and --limit {limit} fewer: "
            "leave out --limit, or name another --results"
        )
    if not existing or force or not existing.is_current(training, limit):
        return None
    session.check_content(run.config, target.dataset, existing.manifest_digest)
    return existing


def _read_training(run: Run) -> TrainResult:
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


def _evaluate(run: Run, target: Target, stop: StopRequest) -> EvalResult:
    config, session, trained = run.config, run.session, load_trained(run)
    runtime, group, clip, device = session.runtime, session.group, trained.clip, session.device
    settings, shards = runtime.evaluation.for_run(config), session.dataset(target.dataset)
    manifest = shards.manifest
    group.check_same(f"the content of {target.dataset}", manifest.digest)
    selection = select_target_images(shards, target.classes, target.split)
    count = min(len(selection.images), runtime.limit or len(selection.images))
    transform = make_eval_transform(clip, settings.resize)
    images = session.crops.wrap(selection.images.subset(range(count)), transform)
    batch_size, workers = config.recipe.test_batch_size, num_decoders(runtime.workers, device)
    start_memory_peak(device)
    # No batch is left out of the rates: `prepare_inference` warms up.
    meter = Meter(device, warmup=0)
    scoring = Scoring(_find_base_classes(run, target, selection))
    inference = prepare_inference(run, images, label_space(manifest, selection.classnames), meter, scoring)
    what = f"{config.path} on {target}"
    with (
        fitting_threads(clip, min(batch_size, count), "eval"),
        ProgressDisplay(what, count, unit="images", quiet=runtime.quiet or not session.is_first) as display,
    ):
        batches = inference.batches(transform, batch_size, workers, group.ranks)
        signum, predictions = collect_predictions(run, inference, batches, meter, stop, display)
    # No rank leaves while another may still exchange the flags.
    if predictions is None:
        group.barrier()
        raise Interrupted(signum, f"stopped the evaluation of {what}; it starts over when repeated")
    meter.settle()
    per_class = count_by_class(images.labels, predictions.is_correct, selection.classnames)
    return EvalResult(
        config_hash=config.hash,
        target=str(target),
        correct=sum(per_class.correct),
        total=count,
        per_class=per_class,
        calibration=measure_calibration(predictions),
        limit=runtime.limit,
        dataset_size=len(selection.images),
        num_classes=len(selection.classnames),
        precision=inference.precision,
        settings=settings,
        batch_size=batch_size,
        workers=workers,
        seconds=meter.seconds,
        images_per_second=meter.images_per_second(),
        images_per_second_model=meter.images_per_second("model"),
        phases=meter.phases_with_other(),
        peak_memory_bytes=peak_memory(device),
        manifest_digest=manifest.digest,
        backbone_digest=trained.training.backbone_digest,
        checkpoint_sha256=trained.training.checkpoint_sha256,
        **provenance(describe_environment(device)),
        labels=predictions.labels.tolist(),
        predicted=predictions.predicted.tolist(),
        confidence=_round(predictions.confidence),
        base_confidence=None if predictions.base_confidence is None else _round(predictions.base_confidence),
    )


def _round(probabilities: NDArray[np.float64]) -> list[float]:
    return probabilities.round(DECIMALS).tolist()


def _find_base_classes(run: Run, target: Target, selection: TargetImages) -> NDArray[np.int64] | None:
    """Find the classes of the target that the run was trained on; None if it has no others."""
    config = run.config
    if target.dataset != config.dataset:
        return None
    trained = select_class_labels(run.session.dataset(config.dataset), config.classes)
    positions = np.flatnonzero(np.isin(selection.labels, trained))
    return positions if 0 < len(positions) < len(selection.labels) else None


def prepare_inference(
    run: Run, images: ImageList, space: LabelSpace, meter: Meter, scoring: Scoring | None = None
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
    Raises UserError if a logit is not finite.
    """
    config, group = run.config, run.session.group
    collector = PredictionCollector(inference.images.labels, inference.scoring)
    remaining = len(inference.images)
    for images, indices in meter.iterate("data", batches):
        # Predictions stay on the device until the end, so the next batch is decoded while this one is computed.
        with meter.phase("model"):
            # Rank 0, which reports, has a batch in every step.
            evaluated = min(group.size * collector.add(inference(images), indices), remaining)
        remaining -= evaluated
        meter.step(evaluated)
        if display:
            display.update(display.done + evaluated)
        if signum := group.exchange_flags(signum=stop.signum).signum:
            return signum, None
    meter.settle()
    if not collector.are_finite(group):
        lower = f"evaluate in {config.precision}" if inference.precision != config.precision else ""
        hint = lower or f"train with {config.stability_hint}"
        name = inference.images.dataset
        raise UserError(f"{config.path} gives logits on {name} that are not finite: {hint}")
    return 0, collector.gather(group)
