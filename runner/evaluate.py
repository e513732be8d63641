"""Evaluate a trained run: each image of a target once, with integer counts and the calibration of its probabilities.

Or score how well images fit the classes of the run, to tell those of unknown classes, by maximum concept matching: the
highest softmax probability of a class name, of cosines that no factor scales. Logits are divided by the method's
factor, so that those of a cosine classifier are the cosines.
Source: Ming et al. 2022, "Delving into Out-of-Distribution Detection with Vision-Language Representations", section 3,
and its public code, both at temperature 1. Classifiers that define a score, such as GalLoP's, are scored by that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from procap.text import LabelSpace
from runner.calibration import ImagePredictions, measure_calibration
from runner.config import RunConfig, RuntimeConfig, Target
from runner.inference import Inference, LogitSettings, count_by_class
from runner.meters import peak_memory, start_memory_peak
from runner.predictions import predict_images, prepare_inference
from runner.progress_bar import ProgressDisplay
from runner.provenance import describe_environment, provenance
from runner.results import MCM, EvalResult, ScoreResult, write_json
from runner.run_folders import AnyResult
from runner.session import Run, Session
from runner.setup import label_space, make_test_transform, unlabelled_pool
from runner.stop_signals import Interrupted, StopRequest
from runner.temperature import fit_temperature
from runner.trained_runs import load_trained, read_current_training
from shards.eval_views import AnyEvalTransform
from shards.image_selection import TargetImages, select_class_labels, select_target_images


def evaluate(config: RunConfig, target: Target, runtime: RuntimeConfig, *, force: bool = False) -> EvalResult:
    """Evaluate one finished run in a new session."""
    return evaluate_run(Session(runtime).get_run(config), target, force=force)


def evaluate_run(run: Run, target: Target, *, force: bool = False) -> EvalResult:
    """Count the correct images of a finished run on `target`, as `obtain_result` does.

    The session's `evaluation` sets the precision, the resizing, the temperature and the samples. These, and the order
    in which a method adapts to the images, come from named streams of the run's seed; nothing else is random.
    """
    return obtain_result(run, target, EvalResult, partial(_evaluate, run, target, force=force), force=force)


def obtain_result(
    run: Run, target: Target, model: type[AnyResult], compute: Callable[[StopRequest], AnyResult], *, force: bool
) -> AnyResult:
    """Return the result of a finished run on `target` from its file, or compute and write it.

    An existing result of the same checkpoint is returned, unless `force` is set or it counts too few images.
    All ranks of a group call this; each image is predicted on one rank, and rank 0 reads and writes the results.
    Raises UserError when the run is not finished, when data or weights have changed, when a limited result would
    replace a whole one, and for an image or shard that cannot be read.
    """
    session = run.session
    # A result that exists needs no weights; `load_trained` downloads them for a new one.
    session.remote.pull(run.path)
    if existing := _find_result(run, target, model, force=force):
        session.remote.push(run.path)
        return existing
    with StopRequest() as stop:
        result = compute(stop)
        if session.is_first:
            write_json(run.folder.result_file(target, run.settings, model), result)
            session.remote.push(run.path)
        result = session.group.broadcast_object(result)
        # Signals that arrived since the last batch are obeyed here, when the result is safe.
        stop.check(f"evaluated {run.path} on {target}")
    # MLflow gets no scores of single images.
    if session.is_first and model is EvalResult:
        session.exporter.post(run.path)
    return result


def _find_result(run: Run, target: Target, model: type[AnyResult], *, force: bool) -> AnyResult | None:
    """Find the existing result that a new one would repeat. Raises what `obtain_result` raises before it computes."""
    session, limit = run.session, run.session.runtime.limit
    training = read_current_training(run)
    if target.dataset == run.config.dataset:
        session.check_content(run.config, target.dataset, training.manifest_digest)
    existing = None
    if session.is_first:
        # `force` replaces a broken file.
        with suppress(UserError) if force else nullcontext():
            existing = run.folder.read_result(model, target, run.settings)
        # A result of earlier weights is no result of this run; one of fewer images can still be too short, see below.
        if existing and not existing.has_weights(training):
            existing = None
    existing = session.group.broadcast_object(existing)
    if existing and force and not existing.limited and limit and limit < existing.total:
        raise UserError(
            f"{run.path} has a result of all {existing.total} images of {target}, and --limit {limit} counts fewer: "
            "leave out --limit, or name another --results"
        )
    if not existing or force or not existing.is_current(training, limit):
        return None
    session.check_content(run.config, target.dataset, existing.manifest_digest)
    return existing


def _evaluate(run: Run, target: Target, stop: StopRequest, *, force: bool) -> EvalResult:
    config, session = run.config, run.session
    temperature = fit_temperature(run, stop, force=force) if run.settings.temperature else None
    method, selection = load_trained(run).method, select_target(run, target)
    transform = make_test_transform(method, target.dataset, config.seed, run.settings.resize)
    first = range(len(selection.images))[: session.runtime.limit]
    # Kept crops; cropping them again, as the transform does, changes nothing.
    images = session.crops.wrap(selection.images.subset(first), transform)
    start_memory_peak(session.device)
    space = label_space(session.dataset(target.dataset).manifest, selection.classnames)
    logit_settings = LogitSettings(_find_base_classes(run, target, selection), temperature or 1.0)
    inference = prepare_inference(run, images, space, logit_settings)
    predictions = predict_target(run, target, inference, transform, stop)
    per_class = count_by_class(predictions.labels, predictions.is_correct, selection.classnames)
    meter = inference.meter
    return EvalResult(
        **describe_inference(run, target, selection, inference),
        correct=sum(per_class.correct),
        per_class=per_class,
        calibration=measure_calibration(predictions),
        num_classes=len(selection.classnames),
        temperature=temperature,
        batch_size=config.recipe.test_batch_size,
        workers=session.decoders,
        seconds=meter.seconds,
        images_per_second=meter.images_per_second(),
        images_per_second_model=meter.images_per_second("model"),
        phases=meter.phases_with_other(),
        stored_seconds=meter.stored_seconds,
        peak_memory_bytes=peak_memory(session.device),
        labels=predictions.labels.tolist(),
        predicted=predictions.predicted.tolist(),
        confidence=predictions.confidence.tolist(),
        base_confidence=None if predictions.base_confidence is None else predictions.base_confidence.tolist(),
    )


def select_target(run: Run, target: Target) -> TargetImages:
    """Select all images of a target. Raises UserError unless all ranks have the same."""
    shards = run.session.dataset(target.dataset)
    run.session.group.check_same(f"the content of {target.dataset}", shards.manifest.digest)
    return select_target_images(shards, target.classes, target.split)


def predict_target(
    run: Run, target: Target, inference: Inference, transform: AnyEvalTransform, stop: StopRequest
) -> ImagePredictions:
    """Predict the images of `inference`, those of a target, and show the progress; `Interrupted` on a signal."""
    what, session = f"{run.path} on {target}", run.session
    quiet = session.runtime.quiet or not session.is_first
    with ProgressDisplay(what, len(inference.images), unit="images", quiet=quiet) as display:
        signum, predictions = predict_images(run, inference, transform, stop, display)
    # No rank leaves while another may still exchange the flags.
    if predictions is None:
        session.group.barrier()
        raise Interrupted(signum, f"stopped the evaluation of {what}; it starts over when repeated")
    return predictions


def describe_inference(run: Run, target: Target, selection: TargetImages, inference: Inference) -> dict[str, Any]:
    """Return the fields of a `TargetResult`."""
    training = load_trained(run).training
    return {
        "config_hash": run.config.hash,
        "target": str(target),
        "total": len(inference.images),
        "limit": run.session.runtime.limit,
        "dataset_size": len(selection.images),
        "precision": inference.precision,
        "settings": run.settings,
        "manifest_digest": run.session.dataset(target.dataset).manifest.digest,
        "backbone_digest": training.backbone_digest,
        "checkpoint_sha256": training.checkpoint_sha256,
        **provenance(describe_environment(run.session.device)),
    }


def _find_base_classes(run: Run, target: Target, selection: TargetImages) -> NDArray[np.int64] | None:
    """Find the classes of the target that the run was trained on; None if it has no others."""
    config = run.config
    if target.dataset != config.dataset:
        return None
    trained = select_class_labels(run.session.dataset(config.dataset), config.classes)
    positions = np.flatnonzero(np.isin(selection.labels, trained))
    return positions if 0 < len(positions) < len(selection.labels) else None


def score_run(run: Run, target: Target, *, force: bool = False) -> ScoreResult:
    """Score the images of `target`, whatever they show, among the classes of a finished run; see `obtain_result`."""
    return obtain_result(run, target, ScoreResult, partial(_score, run, target), force=force)


def _score(run: Run, target: Target, stop: StopRequest) -> ScoreResult:
    config, session, method = run.config, run.session, load_trained(run).method
    selection = select_target(run, target)
    # Known and unknown images have equal views, whatever set the unknown ones are from.
    transform = make_test_transform(method, config.dataset, config.seed, run.settings.resize)
    # Their labels are no classes of the run; predictions need some that are.
    relabel = dict.fromkeys(range(len(selection.classnames)), 0)
    first = range(len(selection.images))[: session.runtime.limit]
    images = session.crops.wrap(selection.images.subset(first, relabel), transform)
    # At temperature 1, not at that of the classifier: see the source above.
    logit_settings = LogitSettings(temperature=float(method.scale()), unknown_rule=MCM)
    inference = prepare_inference(run, images, _known_names(run), logit_settings)
    predictions = predict_target(run, target, inference, transform, stop)
    return ScoreResult(
        **describe_inference(run, target, selection, inference),
        score=inference.logit_settings.unknown_rule,
        # Of a thousand classes all scores lie near 0.001, so that decimals would not tell them apart.
        scores=[float(f"{score:.6g}") for score in predictions.confidence],
    )


def _known_names(run: Run) -> LabelSpace:
    """Return the names of the run's classes; without labels it may have learned more."""
    config, space = run.config, load_trained(run).method.space
    if unlabelled_pool(config) != "all":
        return space
    shards = run.session.dataset(config.dataset)
    names = tuple(shards.classnames[label] for label in select_class_labels(shards, config.classes))
    return replace(space, classnames=names)
