"""Encode a run's training images once, and train a `FeatureMethod` on their features.

Shapes: N training images, V views of each, M images, B images of a batch, E joint embedding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from procap.methods.features import FeatureBank, FeatureMethod
from runner.config import RunConfig
from runner.engine import autocast, check_head, learned_parameters
from runner.feature_store import EncodedImages
from runner.meters import Meter
from runner.session import Run
from runner.setup import Setup, make_eval_transform, train_augment
from runner.step_schedule import StepSchedule
from runner.stop_signals import StopRequest
from shards.image_selection import VAL_SHOTS, TrainingSelection, draw_positions, select_target_images
from shards.loader import DecodedImages, LoaderOptions, TrainLoader, prepare_batches
from shards.reader import ImageList, LazyImage
from shards.rng import generator
from shards.transforms import TrainAugment

Prepare = Callable[[LazyImage, Tensor], object]


class FeatureLoader(TrainLoader):
    """The batches of `TrainLoader`, of which each process gets all features instead of its share of the images.

    pooled: batches are drawn from all views of all images, see `FeatureMethod.pools_views`.
    """

    def __init__(
        self, bank: FeatureBank, images: ImageList, config: RunConfig, augment: TrainAugment, *, pooled: bool = False
    ) -> None:
        recipe = config.recipe
        super().__init__(images, recipe.batch_size, augment, config.seed, LoaderOptions(drop_last=recipe.drop_last))
        # On the host, as images are: the training loop moves batches to the device.
        self._features, self._pooled = bank.features.cpu(), pooled

    @property
    def num_samples(self) -> int:
        return self._features[..., 0].numel() if self._pooled else len(self._features)

    def order(self, pass_number: int) -> list[int]:
        """Return the order of the images in a pass; pooled, of the rows of all views, image by image."""
        if not self._pooled:
            return super().order(pass_number)
        return torch.randperm(self.num_samples, generator=generator(self.seed, "order", pass_number)).tolist()

    def batches(self, pass_number: int, start_step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (features [B, E] of the next view, labels [B]) of every step."""
        views = self._features.shape[1]
        for batch in self.batch_indices(pass_number, start_step):
            rows = torch.tensor(batch)
            image, view = (rows // views, rows % views) if self._pooled else (rows, pass_number % views)
            yield self._features[image, view], self.labels[image]


def learn_from_features(run: Run, setup: Setup, stop: StopRequest, meter: Meter) -> Setup:
    """Encode the training images and call `fit`; the new setup has an engine if the method takes steps.

    meter: also gets the time of stored features. Raises Interrupted on all ranks for a signal to one of them.
    """
    method, config, selection = setup.method, run.config, setup.selection
    assert isinstance(method, FeatureMethod) and selection is not None
    method.bank = SampleEncoder(run, method, stop, meter).encode(selection)
    method.fit(method.bank)
    if not learned_parameters(method):
        return setup
    check_head(method.head(method.space), config.method)
    augment = train_augment(config.recipe, method.clip)
    loader = FeatureLoader(method.bank, selection.train, config, augment, pooled=method.pools_views)
    method.begin_stage(0)
    return replace(setup, engine=setup.make_engine(), step_schedule=StepSchedule(config.recipe, loader, method))


def choosing_images(run: Run, method: FeatureMethod, val: ImageList) -> tuple[ImageList, ImageList]:
    """Select the images of `val` and, for the public rule alone, the test images that a method chooses by."""
    config = run.config
    if config.chosen_on_test:
        dataset = run.session.dataset(config.dataset)
        test = select_target_images(dataset, config.classes).images
        # ImageNet has no val split: the public code searches its test images.
        has_val = "val" in dataset.manifest.splits
        return (select_target_images(dataset, config.classes, "val").images if has_val else test), test
    if method.selection != "validation":
        val = val.subset([])
    elif not config.shots:
        # As many as few-shot samples have: a run on all training images has the whole val split.
        val = val.subset(draw_positions([], val.labels, VAL_SHOTS, config.seed)[1])
    return val, val.subset([])


class SampleEncoder:
    """Encodes images of a run with the frozen tower; all ranks of a group have one."""

    def __init__(self, run: Run, method: FeatureMethod, stop: StopRequest, meter: Meter) -> None:
        self.run, self.session, self.config = run, run.session, run.config
        self.method, self.clip, self.stop, self.meter = method, method.clip, stop, meter

    def encode(self, selection: TrainingSelection) -> FeatureBank:
        """Encode the views of the training images, and the images that the method chooses by."""
        method, config, train = self.method, self.config, selection.train
        # Raises its errors before minutes are spent on the views.
        val, test = choosing_images(self.run, method, selection.val)
        if method.augments:
            loader = TrainLoader(train, config.recipe.batch_size, train_augment(config.recipe, self.clip), config.seed)
            number, decoded = method.fixed_views(method.options) or config.recipe.epochs, DecodedImages(train)
            views = [self._augmented(view, loader, decoded) for view in range(number)]
        else:
            views = [self._plain(train, mirrored=mirrored)[0] for mirrored in (False, True)[: 1 + method.mirrors]]
        labels = torch.from_numpy(train.labels).to(self.clip.device)
        return FeatureBank(torch.stack(views, dim=1), labels, *self._plain(val), *self._plain(test))

    def _augmented(self, view: int, loader: TrainLoader, decoded: DecodedImages) -> Tensor:
        """Encode view `view`, which is what the images look like in that pass of a training on images."""

        def prepare(image: LazyImage, out: Tensor) -> None:
            i, load = image
            loader.augment(decoded.keep(i, load()), loader.augment_generator(view, i), out)

        how = f"{loader.augment}, seed {self.config.seed}, view {view}"
        return self._read_or_encode(decoded, prepare, how)

    def _plain(self, images: ImageList, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        """Encode images as a test does; returns features and labels."""
        transform = make_eval_transform(self.clip)

        def prepare(image: LazyImage, out: Tensor) -> None:
            transform(image[1](), out)
            if mirrored:
                out.copy_(out.flip(-1))

        features = self._read_or_encode(images, prepare, f"{transform}, mirrored {mirrored}")
        return features, torch.from_numpy(images.labels).to(self.clip.device)

    def _read_or_encode(self, source: ImageList | DecodedImages, prepare: Prepare, what: str) -> Tensor:
        """Read the stored features [M, E] of images, with their time, or encode and store them.

        prepare: writes the pixels of an image to a tensor [3, S, S]; what: describes that.
        """
        images = source.images if isinstance(source, DecodedImages) else source
        # A tower that the method changes gives features that no other method uses.
        if not len(images) or self.method.image_plan():
            return self._encode(source, prepare, len(images))
        how = {"transform": what, "precision": self.config.precision, "batch": self.config.recipe.test_batch_size}

        def encode() -> EncodedImages:
            start = time.perf_counter()
            # The copy waits for the device.
            features = self._encode(source, prepare, len(images)).cpu()
            return EncodedImages(features, {"features": time.perf_counter() - start})

        acceleration = self.session.acceleration
        encoded, was_stored = self.session.encode_once(self.clip, images, encode, acceleration=acceleration, **how)
        if was_stored:
            self.meter.add(encoded.seconds, in_step=False)
        return encoded.features.to(self.clip.device)

    @torch.no_grad()
    def _encode(self, source: ImageList | DecodedImages, prepare: Prepare, count: int) -> Tensor:
        """Encode `count` images to features [M, E], float32, on every rank; each rank encodes its share of them."""
        clip, group, plan = self.clip, self.session.group, self.method.image_plan()
        size, batch_size = clip.geometry.image_size, self.config.recipe.test_batch_size
        width = plan.weights["proj"].shape[1] if "proj" in plan.weights else clip.geometry.embed_dim
        features = torch.zeros(count, width, device=clip.device)
        indices = range(group.rank, count, group.size)
        with closing(source.lazy_images(indices)) as images:
            # As many batches on all ranks, of which the last can be empty: after each they agree whether to stop.
            batches = ([*islice(images, batch_size)] for _ in range(0, -(-count // group.size), batch_size))
            for batch, pixels in prepare_batches(batches, prepare, (3, size, size), self.session.decoders):
                if batch:
                    with autocast(self.config.precision, clip.device):
                        features[[i for i, _ in batch]] = clip.encode_image(pixels.to(clip.device), plan).float()
                what = f"stopped {self.config.path} while it encoded images; it starts over when repeated"
                self.stop.check_ranks(group, what)
        group.merge_rows(features)
        return features
