"""Encode a run's few-shot samples once, and train a `FeatureMethod` on their features.

Shapes: N training images, V views of each, M images, B images of a batch, E joint embedding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from PIL.Image import Image
from torch import Tensor

from procap.methods.features import FeatureBank, FeatureMethod
from runner.config import RunConfig
from runner.devices import num_decoders
from runner.engine import autocast, learned_parameters
from runner.feature_store import EncodedImages, feature_key
from runner.meters import Meter
from runner.schedule import Schedule
from runner.session import Run
from runner.setup import Setup, make_eval_transform, train_augment
from runner.stop_signals import Interrupted, StopRequest
from shards.image_selection import VAL_SHOTS, draw_positions, select_target_images
from shards.loader import DecodedImages, StreamOptions, TrainStream, prepare_batches
from shards.reader import ImageList
from shards.rng import generator
from shards.transforms import TrainAugment

Loader = tuple[int, Callable[[], Image]]
"""The index of an image in a list, and a function that decodes it."""


@dataclass(frozen=True)
class View:
    """Images in one view of each.

    loaders: yields those at given indices. prepare: writes the pixels of one to a tensor [3, S, S]. how: describes that
    for `feature_key`.
    """

    images: ImageList
    loaders: Callable[[Sequence[int]], Generator[Loader]]
    prepare: Callable[[Loader, Tensor], object]
    how: str


class FeatureStream(TrainStream):
    """The batches of `TrainStream`, of which each process gets all features instead of its share of the images.

    pooled: batches are drawn from all views of all images, see `FeatureMethod.pools_views`.
    """

    def __init__(
        self, bank: FeatureBank, images: ImageList, config: RunConfig, augment: TrainAugment, *, pooled: bool = False
    ) -> None:
        recipe = config.recipe
        super().__init__(images, recipe.batch_size, augment, config.seed, StreamOptions(drop_last=recipe.drop_last))
        # On the host, as images are: the training loop moves batches to the device.
        self._features, self._pooled = bank.features.cpu(), pooled

    @property
    def num_samples(self) -> int:
        return self._features[..., 0].numel() if self._pooled else len(self._features)

    def order(self, epoch: int) -> list[int]:
        """Return the order of the images for `epoch`; pooled, of the rows of all views, image by image."""
        if not self._pooled:
            return super().order(epoch)
        return torch.randperm(self.num_samples, generator=generator(self.seed, "order", epoch)).tolist()

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """Yield (features [B, E] of the next view, labels [B]) of every step."""
        views = self._features.shape[1]
        for batch in self.batch_indices(epoch, start_step):
            rows = torch.tensor(batch)
            image, view = (rows // views, rows % views) if self._pooled else (rows, epoch % views)
            yield self._features[image, view], self.labels[image]


def learn_from_features(run: Run, setup: Setup, stop: StopRequest, meter: Meter) -> Setup:
    """Encode the samples and call `fit`; the new setup has an engine if the method takes steps.

    meter: gets the time of features that an earlier run has stored.
    Raises Interrupted on all ranks if one of them gets a signal while images are encoded.
    """
    method, config = setup.method, setup.card.config
    assert isinstance(method, FeatureMethod) and setup.fewshot is not None
    method.bank = encode_samples(run, setup, stop, meter)
    method.fit(method.bank)
    if not learned_parameters(method):
        return setup
    augment = train_augment(config.recipe, method.clip)
    stream = FeatureStream(method.bank, setup.fewshot.train, config, augment, pooled=method.pools_views)
    method.begin_stage(0)
    return replace(setup, engine=setup.make_engine(), schedule=Schedule(config.recipe, stream, method))


def encode_samples(run: Run, setup: Setup, stop: StopRequest, meter: Meter) -> FeatureBank:
    """Encode the views of the training images, and the images that the method chooses by, with the frozen tower."""
    method, config = setup.method, setup.card.config
    assert isinstance(method, FeatureMethod) and setup.fewshot is not None
    train, device = setup.fewshot.train, method.clip.device
    # Raises its errors before minutes are spent on the views.
    val, test = choosing_images(run, setup)
    encode = partial(read_or_encode, run, setup, stop, meter)
    augment, transform = train_augment(config.recipe, method.clip), make_eval_transform(method.clip)
    stream, decoded = TrainStream(train, config.recipe.batch_size, augment, config.seed), DecodedImages(train)

    def encode_view(view: int) -> Tensor:
        def prepare(loader: Loader, out: Tensor) -> None:
            i, load = loader
            # View v is what the image looks like in epoch v of a training on images.
            augment(decoded.keep(i, load()), stream.augment_generator(view, i), out)

        return encode(View(train, decoded.loaders, prepare, f"{augment}, seed {config.seed}, view {view}"))

    def encode_plain(images: ImageList, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        def prepare(loader: Loader, out: Tensor) -> None:
            transform(loader[1](), out)
            if mirrored:
                out.copy_(out.flip(-1))

        features = encode(View(images, images.loaders, prepare, f"{transform}, mirrored {mirrored}"))
        return features, torch.from_numpy(images.labels).to(device)

    num_views = method.fixed_views(method.options) or config.recipe.epochs
    if method.augments:
        views = [encode_view(view) for view in range(num_views)]
    else:
        views = [encode_plain(train, mirrored=mirrored)[0] for mirrored in (False, True)[: 1 + method.mirrors]]
    labels = torch.from_numpy(train.labels).to(device)
    return FeatureBank(torch.stack(views, dim=1), labels, *encode_plain(val), *encode_plain(test))


def choosing_images(run: Run, setup: Setup) -> tuple[ImageList, ImageList]:
    """Select the validation and test images that a method chooses by; test images only for the public rule."""
    assert setup.fewshot is not None
    config, val = setup.card.config, setup.fewshot.val
    if config.chosen_on_test:
        shards = run.session.dataset(config.dataset)
        test = select_target_images(shards, config.classes).images
        # ImageNet has no val split: the public code searches its test images.
        has_val = "val" in shards.manifest.splits
        return (select_target_images(shards, config.classes, "val").images if has_val else test), test
    if setup.method.selection != "validation":
        val = val.subset([])
    elif not config.shots:
        # As many as few-shot samples have: a run on all training images has the whole val split.
        val = val.subset(draw_positions([], val.labels, VAL_SHOTS, config.seed)[1])
    return val, val.subset([])


def read_or_encode(run: Run, setup: Setup, stop: StopRequest, meter: Meter, view: View) -> Tensor:
    """Read the stored features [M, E] of images, with their time, or encode and store them; all ranks call this."""
    method, clip, session = setup.method, setup.method.clip, run.session
    assert isinstance(method, FeatureMethod)
    # A tower that the method changes gives features that no other method uses.
    if not len(view.images) or method.image_plan() or not session.features.most_bytes:
        return encode_images(run, setup, stop, view)
    batch = run.config.recipe.test_batch_size
    how = {"transform": view.how, "precision": run.config.precision, "batch": batch}
    how |= {"ranks": session.group.size, "workers": num_decoders(session.runtime.workers, clip.device)}
    key = feature_key(clip, view.images, session.acceleration, **how)
    if stored := session.group.call_on_first(lambda: session.features.read(key)):
        meter.add(stored.seconds, rated=False)
        return stored.features.to(clip.device)
    start = time.perf_counter()
    features = encode_images(run, setup, stop, view)
    # The copy waits for the device.
    encoded = EncodedImages(features.cpu(), {"features": time.perf_counter() - start})
    if session.is_first:
        session.features.write(key, encoded)
    return features


@torch.no_grad()
def encode_images(run: Run, setup: Setup, stop: StopRequest, view: View) -> Tensor:
    """Encode images to features [M, E], float32, on every rank; each rank encodes its share of them."""
    count, loaders, prepare = len(view.images), view.loaders, view.prepare
    method, clip, config, group = setup.method, setup.method.clip, run.config, run.session.group
    assert isinstance(method, FeatureMethod)
    plan = method.image_plan()
    workers = num_decoders(run.session.runtime.workers, clip.device)
    size, batch_size = clip.geometry.image_size, config.recipe.test_batch_size
    width = plan.weights["proj"].shape[1] if "proj" in plan.weights else clip.geometry.embed_dim
    features = torch.zeros(count, width, device=clip.device)
    indices = range(group.rank, count, group.size)
    with closing(loaders(indices)) as images:
        # As many batches on all ranks, of which the last can be empty: after each they agree whether to stop.
        batches = ([*islice(images, batch_size)] for _ in range(0, -(-count // group.size), batch_size))
        for batch, pixels in prepare_batches(batches, prepare, (3, size, size), workers):
            if batch:
                with autocast(config.precision, clip.device):
                    features[[i for i, _ in batch]] = clip.encode_image(pixels.to(clip.device), plan).float()
            if signum := group.exchange_flags(signum=stop.signum).signum:
                group.barrier()
                what = f"stopped {config.path} while it encoded images; it starts over when repeated"
                raise Interrupted(signum, what)
    group.merge_rows(features)
    return features
