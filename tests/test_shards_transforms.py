"""Transforms: CoOp's test transform to the bit, and augmentation that is torchvision's but draws from one stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from shards.transforms import TrainAugment, crop_box, eval_transform, jitter_colours

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BICUBIC = InterpolationMode.BICUBIC


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [(64, 64), (50, 91), (91, 50), (8, 8), (333, 224), (33, 32)])
def test_test_transform_is_that_of_coop(size):
    plain = T.Compose([T.Resize(32, BICUBIC), T.CenterCrop(32), T.ToTensor(), T.Normalize(MEAN, STD)])
    image = picture(*size)
    assert torch.equal(eval_transform(32, MEAN, STD)(image), plain(image))


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


def test_rotation_turns_by_at_most_its_angle_and_fills_with_the_mean_colour():
    grey = Image.new("RGB", (48, 48), (255, 255, 255))
    turned = TrainAugment(48, MEAN, STD, (1.0, 1.0), flip=False, rotation=30)
    corners = [turned.pixels(grey, seeded(seed))[:, 0, 0].tolist() for seed in range(30)]
    assert [round(255 * channel) for channel in MEAN] in corners
    centres = [turned.pixels(grey, seeded(seed))[:, 24, 24].tolist() for seed in range(30)]
    assert centres == [[255, 255, 255]] * 30


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
