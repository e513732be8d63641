"""Inference: computed once, equal to recomputing everything, free of randomness, and open to other class names."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from small_runs import seeded

from procap.methods import build_method
from procap.reference import reference_logits
from procap.text import LabelSpace

CASES: list[tuple[str, dict[str, Any]]] = [
    ("zeroshot", {}),
    ("zeroshot", {"templates": "ensemble"}),
    ("coop", {}),
    ("coop", {"class_position": "middle", "n_ctx": 5, "ctx_init": ""}),
    ("cocoop", {}),
    ("maple", {}),
    ("procap", {}),
    ("procap", {"class_prompt": "template", "deep_tokens": "independent"}),
    (
        "procap",
        {"template_init_combine": "features", "init_templates": "a photo of a {} || a photo of a large {} here"},
    ),
    ("procap", {"cross_attention": False}),
]
OTHERS = LabelSpace(("dog", "permanent_crop_land", "blue square"), "{} texture.", ("a close-up photo of a {} texture",))


def trained(name, clip, space, seed=0, **options):
    """A method away from its start, as after some training."""
    method, noise = build_method(name, clip, space, options, seeded(seed)), seeded(11)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.05)
    return method


def pictures(count=3, seed=1):
    return torch.randn(count, 3, 32, 32, generator=seeded(seed))


def global_states():
    array = numpy.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), array["key"].tolist(), array["pos"]


@pytest.mark.parametrize("name, options", CASES)
@pytest.mark.parametrize("swapped", [False, True], ids=["own names", "other names"])
def test_classifier_equals_recomputing_everything(tiny_clip, tiny_space, name, options, swapped):
    method = trained(name, tiny_clip, tiny_space, **options)
    space = OTHERS if swapped else tiny_space
    logits = method.classifier(space)(pictures())
    assert logits.shape == (3, len(space.classnames)) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(method, pictures(), space), rtol=0, atol=3e-4)


@pytest.mark.parametrize("name, options", CASES)
def test_other_class_names_need_no_retraining(tiny_clip, tiny_space, name, options):
    """The same parameters in a method made for the other names classify alike."""
    method = trained(name, tiny_clip, tiny_space, **options)
    there = build_method(name, tiny_clip, OTHERS, options, seeded(5))
    there.load_state_dict(method.state_dict())
    assert torch.equal(method.classifier(OTHERS)(pictures()), there.classifier()(pictures()))


@pytest.mark.parametrize("name, options", CASES)
def test_inference_draws_no_random_number(tiny_clip, tiny_space, name, options):
    given = seeded(3)
    method = build_method(name, tiny_clip, tiny_space, options, given)
    torch.manual_seed(1)
    states = [given.get_state().tolist(), *global_states()]
    first = method.classifier()(pictures())
    torch.manual_seed(2)
    assert torch.equal(first, method.classifier()(pictures()))
    torch.manual_seed(1)
    method.classifier(OTHERS)(pictures())
    assert states == [given.get_state().tolist(), *global_states()]


@pytest.mark.parametrize("name, options", CASES)
def test_class_text_is_encoded_once_unless_it_depends_on_the_image(tiny_clip, tiny_space, name, options, monkeypatch):
    classifier = trained(name, tiny_clip, tiny_space, **options).classifier()
    calls = []
    encode = type(tiny_clip).encode_text

    def counted(*args, **more):
        calls.append(args)
        return encode(*args, **more)

    monkeypatch.setattr(type(tiny_clip), "encode_text", counted)
    classifier(pictures())
    classifier(pictures())
    assert len(calls) == (2 if name == "cocoop" else 0)


@pytest.mark.parametrize("name, options", CASES)
def test_batches_do_not_change_logits_and_no_gradient_is_recorded(tiny_clip, tiny_space, name, options):
    classifier = trained(name, tiny_clip, tiny_space, **options).classifier()
    images = pictures(5)
    whole = classifier(images)
    assert not whole.requires_grad and classifier.num_classes == 5
    parts = torch.cat([classifier(images[:2]), classifier(images[2:])])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["coop", "cocoop", "maple", "procap"])
def test_a_classifier_is_a_snapshot(tiny_clip, tiny_space, name):
    """Training on after `classifier()` changes the next one, not this one; plain tokens included."""
    options = {"cross_attention": False, "gaussian": False} if name == "procap" else {}
    method = trained(name, tiny_clip, tiny_space, **options)
    classifier = method.classifier()
    before = classifier(pictures())
    with torch.no_grad():
        for parameter in method.parameters():
            parameter += 0.1
    assert torch.equal(classifier(pictures()), before)
    assert not torch.equal(method.classifier()(pictures()), before)


@pytest.mark.parametrize("name, options", CASES)
def test_bfloat16_inference_keeps_logits_in_float32(tiny_clip, tiny_space, name, options):
    method = trained(name, tiny_clip, tiny_space, **options)
    exact = method.classifier()(pictures())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = method.classifier()(pictures())
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, exact, rtol=0, atol=0.5)
