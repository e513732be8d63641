"""Transforms: CoOp's test transform to the bit, and augmentation that is torchvision's but draws from one stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_runs import seeded
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from shards.transforms import TrainAugment, crop_box, eval_transform, jitter_colours

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BICUBIC = InterpolationMode.BICUBIC


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def coop(size: int) -> T.Compose:
    """The test transform as CoOp writes it."""
    return T.Compose([T.Resize(size, BICUBIC), T.CenterCrop(size), T.ToTensor(), T.Normalize(MEAN, STD)])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([7, 32, 33, 224]))
def test_test_transform_is_that_of_coop_at_any_size(width, height, size):
    image = picture(width, height)
    assert torch.equal(eval_transform(size, MEAN, STD)(image), coop(size)(image))


def test_every_pixel_value_is_normalised_to_the_same_float():
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2))
    for mean, std in ((MEAN, STD), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), ((0.1, 0.2, 0.3), (1 / 3, 1 / 7, 0.9))):
        expected = T.Compose([T.ToTensor(), T.Normalize(mean, std)])(ramp)
        assert torch.equal(eval_transform(16, mean, std)(ramp), expected)


def test_images_are_written_into_the_batch_they_belong_to():
    batch, image = torch.full((3, 3, 16, 16), 9.0), picture(40, 30)
    transform, augment = eval_transform(16, MEAN, STD), TrainAugment(16, MEAN, STD)
    assert transform(image, batch[1]).data_ptr() == batch[1].data_ptr()
    augment(image, seeded(1), batch[2])
    assert torch.equal(batch[1], transform(image)) and torch.equal(batch[2], augment(image, seeded(1)))
    assert (batch[0] == 9).all()


@pytest.mark.parametrize("size", [(64, 48), (20, 200), (200, 20), (8, 8), (1, 1)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.8, 1.0)])
def test_crops_are_those_of_torchvision_for_the_same_draws(size, scale):
    image = picture(*size)
    for seed in range(50):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = T.RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
        assert crop_box(image.width, image.height, scale, seeded(seed)) == expected


def test_the_whole_augmentation_of_coop_is_torchvisions_for_the_same_draws():
    plain = T.Compose(
        [T.RandomResizedCrop(32, (0.08, 1.0), interpolation=BICUBIC), T.RandomHorizontalFlip(), T.ToTensor()]
    )
    augment, image = TrainAugment(32, (0, 0, 0), (1, 1, 1)), picture(70, 53)
    for seed in range(20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = plain(image)
        assert torch.equal(augment(image, seeded(seed)), expected)


def test_colour_jitter_is_torchvisions_for_the_same_draws():
    image = picture(24, 24)
    for seed in range(20):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = T.ColorJitter(0.3, 0.3, 0.3)(image)
        assert np.array_equal(np.asarray(jitter_colours(image, 0.3, seeded(seed))), np.asarray(expected))


def test_rotation_is_torchvisions_for_the_same_angle():
    image, angle = picture(40, 30), seeded(5)
    drawn = torch.empty(1).uniform_(-20, 20, generator=angle).item()
    fill = [round(255 * channel) for channel in MEAN]
    turned = F.rotate(image, drawn, InterpolationMode.BILINEAR, fill=fill)
    expected = TrainAugment(16, MEAN, STD).augment(turned, angle)
    assert np.array_equal(np.asarray(TrainAugment(16, MEAN, STD, rotation=20).augment(image, seeded(5))), expected)


def test_draws_come_from_the_given_stream_alone():
    augment = TrainAugment(32, MEAN, STD, (0.5, 1.0), colour_jitter=0.2, rotation=10)
    image = picture(40, 60)
    state = torch.random.get_rng_state()
    first = augment(image, seeded(3))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(augment(image, seeded(3)), first)
    assert not torch.equal(augment(image, seeded(4)), first)
    torch.random.set_rng_state(state)


def test_half_of_the_images_are_flipped():
    image = Image.fromarray(np.repeat(np.arange(0, 256, 8, dtype=np.uint8)[None, :, None], 32, 0).repeat(3, 2))
    augment = TrainAugment(32, (0, 0, 0), (1, 1, 1), (0.9, 1.0))
    first_rows = [augment(image, seeded(seed))[0, 0] for seed in range(400)]
    assert 160 < sum(bool(row[0] > row[-1]) for row in first_rows) < 240
    still = TrainAugment(32, (0, 0, 0), (1, 1, 1), (0.9, 1.0), flip=False)
    first_rows = [still(image, seeded(seed))[0, 0] for seed in range(50)]
    assert all(row[0] < row[-1] for row in first_rows)
