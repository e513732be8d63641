"""Where public code departs from its paper, an option goes the other way; by default nothing changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
from small_runs import seeded
from tiny_geometry import SHORT_OPTIONS

from benchmarks.results.frame import describe_settings, title_variants
from procap.methods import ADDED_OPTIONS, build_method, method_class
from procap.methods.promptsrc import teacher_templates
from procap.teacher import text_bank
from procap.text import LabelSpace
from runner.config import plan_run

IMAGES, LABELS = torch.randn(3, 3, 32, 32, generator=seeded(1)), torch.tensor([0, 3, 1])


@pytest.fixture
def build(short_clip, tiny_space):
    def build(name: str, **options: Any) -> Any:
        needed = {"sentences": "templates"} if name == "coprompt" else {}
        return build_method(name, short_clip, tiny_space, SHORT_OPTIONS.get(name, {}) | needed | options, seeded())

    return build


def terms(method: Any, noise: Any = None) -> dict[str, torch.Tensor]:
    return method.loss(IMAGES, LABELS, method.draw(seeded(2)) if noise is None else noise)


def test_mma_gets_the_true_gradient(build):
    scaled, true = build("mma", scale=0.01), build("mma", scale=0.01, scale_gradient=False)
    for method in (scaled, true):
        terms(method)["ce"].backward()
    for (name, one), other in zip(scaled.named_parameters(), true.parameters(), strict=True):
        largest = other.grad.abs().max()
        assert largest > 0 and (other.grad - 0.01 * one.grad).abs().max() <= 1e-3 * largest, name


def test_promptsrc_divides_the_divergence_by_images(build):
    pairs, images = terms(build("promptsrc")), terms(build("promptsrc", kl_mean="images"))
    assert images["kl"].item() == pytest.approx(5 * pairs["kl"].item(), rel=1e-5)
    assert all(torch.equal(pairs[name], images[name]) for name in ("ce", "text", "image"))


def test_promptsrc_normalises_before_it_averages_the_teacher(build, short_clip, tiny_space):
    first, last = build("promptsrc", teacher_average="normalise-first"), build("promptsrc")
    assert torch.equal(first.teacher(), text_bank(short_clip, tiny_space, teacher_templates()))
    assert not torch.allclose(first.teacher(), last.teacher())


def test_adapters_of_coprompt_end_without_a_relu(build):
    features = torch.randn(3, 48, generator=seeded(1))
    plain, linear = (build("coprompt", adapter_relu=value).image_adapter(features) for value in (True, False))
    assert linear.min() < 0 and torch.equal(linear.relu(), plain)


def test_a_phrase_as_long_as_the_tokens_leaves_no_words_behind_them(build):
    kept, none = (build("maple", **options).prompts.ids.argmax(dim=1) for options in ({}, {"ctx_init": "a photo"}))
    assert torch.equal(kept - none, torch.full_like(kept, 2))


def test_mmrl_classifies_everything_with_the_same_branches(build, tiny_space):
    others = LabelSpace(("boat", "river"), dataset=tiny_space.dataset)
    shifted = replace(tiny_space, dataset="imagenetv2")

    def logits(inference: str, space: LabelSpace | None) -> torch.Tensor:
        return build("mmrl", inference=inference).classifier(space)(IMAGES)

    assert torch.equal(logits("task", None), logits("fused", None))
    assert torch.equal(logits("task", others), logits("class", others))
    assert torch.equal(logits("task", shifted), logits("class", shifted)), "the same classes of another data set"
    assert not torch.allclose(logits("class", None), logits("fused", None))
    assert not torch.allclose(logits("class", others), logits("fused", others))


def test_coprompt_draws_a_sentence_for_each_class(build):
    common, own = build("coprompt"), build("coprompt", sentence_draw="class")
    [number], [numbers] = common.draw(seeded(3)), own.draw(seeded(3))
    assert number.shape == (1,) and numbers.shape == (5,) and len(set(numbers.tolist())) > 1
    same = terms(own, (number.expand(5),))
    assert all(torch.equal(value, same[name]) for name, value in terms(common, (number,)).items())
    assert not torch.equal(terms(own, (numbers,))["text"], same["text"])


def test_tcp_takes_another_reference(build, short_clip, tiny_space):
    template = "a drawing of a {}."
    reference = build("tcp", reference_template=template).prompts.reference
    assert torch.equal(reference, text_bank(short_clip, tiny_space, [template]))


@pytest.mark.parametrize(
    "option, norms", [("final_norms", ("vision.ln_post", "text.ln_final")), ("first_norm", ("vision.ln_pre",))]
)
def test_2sfs_tunes_the_other_norms_too(build, option, norms):
    method = build("2sfs", **{option: True})
    few, many = (dict(one.named_parameters()) for one in (build("2sfs"), method))
    added = {f"{norm}/{part}" for norm in norms for part in ("weight", "bias")}
    assert many.keys() - few.keys() == added
    method.begin_stage(0)
    terms(method)["ce"].backward()
    assert all(many[name].grad.abs().sum() > 0 for name in added)


def test_skipt_draws_the_used_ranks_in_every_step(build):
    method = build("skipt", draw="step")
    image, labels = torch.randn(2, 48, generator=seeded(1)), torch.tensor([0, 0])
    [noise] = method.draw(seeded(3))
    assert noise.shape == (5,) and not build("skipt").draw(seeded(3))
    none, every = (method.chosen_classes(image, labels, (torch.full((5,), one),)) for one in (2.0, -1.0))
    assert none.tolist() != every.tolist() == [0, 1, 2, 3, 4] and 0 in none
    assert terms(method, (noise,))["ce"].isfinite()


CHANGES = {
    "skipt": {"draw": "step"},
    "promptsrc": {"kl_mean": "images", "teacher_average": "normalise-first"},
    "coprompt": {"sentence_draw": "class", "adapter_relu": False},
    "tcp": {"reference_template": "a {}."},
    "mma": {"scale_gradient": False},
    "mmrl": {"inference": "class"},
    "2sfs": {"final_norms": True, "first_norm": True},
}


def test_added_options_leave_the_identity_of_older_runs_alone():
    assert {*ADDED_OPTIONS} - {"procap"} == {*CHANGES}
    for method, change in CHANGES.items():
        plain, changed = (plan_run(method=method, dataset="digits", options=options) for options in ({}, change))
        explicit = {name: method_class(method).Options.model_fields[name].default for name in change}
        assert plan_run(method=method, dataset="digits", options=explicit).hash == plain.hash != changed.hash
        assert not plain.identity()["options"].keys() & change.keys() and change.items() <= changed.options.items()


def test_runs_that_differ_in_an_added_option_have_different_titles():
    for method, change in CHANGES.items():
        configs = [plan_run(method=method, dataset="digits", options=options) for options in ({}, change)]
        rows = pd.DataFrame([{"method": method, "settings": describe_settings(config)} for config in configs])
        assert len(set(title_variants(rows))) == 2
