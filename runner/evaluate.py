"""Evaluate a trained run: each image of a target once, with integer counts and the calibration of its probabilities.

Or score how well images fit the classes of the run, to tell those of unknown classes, by maximum concept matching: the
highest softmax probability of a class, of logits divided by the method's factor, which are plain cosines (Ming et al.
2022, "Delving into Out-of-Distribution Detection with Vision-Language Representations", section 3, and public code).
Classifiers that define a score, such as GalLoP's, are scored by that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from procap.errors import UserError
from runner.calibration import ImagePredictions, measure_calibration
from runner.config import RunConfig, RuntimeConfig, Target
from runner.inference import Inference, LogitSettings, count_by_class, predict_images, prepare_inference
from runner.meters import peak_memory, start_memory_peak
from runner.progress_bar import ProgressDisplay
from runner.provenance import describe_environment, provenance
from runner.results import MCM, EvalResult, ScoreResult, write_json
from runner.run_folders import AnyResult
from runner.session import Run, Session
from runner.setup import label_space, make_test_transform
from runner.stop_signals import StopRequest
from runner.temperature import fit_temperature
from runner.trained_runs import load_trained, read_current_training
from shards.image_selection import TargetImages, select_class_labels


def evaluate(config: RunConfig, target: Target, runtime: RuntimeConfig, *, force: bool = False) -> EvalResult:
    """Evaluate the run of `config` in a new session, for scripts; `procap.evaluate` takes its folder."""
    return evaluate_run(Session(runtime).get_run(config), target, force=force)


def evaluate_run(run: Run, target: Target, *, force: bool = False) -> EvalResult:
    """Count the correct images of a finished run on `target`, as `obtain_result` does, by the session's `evaluation`.

    Samples, the order in which a method adapts to the images, and its views come from named streams of the run's seed.
    """
    return obtain_result(run, target, EvalResult, partial(_evaluate, run, target, force=force), force=force)


def obtain_result(
    run: Run, target: Target, model: type[AnyResult], compute: Callable[[StopRequest], AnyResult], *, force: bool
) -> AnyResult:
    """Return the result of a finished run on `target` from its file, or compute and write it.

    An existing result of the same checkpoint is returned, unless `force` is set or it covers other first images.
    All ranks of a group call this; each image is encoded on one rank, and rank 0 reads and writes the results.
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
            write_json(run.folder.result_file(target, run.eval_settings, model), result)
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
            existing = run.folder.read_result(model, target, run.eval_settings)
        # A result of earlier weights is no result of this run; one of other images is replaced, see below.
        if existing and not existing.is_current(training, existing.limit):
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
    temperature = fit_temperature(run, stop, force=force) if run.eval_settings.temperature else None
    selection, base_classes = session.select(target), None
    if target.dataset == config.dataset:
        trained_on = select_class_labels(session.dataset(config.dataset), config.classes)
        positions = np.flatnonzero(np.isin(selection.class_labels, trained_on))
        base_classes = positions if 0 < len(positions) < len(selection.class_labels) else None
    logit_settings = LogitSettings(base_classes, temperature or 1.0)
    inference, predictions, fields = _predict(run, target, selection, target.dataset, logit_settings, stop)
    per_class = count_by_class(predictions.labels, predictions.is_correct, selection.classnames)
    meter = inference.meter
    return EvalResult(
        **fields,
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


def score_images(run: Run, target: Target, *, force: bool = False) -> ScoreResult:
    """Score the images of `target`, whatever they show, among the classes of a finished run; see `obtain_result`."""
    return obtain_result(run, target, ScoreResult, partial(_score, run, target), force=force)


def _score(run: Run, target: Target, stop: StopRequest) -> ScoreResult:
    config, selection = run.config, run.session.select(target)
    dataset = run.session.dataset(config.dataset)
    # Those of the run: a training on images without labels may have learned more.
    names = tuple(dataset.classnames[label] for label in select_class_labels(dataset, config.classes))
    # Labels of other sets are no classes of the run, and predictions need some that are.
    images = selection.images.subset(range(len(selection.images)), defaultdict(int))
    logit_settings = LogitSettings(temperature=float(load_trained(run).method.scale()), scores=True)
    # Known and unknown images have equal views, whatever set the unknown ones are from.
    shown = replace(selection, images=images, classnames=names)
    inference, predictions, fields = _predict(run, target, shown, config.dataset, logit_settings, stop)
    # Of a thousand classes all scores lie near 0.001, so that decimals would not tell them apart.
    scores = [float(f"{score:.6g}") for score in predictions.confidence]
    return ScoreResult(**fields, score=inference.score_name or MCM, scores=scores)


def _predict(
    run: Run, target: Target, selection: TargetImages, dataset: str, logit_settings: LogitSettings, stop: StopRequest
) -> tuple[Inference, ImagePredictions, dict[str, Any]]:
    """Predict the images of a target, prepared and named as those of `dataset`; also the fields of a `TargetResult`."""
    config, session = run.config, run.session
    trained, quiet = load_trained(run), session.runtime.quiet or not session.is_first
    transform = make_test_transform(trained.method, dataset, config.seed, run.eval_settings.resize)
    first = range(len(selection.images))[: session.runtime.limit]
    # Kept crops; cropping them again, as the transform does, changes nothing.
    images = session.crops.wrap(selection.images.subset(first), transform)
    start_memory_peak(session.device)
    space = label_space(session.dataset(dataset).manifest, selection.classnames)
    inference = prepare_inference(run, images, space, logit_settings)
    with ProgressDisplay(f"{run.path} on {target}", len(images), unit="images", quiet=quiet) as display:
        predictions = predict_images(run, inference, images, transform, stop, display)
    fields = {
        "config_hash": config.hash,
        "target": str(target),
        "total": len(images),
        "limit": session.runtime.limit,
        "dataset_size": len(selection.images),
        "precision": inference.precision,
        "settings": run.eval_settings,
        "manifest_digest": session.dataset(target.dataset).manifest.digest,
        "backbone_digest": trained.training.backbone_digest,
        "checkpoint_sha256": trained.training.checkpoint_sha256,
        **provenance(describe_environment(session.device)),
    }
    return inference, predictions, fields
