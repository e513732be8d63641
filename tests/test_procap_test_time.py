"""TDA equals its public code, commit e697fb0c; the figures in tests/public_code/ have one view of each image."""

import math

import public_code
import pytest
import torch
from public_code import figures_of, images, near

from procap.methods import method_class
from procap.methods.tda import BLOCK, PUBLIC, TDAOptions, find_exits, public_order, tda_logits
from shards.catalogue import CATALOGUE

SCALE = torch.tensor(100.0)


def tensors(figures, *names):
    return [torch.from_numpy(figures[name]) for name in names]


@pytest.mark.parametrize(("stream", "options"), [
    ("single", {}), ("reversed", {}), ("positive_only", {"negative_alpha": 0.0}), ("negative_only", {"alpha": 0.0}),
])  # fmt: skip
def test_logits_of_a_stream_are_those_of_the_public_code(stream, options):
    figures = figures_of("tda")
    features, text = tensors(figures, "input/images", "input/text")
    features = features.flip(0) if stream == "reversed" else features
    near(tda_logits(features, text, SCALE, TDAOptions(**options)), figures[f"{stream}/final_logits"])


@pytest.mark.parametrize("cache", ["pos", "neg"])
@pytest.mark.parametrize("count", [10, 20, 40, 60])
def test_caches_hold_the_images_of_the_public_code(cache, count):
    figures, options = figures_of("tda"), TDAOptions()
    labels, entropies, shares = tensors(figures, "single/pseudo_label", "single/entropy", "single/share_of_largest")
    admitted, capacity = torch.ones(60, dtype=torch.bool), options.capacity
    if cache == "neg":
        near(entropies / math.log2(9), shares)
        admitted, capacity = (shares > options.lowest_entropy) & (shares < options.highest_entropy), 2
    exits = find_exits(labels, entropies, admitted, capacity)
    held = [image for image in range(count) if exits[image] >= count]
    held.sort(key=lambda image: (int(labels[image]), float(entropies[image])))
    assert held == figures[f"single/cache/{count}/{cache}/image"].tolist()


def test_images_are_classified_as_by_the_public_code():
    figures = figures_of("tda")
    method = public_code.build("tda", dataset="imagenet", templates="ensemble")
    near(method.classifier()(images()), figures["clip/final_logits"])


FIRST_ORDER = [
    44, 43, 12, 18, 38, 32, 45, 29, 40, 16, 10, 17, 47, 4, 22, 30, 7, 24, 48, 20, 36, 49, 21, 27, 35, 2, 13,
    15, 0, 41, 5, 37, 25, 23, 6, 9, 42, 34, 33, 11, 28, 14, 31, 46, 39, 8, 26, 1, 3, 19,
]  # fmt: skip
"""The order of 50 images in the public code's loader, of the first data set of a process."""


def test_the_public_order_is_that_of_the_public_codes_loader():
    assert public_order(50, 1).tolist() == FIRST_ORDER


def test_an_image_depends_on_those_before_it_alone_also_behind_a_block():
    draws = torch.Generator().manual_seed(0)
    features, text = (torch.nn.functional.normalize(torch.randn(n, 8, generator=draws)) for n in (2 * BLOCK + 9, 4))
    whole = tda_logits(features, text, SCALE / 10, TDAOptions())
    for count in (1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 8):
        torch.testing.assert_close(tda_logits(features[:count], text, SCALE / 10, TDAOptions()), whole[:count])


def test_an_image_takes_the_place_of_the_least_certain_one_of_its_class_if_it_is_more_certain():
    entropies, everything = torch.tensor([0.5, 0.3, 0.4, 0.4, 0.1, 0.2]), torch.ones(6, dtype=torch.bool)
    # Two of class 0 fit; image 2 replaces 0; 3, as certain as 2, does not enter; 4 replaces 2. Image 5 is of class 1.
    assert find_exits(torch.tensor([0, 0, 0, 0, 0, 1]), entropies, everything, 2).tolist() == [2, 6, 4, 3, 6, 6]


def test_one_setting_for_all_data_unless_that_of_the_test_images_is_asked_for():
    fixed, public = TDAOptions(), TDAOptions(selection="test")
    assert {(each.alpha, each.beta) for each in map(fixed.for_dataset, CATALOGUE)} == {PUBLIC["imagenet"]}
    assert (public.for_dataset("eurosat").alpha, public.for_dataset("eurosat").beta) == (4.0, 8.0)
    assert public.for_dataset("digits") == public.for_dataset("imagenet")
    assert {*PUBLIC} <= {*CATALOGUE} and method_class("tda").recipe().epochs == 0
