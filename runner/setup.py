"""Build the parts of a run: the frozen model, the method on it, its classes, the training loader, the engine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import build_method, method_class, method_options, method_source
from procap.methods.features import FeatureMethod
from procap.methods.hooks import TaughtMethod, ViewedMethod
from procap.methods.method import Method
from procap.methods.options import Pool, PoolOptions
from procap.methods.plugins import MethodSource
from procap.recipe import Recipe
from procap.text import LabelSpace
from runner.acceleration import Acceleration
from runner.checkpoint import InitialRun
from runner.config import RunConfig
from runner.distributed.ranks import Ranks
from runner.engine import Engine
from runner.results import CheckpointCard
from runner.session import Run
from runner.step_schedule import StepSchedule
from shards.eval_views import AnyEvalTransform, EvalViews
from shards.image_selection import TrainingSelection, select_class_labels, select_training_images, select_unlabelled
from shards.loader import WINDOW_BYTES, LoaderOptions, TrainLoader
from shards.manifest import Manifest
from shards.names import first_few, join_first
from shards.reader import ImageList, PackedDataset
from shards.rng import generator
from shards.transforms import EvalTransform, TrainAugment


@dataclass(frozen=True)
class Setup:
    """A method and everything that trains it; without epochs no engine, no steps and no training images.

    A `FeatureMethod` gets its engine and steps from `runner.feature_training.learn_from_features`.

    step_schedule: has the loader of the training images. file_digests: the SHA-256 of files that the method has read,
    by option. method_source: the code of the method.
    """

    method: Method
    card: CheckpointCard
    engine: Engine | None
    make_engine: Callable[[], Engine]
    step_schedule: StepSchedule | None
    selection: TrainingSelection | None
    acceleration: Acceleration
    file_digests: Mapping[str, str]
    method_source: MethodSource | None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.step_schedule.total if self.step_schedule else 0


def set_up(run: Run, initial: InitialRun | None = None, teacher: Method | None = None) -> Setup:
    """Open the data, load the backbone, build method, optimizer and engine; raises the user errors of all of them.

    initial: the run whose learned tensors the training starts from. teacher: the run that the method learns from.
    """
    config, session = run.config, run.session
    group, device, acceleration = session.group, session.device, session.acceleration
    if group.size > 1:
        # A CUDA graph cannot hold DDP's messages.
        acceleration = replace(acceleration, graphs=False)
        if device.type == "cuda":
            warnings.warn(
                "several GPUs train each run together; one run per GPU, as `procap bench` starts them, is faster",
                stacklevel=2,
            )
    dataset = session.dataset(config.dataset)
    loader = engine = step_schedule = None
    file_digests: dict[str, str] = {}
    # Missing shards are reported before minutes are spent on a backbone.
    learns_from_features = issubclass(method_class(config.method), FeatureMethod)
    # Features of all images are on every process, so that their batches are not dealt out.
    selection = select_images_of_run(config, dataset, 1 if learns_from_features else group.size)
    clip = session.backbones.load(config, device, acceleration)
    if selection and not learns_from_features:
        images = selection.unlabelled.images if selection.unlabelled else selection.train
        loader = train_loader(images, config, clip, session.decoders, group.ranks)
    selected = selection.unlabelled or selection if selection else None
    class_labels = selected.class_labels if selected else select_class_labels(dataset, config.classes)
    method, card = build_method_and_card(config, dataset, clip, class_labels)
    warn_of_names(method, method.space)
    if loader and not any(parameter.requires_grad for parameter in method.parameters()):
        raise UsageError(f"{config.method} learns nothing: its recipe needs epochs = 0, not {config.recipe.epochs}")
    source = method_source(config.method)
    if group.size > 1:
        method.group = group
        # Hosts have their own installations and data: a difference would give wrong gradients without an error.
        if source:
            group.check_same(f"the code of {config.method}", str(source))
        group.check_same(f"the content of {config.dataset}", card.manifest_digest)
        group.check_same(f"the digest of the weights of {config.backbone}", card.backbone_digest)
    make = partial(make_engine, method, run)
    if loader:
        step_schedule = StepSchedule(config.recipe, loader, method)
        method.training_images = loader
        if isinstance(method, TaughtMethod):
            method.set_teacher(teacher.classifier if teacher else lambda space: None)
    if selection:
        # Before digests are computed, because its errors name the option or file that is missing.
        method.prepare_training()
        file_digests = method.file_digests(method.options, method.space.dataset)
        for option, digest in file_digests.items():
            group.check_same(f"the file of option {option}", digest)
    if loader:
        if initial:
            initial.load_into(method)
            file_digests = {**file_digests, "init": initial.sha256}
        # Before the engine, whose optimizer takes the tensors that require a gradient by then.
        method.begin_stage(0)
        engine = make()
    return Setup(method, card, engine, make, step_schedule, selection, acceleration, file_digests, source)


def select_images_of_run(config: RunConfig, dataset: PackedDataset, processes: int) -> TrainingSelection | None:
    """Select the images that a run trains on, None without training; raises the user errors of data and batches."""
    if not config.recipe.epochs:
        return None
    selection = select_training_images(dataset, config.shots, config.seed, config.classes, config.sampling)
    if config.held_out:
        selection = selection.without_fold(config.held_out)
    if method_class(config.method).needs_every_class:
        check_class_sizes(selection, 1, f"{config.method} learns from images of each class: give --sampling natural")
    batch, images = config.recipe.batch_size, len(selection.train)
    if pool := unlabelled_pool(config):
        unlabelled = select_unlabelled(dataset, selection, pool, config.classes)
        selection, images = replace(selection, unlabelled=unlabelled), len(unlabelled.images)
    sizes = [min(batch, images)]
    if config.recipe.batches == "class":
        rule = f"a batch has {batch} of one class: give more --shots, or --recipe-field batches=random"
        check_class_sizes(selection, batch, rule)
    elif not config.recipe.drop_last:
        sizes.append(images % batch)
    for size in sizes:
        # A gather needs equally many rows on all ranks.
        if size % processes:
            raise UsageError(
                f"a global batch of {size} images cannot be dealt out evenly to {processes} processes: "
                f"give --global-batch-size a multiple of {processes}, or start another number of processes"
            )
    return selection


def unlabelled_pool(config: RunConfig) -> Pool | None:
    """Return where a run draws the images from that it trains on without labels; None if it reads labels."""
    if not method_class(config.method).learns_unlabelled:
        return None
    options = method_options(config.method, config.options)
    assert isinstance(options, PoolOptions)
    return options.unlabelled


def build_method_and_card(
    config: RunConfig, dataset: PackedDataset, clip: CLIP, class_labels: Sequence[int]
) -> tuple[Method, CheckpointCard]:
    """Build the method on the classes of these labels, and the description that its checkpoint carries."""
    space = label_space(dataset.manifest, tuple(dataset.classnames[label] for label in class_labels))
    card = CheckpointCard(
        config=config,
        classnames=space.classnames,
        template=space.template,
        templates=space.templates,
        backbone_digest=clip.digest(),
        manifest_digest=dataset.manifest.digest,
    )
    return build_initial_method(config, clip, space), card


def warn_of_names(method: Method, space: LabelSpace) -> None:
    """Warn of class names that the method cannot distinguish by their prompts."""
    for why in describe_names(method.clip, space) if method.uses.names != "none" else ():
        warnings.warn(why, stacklevel=3)


def describe_names(clip: CLIP, space: LabelSpace) -> list[str]:
    """Describe class names that prompts cannot tell apart: numbers, words that `clip` does not know, equal prompts."""
    names, reasons = space.names(), list[str]()
    codes = [name for name in names if re.fullmatch(r"[\d.-]+|n\d{8}", name)]
    unknown = clip.unknown_names(names)
    if 2 * len(codes) > len(names):
        reasons = [
            f"class names are numbers or WordNet ids ({first_few(codes)}), which mean nothing in a prompt: give names "
            "with `classes:` in the YAML file, or use a method that learns from images alone (--methods probe)"
        ]
    elif len(unknown) > 1:
        reasons = [
            f"prompts cannot tell {len(unknown)} of {len(names)} classes ({join_first([*map(repr, unknown)])}) apart, "
            f"as {clip.name} knows no word of their names: use a method that learns from images alone (--methods probe "
            "or ncm), names made of the words that `procap ls words` lists (`classes:` in the YAML file), or ViT-B/16, "
            "whose weights are fetched by `procap fetch backbone ViT-B/16`"
        ]
    alike: dict[tuple[int, ...], list[str]] = {}
    # A prompt that is too long is an error where it is used.
    with suppress(UserError):
        visible = [re.sub("[\u00ad\u200b-\u200f\u2060\ufeff]", "", prompt) for prompt in space.prompts()]
        for ids, name in zip(clip.tokenize(visible).tolist(), space.classnames, strict=True):
            alike.setdefault(tuple(ids), []).append(ascii(name))
    if equal := [" = ".join(group) for group in alike.values() if len(group) > 1]:
        what = "methods that read names alone never predict one of them"
        reasons.append(f"classes have equal prompts ({join_first(equal)}): {what}; rename yours with `classes:`")
    return reasons


def check_class_sizes(selection: TrainingSelection, least: int, rule: str) -> None:
    """Raise UsageError with the broken `rule` for a class with fewer training images than `least`."""
    for label, count in enumerate(np.bincount(selection.train.labels, minlength=len(selection.classnames)).tolist()):
        if count < least:
            raise UsageError(f"class '{selection.classnames[label]}' has {count} training images, but {rule}")


def make_engine(method: Method, run: Run) -> Engine:
    """Make the engine that the run's session names, DDP or DeepSpeed; the caller closes it."""
    runtime, group = run.session.runtime, run.session.group
    if runtime.engine == "ddp":
        return Engine(method, run.config, group)
    from runner.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(method, run.config, group, runtime.zero_stage or 1)


