"""TPT equals its public code, commit 63ecbace; the views are inputs, and no draw is compared."""

import numpy as np
import public_code
import pytest
import torch
from public_code import draws, figures_of, near, near_condensed

from procap.classifier import unit
from procap.methods import build_method
from procap.methods.tpt import choose_views, entropies, marginal_entropy
from shards.catalogue import CATALOGUE


@pytest.fixture(scope="module")
def features():
    """The features [1, 64, E] of the views of the first of two images: the scenes are drawn before their noise."""
    source = draws(401)
    scenes, noise = (source.standard_normal((2, n, 3, 32, 32), dtype=np.float32) for n in (1, 64))
    images = torch.from_numpy(scenes + np.float32(1.5) * noise)[:1]
    classifier = public_code.build("tpt").classifier()
    with torch.inference_mode():
        return classifier.encode(images)


@pytest.mark.parametrize("start", ["words", "learned", "novel"])
def test_an_image_is_adapted_to_as_by_the_public_code(start, features):
    figures, method, space = figures_of("tpt"), public_code.build("tpt"), None
    if start == "learned":
        context = draws(402).standard_normal((4, 512), dtype=np.float32) * np.float32(0.1)
        method.context.data = torch.from_numpy(context)
    elif start == "novel":
        space = public_code.novel_space(method, figures)
    theirs = {name: figures[f"{start}/image0/{name}"] for name in (
        "view_logits", "view_entropy", "chosen", "loss", "grad/ctx", "after/ctx", "final_logits",
    )}  # fmt: skip
    classifier, images = method.classifier(space), unit(features.clone())
    contexts = method.context.detach()[None, None].requires_grad_()
    logits = classifier.compare(images, contexts)
    near(logits[0].detach(), theirs["view_logits"])
    near(entropies(logits.log_softmax(dim=2))[0].detach(), theirs["view_entropy"])
    chosen = choose_views(logits, 0.1)
    assert sorted(chosen[0].tolist()) == theirs["chosen"].tolist()
    loss = marginal_entropy(logits.take_along_dim(chosen[:, :, None], 1))
    near(loss.detach(), theirs["loss"])
    near_condensed(torch.autograd.grad(loss.sum(), contexts)[0][0, 0], theirs["grad/ctx"])
    near_condensed(classifier.tune(images)[0, 0], theirs["after/ctx"])
    with torch.inference_mode():
        near(classifier.logits(features), theirs["final_logits"])


def test_views_of_imagenet_and_its_variants_are_crops_alone():
    method, plain = public_code.build("tpt"), {"imagenet", "imagenetv2", "imagenet-sketch", "imagenet-a", "imagenet-r"}
    assert {name for name in CATALOGUE if method.test_views(name) == (64, False)} == plain


def test_an_image_starts_from_the_same_context_whatever_the_images_beside_it(tiny_clip, tiny_space):
    method = build_method("tpt", tiny_clip, tiny_space, {"views": 5, "steps": 2}, torch.Generator().manual_seed(0))
    images = torch.randn(3, 5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    classify, before = method.classifier(), method.context.detach().clone()
    together = classify(images)
    assert together.shape == (3, 5) and torch.equal(method.context, before)
    torch.testing.assert_close(torch.cat([classify(image[None]) for image in images.flip(0)]).flip(0), together)
    assert (together - classify(images.flip(1))).abs().max() > 1e-3, "the first view is the one that is classified"
