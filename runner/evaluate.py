"""Evaluation of a trained run: every image of a target once, counted in whole numbers.

Shapes: B images, C classes, N images of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from procap.clip import CLIP
from procap.errors import UserError
from procap.methods.method import Method
from runner.acceleration import Acceleration
from runner.checkpoint import CheckpointCard, load_into, prompts_bytes, unpack_prompts
from runner.config import RunConfig, RuntimeConfig, Target
from runner.correctness import pack_bits
from runner.cuda_graphs import CudaGraphs
from runner.distributed.collectives import ProcessGroup
from runner.distributed.flag_sync import Flags, FlagSync
from runner.distributed.ranks import ALONE
from runner.engine import autocast
from runner.environment import decoders, environment, resolve_device
from runner.features import FeatureKey, FeatureStore, reads_plain_features
from runner.inference import Inference
from runner.meters import Machine, Meter
from runner.progress import ProgressDisplay
from runner.remote_results import RemoteResults
from runner.results import EvalResult, PerClass, RunFolder, TrainResult, write_json
from runner.setup import check_content, label_space, load_backbone, make_method
from runner.stop_signals import StopRequest, interrupted
from runner.threads import fitting_threads
from runner.tracking.background import Tracker
from shards.fewshot import Selection, evaluation_split
from shards.reader import open_dataset
from shards.transforms import eval_transform


@dataclass(frozen=True)
class Trained:
    """A finished run in memory, so that many targets need one loading."""

    config: RunConfig
    training: TrainResult
    card: CheckpointCard
    clip: CLIP
    method: Method


def load_trained(config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup | None = None) -> Trained:
    """Load a finished run. Raises UserError when it is not finished, was altered, or its backbone is another here."""
    group = group or ProcessGroup(ALONE)
    folder = RunFolder(runtime.results / config.path)
    if group.ranks.first:
        RemoteResults.of(runtime).pull_run(config.path)
    training = _training(folder, group)
    file = folder.checkpoint_file
    data = prompts_bytes(file, training.checkpoint_sha256) if group.ranks.first else None
    tensors, card = unpack_prompts(group.broadcast_object(data) or b"", file)
    device = resolve_device(runtime.device)
    clip = load_backbone(config, device, Acceleration.of(runtime.accelerate, device))
    if (digest := clip.digest()) != training.backbone_digest:
        raise UserError(
            f"{config.path} was trained on weights {training.backbone_digest} of {config.backbone}, here are {digest}: "
            "name the weights it was trained on, or train again with --force"
        )
    method = make_method(config, clip, card.space)
    load_into(method, tensors, folder.checkpoint_file)
    return Trained(config, training, card, clip, method)


def evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    *,
    force: bool = False,
    trained: Trained | None = None,
    group: ProcessGroup | None = None,
) -> EvalResult:
    """Count what a finished run gets right on `target` and give what `eval/<target>.json` says.

    A result of the same checkpoint is read, not repeated, unless `force`, or a limit that made it smaller than asked.
    Image features that `runtime.features` holds are used, unless `force`, where the classifier puts no prompts into the
    image tower; the result then says so and has no speed. Logits differ from computed ones by rounding at most.
    `trained` saves loading when several targets follow each other. Draws no random number.
    All ranks of a group call this. Each image is counted on one of them; rank 0 reads and writes the results. Stored
    image features are not used then.
    Raises UserError when the run is not finished, when a data set has other content than the run was trained on or a
    known result was counted on, and when a limited result would replace a whole one; DataError for an image or shard
    that cannot be read: no image is ever left out.
    """
    group = group or ProcessGroup(ALONE)
    folder = RunFolder(runtime.results / config.path)
    store = RemoteResults.of(runtime) if group.ranks.first else RemoteResults(None, runtime.results)
    store.pull_run(config.path, weights=False)
    training = _training(folder, group)
    if group.ranks.first:
        folder.tidy()
    if target.dataset == config.dataset:
        check_content(f"{config.path} was trained", target.dataset, training.manifest_digest, runtime.data, "train")
    known = group.broadcast_object(_known(folder, target, training, force) if group.ranks.first else None)
    if known and force and not known.limited and runtime.limit and runtime.limit < known.total:
        raise UserError(
            f"{folder.eval_file(target)} counts all {known.total} images and --limit {runtime.limit} fewer: "
            "leave out --limit, or name another --results"
        )
    if known and not force and known.answers(training, runtime.limit):
        check_content(f"{config.path} was evaluated", target.dataset, known.manifest_digest, runtime.data, "evaluate")
        store.push_run(config.path)
        return known
    with StopRequest() as stop:
        trained = trained or load_trained(config, runtime, group)
        found = _evaluate(config, target, runtime, trained, stop, group, anew=force)
        if group.ranks.first:
            write_json(folder.eval_file(target), found)
            store.push_run(config.path)
        result = group.broadcast_object(found)
        assert result is not None
        stop.check(f"evaluated {config.path} on {target}")
    if group.ranks.first:
        Tracker(folder, runtime).update()
        store.push_run(config.path)
    return result


def _training(folder: RunFolder, group: ProcessGroup) -> TrainResult:
    training = folder.train() if group.ranks.first else None
    if group.ranks.first and training is None:
        raise UserError(f"{folder.path} holds no finished training: run procap train first, or name another --results")
    shared = group.broadcast_object(training)
    assert shared is not None
    return shared


def _known(folder: RunFolder, target: Target, training: TrainResult, force: bool) -> EvalResult | None:
    """The result on disk of these very weights; a broken file is as good as none when it is to be replaced anyway."""
    try:
        known = folder.evaluation(target)
    except UserError:
        if not force:
            raise
        return None
    return known if known and known.checkpoint_sha256 == training.checkpoint_sha256 else None


class Answers:
    """What a classifier said, by the image's index in the target; nothing leaves the device before `predictions`."""

    def __init__(self) -> None:
        self._places: list[NDArray[np.int64]] = []
        self._predictions: list[torch.Tensor] = []
        self._finite: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, places: NDArray[np.int64]) -> int:
        """Book logits [B, C] of the images at `places` [B]; gives how many they are. Negative places are filling."""
        self._places.append(places)
        self._predictions.append(logits.argmax(dim=1))
        self._finite.append(torch.isfinite(logits).all())
        return int((places >= 0).sum())

    def finite(self, group: ProcessGroup) -> bool:
        """Whether everything was, in all processes."""
        return all(group.all_gather_object(bool(torch.stack(self._finite).all())))

    def predictions(self, wanted: int, group: ProcessGroup) -> NDArray[np.int64]:
        """The class [N] of each of the first `wanted` images, which all processes have seen exactly once together."""
        places = group.gather(torch.from_numpy(np.concatenate(self._places))).numpy()
        predictions = group.gather(torch.cat(self._predictions).cpu()).numpy()
        # A stream that is shared by processes fills its last batch with images of index -1; none of them is an answer.
        real = places >= 0
        order = np.argsort(places[real])
        if not np.array_equal(places[real][order], np.arange(wanted)):
            raise RuntimeError("not every image was seen exactly once")
        return predictions[real][order]


