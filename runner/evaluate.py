"""Evaluate a trained run: each image of a target once, with integer counts and the calibration of its probabilities."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

import numpy as np
from numpy.typing import NDArray

from procap.errors import UserError
from runner.calibration import ImagePredictions, measure_calibration
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.devices import num_decoders
from runner.distributed.collectives import ProcessGroup
from runner.inference import Inference, LogitSettings, count_by_class
from runner.meters import Meter, peak_memory, start_memory_peak
from runner.progress_bar import ProgressDisplay
from runner.provenance import describe_environment, provenance
from runner.results import EvalResult, write_json
from runner.run_folders import AnyResult
from runner.session import Run, Session
from runner.setup import label_space, make_test_transform
from runner.stop_signals import Interrupted, StopRequest
from runner.temperature import fit_temperature
from runner.threads import fitting_threads
from runner.trained_runs import (
    collect_predictions,
    load_trained,
    prepare_inference,
    read_current_training,
    read_features,
    store_features,
)
from shards.eval_views import AnyEvalTransform
from shards.image_selection import TargetImages, select_class_labels, select_target_images


def evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
) -> EvalResult:
    """Evaluate one finished run in a new session, as `evaluate_run` does."""
    return evaluate_run(Session(runtime, group).get_run(config), target, force=force)


def evaluate_run(run: Run, target: Target, *, force: bool = False) -> EvalResult:
    """Count the correct images of a finished run on `target` and return the content of the result's file in `eval`.

    An existing result of the same checkpoint is returned, unless `force` is set or it counts too few images.
    The session's `evaluation` sets the precision, the resizing, the temperature and the samples. These, and the order
    in which a method adapts to the images, come from named streams of the run's seed; nothing else is random.
    All ranks of a group call this; each image is counted on one rank, and rank 0 reads and writes the results.
    Raises UserError when the run is not finished, when data or weights have changed, when a limited result would
    replace a whole one, and for an image or shard that cannot be read.
    """
    session = run.session
    # A result that exists needs no weights; `load_trained` downloads them for a new one.
    session.remote.pull(run.path)
    if existing := find_result(run, target, run.folder.read_evaluation, force=force):
        session.remote.push(run.path)
        return existing
    is_fitted = session.runtime.evaluation.for_run(run.config).temperature
    temperature = fit_temperature(run, force=force) if is_fitted else None
    with StopRequest() as stop:
        result = _evaluate(run, target, temperature, stop)
        if session.is_first:
            write_json(run.folder.eval_file(target, result.settings), result)
            session.remote.push(run.path)
        result = session.group.broadcast_object(result)
        # Signals that arrived since the last batch are obeyed here, when the result is safe.
        stop.check(f"evaluated {run.path} on {target}")
    if session.is_first:
        session.exporter.post(run.path)
    return result


def find_result(
    run: Run, target: Target, read: Callable[[Target, EvalSettings], AnyResult | None], *, force: bool
) -> AnyResult | None:
    """Find the existing result that a new one would repeat. Raises what `evaluate_run` raises before it evaluates.

    read: a method of the run's folder.
    """
    session, settings = run.session, run.session.runtime.evaluation.for_run(run.config)
    training, limit = read_current_training(run), run.session.runtime.limit
    if target.dataset == run.config.dataset:
        session.check_content(run.config, target.dataset, training.manifest_digest)
    existing = None
    if session.is_first:
        # `force` replaces a broken file.
        with suppress(UserError) if force else nullcontext():
            existing = read(target, settings)
        # A result of earlier weights is no result of this run; one of fewer images can still be too short, see below.
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


def _evaluate(run: Run, target: Target, temperature: float | None, stop: StopRequest) -> EvalResult:
    config, session, trained = run.config, run.session, load_trained(run)
    runtime, group, device = session.runtime, session.group, session.device
    settings, shards = runtime.evaluation.for_run(config), session.dataset(target.dataset)
    manifest = shards.manifest
    group.check_same(f"the content of {target.dataset}", manifest.digest)
    selection = select_target_images(shards, target.classes, target.split)
    count = min(len(selection.images), runtime.limit or len(selection.images))
    transform = make_test_transform(trained.method, target.dataset, config.seed, settings.resize)
    # Kept crops; cropping them again, as the transform does, changes nothing.
    images = session.crops.wrap(selection.images.subset(range(count)), transform)
    start_memory_peak(device)
    # No batch is left out of the rates: `prepare_inference` warms up.
    meter = Meter(device, warmup=0)
    scoring = LogitSettings(_find_base_classes(run, target, selection), temperature or 1.0)
    inference = prepare_inference(run, images, label_space(manifest, selection.classnames), meter, scoring)
    predictions = predict_images(run, inference, transform, target, meter, stop)
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
        temperature=temperature,
        batch_size=config.recipe.test_batch_size,
        workers=num_decoders(runtime.workers, device),
        seconds=meter.seconds,
        images_per_second=meter.images_per_second(),
        images_per_second_model=meter.images_per_second("model"),
        phases=meter.phases_with_other(),
        stored_seconds=meter.stored_seconds,
        peak_memory_bytes=peak_memory(device),
        manifest_digest=manifest.digest,
        backbone_digest=trained.training.backbone_digest,
        checkpoint_sha256=trained.training.checkpoint_sha256,
        **provenance(describe_environment(device)),
        labels=predictions.labels.tolist(),
        predicted=predictions.predicted.tolist(),
        confidence=predictions.confidence.tolist(),
        base_confidence=None if predictions.base_confidence is None else predictions.base_confidence.tolist(),
    )


def predict_images(
    run: Run, inference: Inference, transform: AnyEvalTransform, target: Target, meter: Meter, stop: StopRequest
) -> ImagePredictions:
    """Predict the images of `inference`, those of a target, and show the progress; `Interrupted` on a signal."""
    config, session, count = run.config, run.session, len(inference.images)
    what, quiet = f"{config.path} on {target}", session.runtime.quiet or not session.is_first
    batch_size, workers = config.recipe.test_batch_size, num_decoders(session.runtime.workers, session.device)
    with (
        fitting_threads(inference.clip, min(batch_size, count), "eval"),
        ProgressDisplay(what, count, unit="images", quiet=quiet) as display,
    ):
        key = read_features(run, inference, transform, meter)
        batches = inference.batches(transform, batch_size, workers, session.group.ranks)
        signum, predictions = collect_predictions(run, inference, batches, meter, stop, display)
    # No rank leaves while another may still exchange the flags.
    if predictions is None:
        session.group.barrier()
        raise Interrupted(signum, f"stopped the evaluation of {what}; it starts over when repeated")
    meter.settle()
    store_features(run, inference, key, meter)
    return predictions


def _find_base_classes(run: Run, target: Target, selection: TargetImages) -> NDArray[np.int64] | None:
    """Find the classes of the target that the run was trained on; None if it has no others."""
    config = run.config
    if target.dataset != config.dataset:
        return None
    trained = select_class_labels(run.session.dataset(config.dataset), config.classes)
    positions = np.flatnonzero(np.isin(selection.labels, trained))
    return positions if 0 < len(positions) < len(selection.labels) else None
