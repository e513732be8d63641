"""Evaluate a trained run: each image of a target once, with integer counts and the calibration of its probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from procap.classifier import Classifier
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods import method_source
from procap.methods.method import Method
from procap.text import LabelSpace
from runner.acceleration import Acceleration
from runner.calibration import ImagePredictions, measure_calibration
from runner.checkpoint import decode_checkpoint, load_into, read_checkpoint_bytes
from runner.config import EvalSettings, Precision, RunConfig, RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.engine import autocast
from runner.environment import environment, num_decoders, provenance, resolve_device, set_deterministic
from runner.inference import Inference, PredictionCollector, count_by_class
from runner.meters import Meter, peak_memory, start_memory_peak
from runner.progress import ProgressDisplay
from runner.remote_results import RemoteResults
from runner.results import EvalResult, TrainResult, write_json
from runner.run_folders import RunFolder, check_content, check_training_content
from runner.setup import label_space, make_eval_transform, make_method, warn_of_names
from runner.stop_signals import Interrupted, StopRequest
from runner.threads import fitting_threads
from runner.tracking.exporter import exporter_for
from runner.workbench import Workbench
from shards.image_selection import select_target_images
from shards.reader import ImageList, open_dataset
from shards.rng import generator
from shards.transfer import upload


@dataclass(frozen=True)
class TrainedRun:
    """A finished run in memory, loaded once for many targets."""

    config: RunConfig
    training: TrainResult
    clip: CLIP
    method: Method


def load_trained(
    config: RunConfig,
    runtime: RuntimeConfig,
    group: ProcessGroup | None = None,
    workbench: Workbench | None = None,
) -> TrainedRun:
    """Load a finished run. Raises UserError if it is not finished, was altered, or the backbone here is another."""
    group, workbench = group or ProcessGroup(), workbench or Workbench()
    folder = RunFolder(runtime.results / config.path)
    if group.ranks.is_first:
        RemoteResults.from_runtime(runtime).pull(config.path, weights=True)
    training = _read_training(config, folder, group, workbench)
    if training.method_source and not method_source(config.method):
        raise UserError(f"{config.path} was trained by {training.method_source}, which is not installed here")
    file = folder.checkpoint_file
    # The bytes are sent, not the path, because other machines may not have rank 0's folder.
    data = group.call_on_first(lambda: read_checkpoint_bytes(file, training.checkpoint_sha256))
    tensors, card = decode_checkpoint(data, file)
    device = resolve_device(runtime.device)
    if runtime.deterministic:
        set_deterministic()
    clip = workbench.load_backbone(config, device, Acceleration.parse(runtime.accelerate, device))
    # Only the first rank has compared its weights with those of the training.
    group.check_same(f"the digest of the weights of {config.backbone}", clip.digest())
    method = make_method(config, clip, card.space)
    load_into(method, tensors, folder.checkpoint_file)
    return TrainedRun(config, training, clip, method)


def evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    trained: TrainedRun | None = None,
    group: ProcessGroup | None = None,
    workbench: Workbench | None = None,
) -> EvalResult:
    """Count the correct images of a finished run on `target` and return the content of the result's file in `eval`.

    An existing result of the same checkpoint is returned, unless `force` is set or it counts too few images.
    `runtime.evaluation` sets the precision, the resizing and the samples, which come from named streams of the run's
    seed; nothing else is random.
    trained: the loaded run, to evaluate several targets without loading it again.
    workbench: keeps the backbone between runs.
    All ranks of a group call this; each image is counted on one rank, and rank 0 reads and writes the results.
    Raises UserError when the run is not finished, when data or weights have changed, when a limited result would
    replace a whole one, and for an image or shard that cannot be read.
    """
    group, workbench = group or ProcessGroup(), workbench or Workbench()
    folder, settings = RunFolder(runtime.results / config.path), runtime.evaluation.for_run(config)
    remote = RemoteResults.from_runtime(runtime) if group.ranks.is_first else RemoteResults(None, runtime.results)
    # A result that exists needs no weights; `load_trained` downloads them for a new one.
    remote.pull(config.path)
    existing = find_result(config, target, runtime, force=force, group=group, workbench=workbench)
    if existing:
        remote.push(config.path)
        return existing
    with StopRequest() as stop:
        trained = trained or load_trained(config, runtime, group, workbench)
        result = _evaluate(target, settings, runtime, trained, stop, group)
        if group.ranks.is_first:
            write_json(folder.eval_file(target, settings), result)
            remote.push(config.path)
        result = group.broadcast_object(result)
        # Signals that arrived since the last batch are obeyed here, when the result is safe.
        stop.check(f"evaluated {config.path} on {target}")
    if group.ranks.is_first:
        exporter_for(runtime).post(config.path)
    return result


def find_result(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool,
    group: ProcessGroup,
    workbench: Workbench,
) -> EvalResult | None:
    """Find the existing result that `evaluate` returns; None if it evaluates. Raises what `evaluate` raises before."""
    folder, settings = RunFolder(runtime.results / config.path), runtime.evaluation.for_run(config)
    training = _read_training(config, folder, group, workbench)
    if target.dataset == config.dataset:
        check_training_content(config, training, runtime.data)
    existing = None
    if group.ranks.is_first:
        # `force` replaces a broken file.
        with suppress(UserError) if force else nullcontext():
            existing = folder.read_evaluation(target, settings)
        # A result of earlier weights is no result of this run; one of fewer images can still be too short, see below.
        if existing and not existing.is_current(training, existing.limit):
            existing = None
    existing = group.broadcast_object(existing)
    if existing and force and not existing.limited and runtime.limit and runtime.limit < existing.total:
        raise UserError(
            f"{folder.eval_file(target, settings)} counts all {existing.total} images and --limit {runtime.limit} "
            "fewer: leave out --limit, or name another --results"
        )
    if not existing or force or not existing.is_current(training, runtime.limit):
        return None
    check_content(config, target.dataset, existing.manifest_digest, runtime.data)
    return existing


def _read_training(config: RunConfig, folder: RunFolder, group: ProcessGroup, workbench: Workbench) -> TrainResult:
    training = group.call_on_first(folder.read_training)
    if training is None:
        raise UserError(f"{folder.path} holds no finished training: run procap train first, or name another --results")
    if why := training.changed_code(config):
        raise UserError(why)
    group.call_on_first(lambda: folder.check_config(config))
    group.call_on_first(lambda: workbench.check_backbone(config, training))
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


def _evaluate(
    target: Target,
    settings: EvalSettings,
    runtime: RuntimeConfig,
    trained: TrainedRun,
    stop: StopRequest,
    group: ProcessGroup,
) -> EvalResult:
    config, clip, device = trained.config, trained.clip, trained.clip.device
    shards = open_dataset(runtime.data, target.dataset, stream=runtime.no_cache)
    manifest = shards.manifest
    group.check_same(f"the content of {target.dataset}", manifest.digest)
    selection = select_target_images(shards, target.classes, target.split)
    count = min(len(selection.images), runtime.limit or len(selection.images))
    images = selection.images.subset(range(count))
    batch_size, workers = config.recipe.test_batch_size, num_decoders(runtime.workers, device)
    precision = settings.precision or config.precision
    start_memory_peak(device)
    # No batch is left out of the rates: `prepare_inference` warms up.
    meter = Meter(device, warmup=0)
    space = label_space(manifest, selection.classnames)
    inference = prepare_inference(trained, images, space, settings, runtime, meter, group)
    what = f"{config.path} on {target}"
    quiet = runtime.quiet or not group.ranks.is_first
    with (
        fitting_threads(clip, min(batch_size, count), "eval"),
        ProgressDisplay(what, count, unit="images", quiet=quiet) as display,
    ):
        batches = inference.batches(make_eval_transform(clip, settings.resize), batch_size, workers, group.ranks)
        signum, predictions = collect_predictions(
            inference, batches, config, precision, target, meter, stop, group, display
        )
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
        precision=precision,
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
        **provenance(environment(device)),
        labels=predictions.labels.tolist(),
        predicted=predictions.predicted.tolist(),
    )


def prepare_inference(
    trained: TrainedRun,
    images: ImageList,
    space: LabelSpace,
    settings: EvalSettings,
    runtime: RuntimeConfig,
    meter: Meter,
    group: ProcessGroup,
) -> Inference:
    """Make the classifier of the classes of `space`, and warm up."""
    config, device = trained.config, trained.clip.device
    precision = settings.precision or config.precision
    with meter.phase("classes", rated=False), autocast(precision, device):
        warn_of_names(trained.method, space)
        classifier = trained_classifier(trained.method, config, space, settings.samples)
    acceleration = Acceleration.parse(runtime.accelerate, device)
    inference = Inference(trained.clip, classifier, images, graphs=acceleration.graphs, on_device=acceleration.images)
    with meter.phase("warm-up", rated=False), autocast(precision, device):
        # GPU kernels and memory pools depend on the batch size, so warm up with full batches there. On a CPU one image
        # is enough: two full batches could cost as much as the evaluation.
        images_per_rank = -(-len(images) // group.size)
        full_batch = min(config.recipe.test_batch_size, images_per_rank)
        inference.warm_up(full_batch if device.type == "cuda" else 1)
    meter.settle()
    return inference


def collect_predictions(
    inference: Inference,
    batches: Iterator[tuple[torch.Tensor, NDArray[np.int64]]],
    config: RunConfig,
    precision: Precision,
    target: Target,
    meter: Meter,
    stop: StopRequest,
    group: ProcessGroup,
    display: ProgressDisplay | None = None,
) -> tuple[int, ImagePredictions | None]:
    """Predict this rank's `batches` and gather the predictions of all ranks.

    Returns 0 and the predictions, or on all ranks a stop signal that one of them has got, and None.
    Raises UserError if a logit is not finite.
    """
    collector = PredictionCollector(inference.images.labels)
    for images, indices in meter.iterate("data", batches):
        # Predictions stay on the device until the end, so the next batch is decoded while this one is computed.
        with meter.phase("model"), autocast(precision, inference.clip.device):
            # All ranks have equally many images in a batch.
            evaluated = group.size * collector.add(inference(images), indices)
        meter.step(evaluated)
        if display:
            display.update(min(display.done + evaluated, display.total))
        if signum := group.exchange_flags(signum=stop.signum).signum:
            return signum, None
    meter.settle()
    if not collector.are_finite(group):
        lower = f"evaluate in {config.precision}" if precision != config.precision else ""
        hint = lower or f"train with {config.stability_hint}"
        raise UserError(f"{config.path} gives logits on {target} that are not finite: {hint}")
    return 0, collector.gather(group)
