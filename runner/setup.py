"""What training and evaluation build: the frozen model, the method on it, the space of its classes, the data stream."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import build_method
from procap.methods.method import Method
from procap.recipe import Recipe
from procap.text import LabelSpace
from procap.weights.loading import load_clip
from runner.acceleration import Acceleration, keep_compiled
from runner.checkpoint import CheckpointCard
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import ALONE, Ranks
from runner.environment import decoders
from shards.device.stream import DeviceTrainStream, augments_on_device
from shards.fewshot import FewShot, evaluation_labels, load_few_shot, load_samples
from shards.loader import TrainStream
from shards.manifest import FILE, Manifest
from shards.reader import Split, open_dataset
from shards.resolve import base_name
from shards.rng import generator
from shards.transforms import TrainAugment


@dataclass(frozen=True)
class Setup:
    """A method at its seeded start. Without epochs there is nothing to stream and no image is picked."""

    method: Method
    card: CheckpointCard
    stream: TrainStream | None
    fewshot: FewShot | None
    ways: Acceleration


def set_up(config: RunConfig, runtime: RuntimeConfig, device: torch.device, group: ProcessGroup) -> Setup:
    """Open the data, load the backbone and build the method; raises the user's errors of all three.

    Raises UsageError where the batch cannot be dealt out evenly to the group.
    """
    # Messages between processes are not recorded, so steps of several are run as they are.
    alone = group.ranks.size == 1
    ways = Acceleration.of(runtime.accelerate, device)
    ways = ways if alone else replace(ways, graphs=False)
    shards = open_dataset(runtime.data, config.dataset)
    fewshot = stream = None
    if config.recipe.epochs:
        samples = load_samples(shards.folder, config.picks) if config.picks else None
        # A shard that is missing is told before minutes are spent on a backbone.
        fewshot = load_few_shot(shards, config.shots, config.seed, config.classes, samples)
    clip = load_backbone(config, device, ways)
    if fewshot:
        augment = train_augment(config.recipe, clip)
        workers = decoders(runtime.workers, device)
        stream = train_stream(fewshot.train, config, augment, workers, device, ways, group.ranks)
    labels = fewshot.labels if fewshot else evaluation_labels(shards, config.classes)
    space = label_space(shards.manifest, tuple(shards.classnames[label] for label in labels))
    method = make_method(config, clip, space)
    if stream and not any(parameter.requires_grad for parameter in method.parameters()):
        raise UsageError(f"{config.method} learns nothing: its recipe needs epochs = 0, not {config.recipe.epochs}")
    card = CheckpointCard(
        config=config,
        classnames=space.classnames,
        template=space.template,
        templates=space.templates,
        backbone_digest=clip.digest(),
        manifest_digest=shards.manifest.digest,
    )
    if not alone:
        method.team = group
        group.check_same(f"the content of {config.dataset}", card.manifest_digest)
        group.check_same(f"the digest of the weights of {config.backbone}", card.backbone_digest)
    return Setup(method, card, stream, fewshot, ways)


def load_backbone(config: RunConfig, device: torch.device, ways: Acceleration) -> CLIP:
    """The frozen CLIP of a run, on `device`, its blocks compiled where `ways` says so."""
    if device.type == "cuda":
        # cuDNN's default for convolutions is TF32, ten bits of mantissa: less than fp32 is a choice made by name.
        torch.backends.cudnn.allow_tf32 = False
    clip = load_clip(config.backbone, config.pretrained).to(device)
    if ways.compile:
        from procap.kernels.compiled import compile_blocks

        keep_compiled()
        compile_blocks(clip)
    return clip


def make_method(config: RunConfig, clip: CLIP, space: LabelSpace) -> Method:
    """The method at its seeded start, on the device of `clip`."""
    return build_method(config.method, clip, space, config.options, generator(config.seed, "init"))


def check_content(result: str, dataset: str, digest: str, data: Path, again: str) -> None:
    """Raise UserError when `data` holds other content of `dataset` than `digest`, that of a finished `result`.

    Where the data set is absent there is nothing to compare: results are read without it.
    """
    folder = data / dataset
    if (folder / FILE).exists() and (here := open_dataset(data, dataset).manifest.digest) != digest:
        raise UserError(
            f"{result} on other content of {dataset} ({digest}) than is in {data} ({here}): "
            f"pack that again, or {again} again with --force"
        )


def make_optimizer(method: Method, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over everything that the method learns."""
    decay, device = recipe.weight_decay, method.clip.device
    on_gpu = device.type == "cuda"
    # Steps that are recorded read the rate where it can be changed for them: on the device.
    lr = torch.tensor(recipe.lr, device=device) if on_gpu else recipe.lr
    # One kernel for all parameters: ProCAP has hundreds of small ones, and a loop over them takes as long as a pass.
    if recipe.optimizer == "adamw":
        betas = recipe.betas
        # Some steps are run as they are, those that warm up at least; torch warns of that.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
        return torch.optim.AdamW(method.parameters(), lr, betas, weight_decay=decay, fused=True, capturable=on_gpu)
    return torch.optim.SGD(method.parameters(), lr, momentum=recipe.momentum, weight_decay=decay, fused=True)


def train_stream(
    split: Split,
    config: RunConfig,
    augment: TrainAugment,
    workers: int,
    device: torch.device,
    ways: Acceleration,
    ranks: Ranks = ALONE,
) -> TrainStream:
    """The run's training batches, or one process's part of them; augmented on `device` where asked for and possible.

    Raises UsageError where the global batch cannot be dealt out evenly.
    """
    batch, rank, size = config.recipe.batch_size, ranks.rank, ranks.size
    if (images := min(batch, len(split))) % size:
        raise UsageError(
            f"a global batch of {images} images cannot be dealt out evenly to {size} processes: "
            f"give --global-batch-size a multiple of {size}, or start another number of processes"
        )
    if ways.images and augments_on_device(augment):
        return DeviceTrainStream(split, batch, augment, config.seed, workers, device=device, rank=rank, world_size=size)
    return TrainStream(split, batch, augment, config.seed, workers, rank=rank, world_size=size)


def train_augment(recipe: Recipe, clip: CLIP) -> TrainAugment:
    """The recipe's augmentation at the backbone's image size and normalisation."""
    return TrainAugment(
        clip.geometry.image_size,
        clip.image_mean,
        clip.image_std,
        crop_scale=recipe.crop_scale,
        flip=recipe.flip,
        colour_jitter=recipe.colour_jitter,
        rotation=recipe.rotation,
    )


def label_space(manifest: Manifest, classnames: tuple[str, ...]) -> LabelSpace:
    """What the text side is told about some classes of a packed data set."""
    return LabelSpace(classnames, manifest.template, manifest.templates, dataset=base_name(manifest.dataset))


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[object]:
    """The precision of a run; parameters and optimizer stay in float32 under both."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.precision == "bf16" else nullcontext()