def build_initial_method(config: RunConfig, clip: CLIP, space: LabelSpace) -> Method:
    """Build the method at its seeded initial values, on the device of `clip`."""
    return build_method(config.method, clip, space, config.options, generator(config.seed, "init"))


def changed_file(config: RunConfig, recorded: Mapping[str, str]) -> str:
    """Return the option whose file, if it is there, has changed since a finished run read it; "" if none has."""
    options = method_options(config.method, config.options)
    with suppress(UserError, OSError):
        digests = method_class(config.method).file_digests(options, config.dataset)
        return next((name for name, digest in digests.items() if recorded.get(name, digest) != digest), "")
    return ""


def train_loader(
    images: ImageList, config: RunConfig, clip: CLIP, workers: int, ranks: Ranks | None = None
) -> TrainLoader:
    """Make the run's training batches, or one rank's part."""
    ranks, recipe = ranks or Ranks(), config.recipe
    augment = train_augment(recipe, clip, method_class(config.method).views)
    options = LoaderOptions(
        workers=workers,
        rank=ranks.rank,
        world_size=ranks.size,
        drop_last=recipe.drop_last,
        one_class=recipe.batches == "class",
        window_bytes=None if config.shots and unlabelled_pool(config) in (None, "few-shot") else WINDOW_BYTES,
    )
    return TrainLoader(images, recipe.batch_size, augment, config.seed, options)