def _evaluate(
    config: RunConfig,
    target: Target,
    runtime: RuntimeConfig,
    trained: Trained,
    stop: StopRequest,
    group: ProcessGroup,
    *,
    anew: bool,
) -> EvalResult:
    """`anew`: no feature on the disk is read; all are computed and put there."""
    clip, device = trained.clip, trained.clip.device
    shards = open_dataset(runtime.data, target.dataset, stream=runtime.no_cache)
    manifest = shards.manifest
    group.check_same(f"the content of {target.dataset}", manifest.digest)
    selection = evaluation_split(shards, target.classes, target.split)
    wanted = min(len(selection.images), runtime.limit or len(selection.images))
    batch_size, workers = config.recipe.test_batch_size, decoders(runtime.workers, device)
    transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
    meter, machine = Meter(device, warmup=0), Machine(device)
    with meter.phase("classes", rated=False), autocast(config, device):
        classifier = trained.method.classifier(label_space(manifest, selection.classnames))
    store = None
    if runtime.features and group.ranks.size == 1 and reads_plain_features(classifier, clip):
        with meter.phase("features", rated=False):
            backbone = trained.training.backbone_digest
            key = FeatureKey.of(manifest, target.split, backbone, transform, config.precision, device)
            store = FeatureStore(runtime.features, key, read=not anew)
    graphs = CudaGraphs(device) if Acceleration.of(runtime.accelerate, device).graphs else None
    inference = Inference(clip, classifier, selection.images.positions[:wanted], store, graphs)
    with meter.phase("warm-up", rated=False), autocast(config, device):
        # Kernels and memory pools of a GPU are for one size of batch; a CPU has neither, and two whole batches there
        # can cost as much as the evaluation.
        share = -(-len(inference.fresh) // group.ranks.size)
        warmed = inference.warm_up(min(batch_size, share) if device.type == "cuda" else 1)
    meter.settle()
    answers, flag_sync, what = Answers(), FlagSync(group), f"{config.method} on {target}"
    with (
        fitting_threads(clip, min(batch_size, wanted), "eval"),
        ProgressDisplay(what, wanted, unit="images", quiet=runtime.quiet or not group.ranks.first) as display,
        inference.kept(meter),
    ):
        batches = inference.batches(selection.images, transform, batch_size, workers, group.ranks)
        for pixels, places in meter.each("data", batches):
            # Nothing is fetched from the device until the end: the next batch is decoded while this one is computed.
            with meter.phase("model"), autocast(config, device):
                # All processes work at the same pace, and each of them on as many images.
                seen = group.ranks.size * answers.add(inference(pixels, places), places)
            meter.step(seen)
            machine.sample()
            display.update(min(display.done + seen, wanted))
            if signum := flag_sync.exchange(Flags(signum=stop.signum or 0)).signum:
                group.barrier()
                raise interrupted(
                    signum, f"stopped the evaluation of {config.path} on {target}; it starts over when repeated"
                )
        flag_sync.wait()
    meter.settle()
    if not answers.finite(group):
        raise UserError(f"{config.path} gives logits on {target} that are not finite: train with {config.calmer}")
    right = answers.predictions(wanted, group) == selection.images.labels[:wanted]
    correct, total = per_class_counts(right, selection)
    # A speed without the image tower, or partly without, is not that of the method.
    rated = inference.features == "computed"
    return EvalResult(
        config_hash=config.hash,
        target=str(target),
        correct=sum(correct),
        total=sum(total),
        per_class=PerClass(correct=correct, total=total),
        limit=runtime.limit,
        dataset_size=len(selection.images),
        num_classes=len(selection.classnames),
        precision=config.precision,
        batch_size=batch_size,
        workers=workers,
        device=str(device),
        features=inference.features,
        seconds=meter.seconds,
        images_per_second=meter.images_per_second() if rated else None,
        images_per_second_model=meter.images_per_second("model") if rated else None,
        warmup_batches=warmed,
        phases=meter.with_other(),
        peak_memory_bytes=machine.peak_memory(),
        use=machine.use(),
        manifest_digest=manifest.digest,
        variant=manifest.variant,
        backbone_digest=trained.training.backbone_digest,
        checkpoint_sha256=trained.training.checkpoint_sha256,
        environment=environment(device),
        correct_bits=pack_bits(right),
    )


def per_class_counts(right: NDArray[np.bool_], selection: Selection) -> tuple[list[int], list[int]]:
    """Images that were right, and all images, of each of the C classes among the first ones of the list, as `right`."""
    labels = selection.images.labels[: len(right)]
    classes = len(selection.classnames)
    return np.bincount(labels[right], minlength=classes).tolist(), np.bincount(labels, minlength=classes).tolist()
