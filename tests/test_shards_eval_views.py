"""Views of test images: which ones an image has, and what AugMix makes of them."""

import numpy as np
import torch
from PIL import Image

from shards.eval_views import CHANGES, EvalViews, augmix, random_crop
from shards.rng import generator
from shards.transforms import EvalTransform

PLAIN = EvalTransform(16, (0.5,) * 3, (0.5,) * 3)


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def test_the_plain_view_is_the_first_and_the_others_follow_from_pixels_and_seed_alone():
    views = EvalViews(PLAIN, 6, mixes=True, seed=3)
    one, other = views(picture()), views(picture(1))
    assert one.shape == views.shape == (6, 3, 16, 16)
    assert torch.equal(one[0], PLAIN(picture())) and torch.equal(other, views(picture(1)))
    assert torch.equal(one, views(picture())), "an image between them changes nothing"
    changed = EvalViews(PLAIN, 6, mixes=True, seed=4)(picture())
    assert torch.equal(one[0], changed[0])
    assert all(not torch.equal(a, b) for a, b in zip(one[1:], [*changed[1:-1], other[5]], strict=True))
    more = EvalViews(PLAIN, 9, mixes=True, seed=3)(picture())
    assert torch.equal(more[:6], one), "more views continue the draws"


def test_without_augmix_views_are_the_crops_and_with_it_blends_of_them():
    draws = generator(0, "test")
    crop = random_crop(picture(), 16, draws)
    pixels = np.asarray(crop, np.float32)
    blends = np.stack([augmix(crop, draws) for _ in range(20)])
    assert blends.dtype == np.float32 and blends.min() >= 0 and blends.max() <= 255.01
    assert len({blend.tobytes() for blend in blends}) == 20 and not any((blend == pixels).all() for blend in blends)
    flat = Image.new("RGB", (16, 16), (128, 128, 128))
    # Black corners come from shifts alone, so that the centre of a grey image stays nearly as it is.
    centre = np.stack([augmix(flat, draws)[8, 8] for _ in range(20)])
    assert np.isfinite(centre).all() and np.ptp(centre, axis=1).max() < 1e-3, "channels are changed alike"


def test_changes_are_weak_and_signed():
    image = picture().resize((224, 224))
    assert len(CHANGES) == 9
    for change in CHANGES[-2:]:
        left, right = (np.asarray(change(image, 1.0, sign), np.int64) for sign in (1, -1))
        axis = 1 if change is CHANGES[-2] else 0
        original = np.asarray(image, np.int64)
        assert np.array_equal(np.roll(left, 7, axis).take(range(7, 224), axis), original.take(range(7, 224), axis))
        assert np.array_equal(np.roll(right, -7, axis).take(range(217), axis), original.take(range(217), axis))
