"""Generated images of different classes differ."""

import numpy as np
import pytest

from shards import catalogue
from shards.world.generate import CLASSNAMES as FAMILIES
from shards.world.generate import Style, paint, sample_seed
from tools.train_mini.teacher import FAMILY_NAMES, caption, draw_pool

STYLES: tuple[Style, ...] = ("own", "plain")


def _some(family: str, count: int, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % len(FAMILIES[family])
    return labels, np.array([sample_seed(family, split, k) for k in range(count)], np.int64)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_does_not_depend_on_its_batch(family, style):
    labels, seeds = _some(family, 2 * len(FAMILIES[family]) + 3)
    together = paint(family, labels, seeds, style)[0]
    order = np.random.default_rng(0).permutation(len(labels))
    shuffled = paint(family, labels[order], seeds[order], style)[0]
    alone = paint(family, labels[5:6], seeds[5:6], style)[0]
    assert np.array_equal(together[order], shuffled) and np.array_equal(together[5], alone[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_gives_a_picture_with_something_in_it(family):
    classes = len(FAMILIES[family])
    for style in STYLES:
        pictures = paint(family, np.arange(classes), np.arange(classes), style)[0]
        assert pictures.shape == (classes, 64, 64, 3) and pictures.dtype == np.uint8
        assert (pictures.std(axis=(1, 2)).max(axis=-1) > 4).all()


def test_no_two_splits_or_families_share_a_seed():
    splits = [(family, *one) for family in FAMILIES for one in catalogue.CATALOGUE[family].counts.items()]
    images = [(family, split, index) for family, split, count in splits for index in range(count)]
    seeds = [sample_seed(*image) for image in images]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63


def test_mini_is_trained_on_pictures_of_other_seeds():
    first, second = (draw_pool(2, "train", "plain", seed, with_captions=False) for seed in (1, 2))
    assert len(first) == 2 * len(FAMILY_NAMES) and not np.array_equal(first.images, second.images)


def test_seeds_and_pixels_stay_what_they_were():
    """Packed data sets and the shipped weights were made from these very numbers."""
    assert sample_seed("shapes", "train", 0) == 2921336399285272978
    picture = paint("shapes", np.array([0]), np.array([sample_seed("shapes", "train", 0)]), "plain")[0][0]
    corners = picture[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.abs(corners.astype(int) - np.array([10, 12, 12])).max() <= 1


def test_the_shifted_sets_keep_the_classes_of_their_source_and_are_for_testing_only():
    shifted = [about for name, about in catalogue.CATALOGUE.items() if name.startswith("shapes-")]
    assert len(shifted) == 4
    for about in shifted:
        assert about.classnames == catalogue.CATALOGUE["shapes"].classnames and about.test_only


def test_a_caption_tells_the_colours_that_are_in_the_picture():
    """The caption's background is the plain picture's corner."""
    greens = [seed for seed in range(200) if caption("shapes", 0, seed).endswith("green background.")]
    pictures = paint("shapes", np.zeros(len(greens), int), np.array(greens), "plain")[0]
    corner = pictures[:, 0, 0].astype(int)
    assert len(greens) > 4 and (corner[:, 1] > corner[:, 0] + 40).all()