def train_augment(recipe: Recipe, clip: CLIP, views: int = 1) -> TrainAugment:
    """Make the recipe's augmentation at the backbone's image size and normalisation."""
    size, mean, std = clip.geometry.image_size, clip.preparation.mean, clip.preparation.std
    names = ("crop_scale", "flip", "colour_jitter", "rotation", "augmentation")
    return TrainAugment(size, mean, std, views=views, **{name: getattr(recipe, name) for name in names})


def make_eval_transform(clip: CLIP, resize: Literal["crop", "squash"] = "crop") -> EvalTransform:
    """Make the test transform of the backbone; it squashes the images if `resize` says so, or its training did."""
    images = clip.preparation
    squash = images.squash or resize == "squash"
    return EvalTransform(clip.geometry.image_size, images.mean, images.std, squash, images.interpolation)


def make_test_transform(
    method: Method, dataset: str, seed: int, resize: Literal["crop", "squash"] = "crop"
) -> AnyEvalTransform:
    """Make the transform under which a run of `seed` classifies images of `dataset`, with the views of its method."""
    plain = make_eval_transform(method.clip, resize)
    return EvalViews(plain, *method.test_views(dataset), seed) if isinstance(method, ViewedMethod) else plain


def label_space(manifest: Manifest, classnames: tuple[str, ...]) -> LabelSpace:
    """Collect names and templates of some classes of a packed data set, for the text side of a method."""
    return LabelSpace(classnames, manifest.template, manifest.templates, dataset=manifest.dataset)
