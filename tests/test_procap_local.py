"""GalLoP and PLOT++ equal their public code; figures as in test_procap_public_code."""

from types import SimpleNamespace

import numpy as np
import public_code
import pytest
import torch
import torch.nn.functional as F
from public_code import LABELS, figures_of, images, near, near_condensed, small_clip, take_steps
from small_runs import seeded

from procap import reference
from procap.clip import CLIP
from procap.errors import UsageError
from procap.methods.plotpp import COMMON, SENTENCES, transport_plan
from procap.methods.public import public_parameters
from procap.plan import INPUT, Plan, TokenOp
from procap.towers import OpenClipTower
from runner.engine import Batch, Engine
from runner.planning import plan_run
from runner.step_schedule import StepSchedule
from shards.catalogue import CATALOGUE


def built_gallop(**options):
    method = public_code.build("gallop", topk=(2, 5, 9, 20), **options)
    public_code.load_drawn(method, lambda name, _: 0.01 if "proj" in name else 0.1)
    with torch.no_grad():
        method.local_map.add_(torch.eye(len(method.local_map)))
    return method


def draws_of(figures, name):
    return (torch.from_numpy(figures[name]),)


def near_all(method, figures, prefix, tensor_of):
    for name, parameter in public_parameters(method).items():
        near_condensed(tensor_of(parameter), figures[f"{prefix}/{name}"])


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["", pytest.param("shared_prompts/", marks=pytest.mark.slow)])
def test_gallop_equals_the_public_code(variant, encoders):
    figures, method = figures_of("gallop"), built_gallop(**{"local_prompts": 0} if variant else {})
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    terms = run.loss(images(), LABELS, draws_of(figures, "input/global_index"))
    near(terms["ce"].detach(), figures[f"{variant}loss/global"])
    near(terms["local"].detach(), figures[f"{variant}loss/local"])
    sum(terms.values()).backward()
    near_all(method, figures, f"{variant}grad", lambda parameter: parameter.grad)
    near(run.classifier()(images()), figures[f"{variant}eval_logits"])
    novel = public_code.novel_space(method, figures)
    near(run.classifier(novel)(images()), figures[f"{variant}novel_logits"])
    # Theirs is lower for images of known classes.
    classifier = run.classifier()
    near(-classifier.score(classifier.encode(images())).detach(), figures[f"{variant}ood/gl_mcm"])


def test_gallop_reads_the_patches_and_starts_as_the_public_code():
    figures, method = figures_of("gallop"), built_gallop()
    patches, image = small_clip().encode_patches(images()[:2])
    near_condensed(patches, figures["aux/patch_features_raw"])
    near_condensed(F.normalize(patches @ method.patch_projection(), dim=2), figures["aux/patch_features"])
    near(image, small_clip().encode_image(images()[:2]))
    start = public_code.build("gallop")
    prompts = torch.cat([start.global_prompts, start.local_prompts]).detach()
    assert torch.equal(prompts, prompts[:1].expand(8, -1, -1))
    near_condensed(prompts[0], figures["init/global_prompt_row"])


def test_gallop_trains_as_the_public_code():
    figures, method = figures_of("gallop"), built_gallop()
    config = plan_run(method="gallop", dataset="dtd")
    engine = Engine(method, config)
    batches = [Batch(images(), LABELS, (torch.from_numpy(index),)) for index in figures["steps/global_index"]]
    assert len([*take_steps(engine, batches, 0.002, figures["steps/loss"])]) == 3
    near_all(method, figures, "steps/after_3", lambda parameter: parameter)
    schedule = StepSchedule(config.recipe, SimpleNamespace(steps_per_pass=1), method)
    rates = [schedule.rates(epoch, epoch)[0] for epoch in range(200)]
    np.testing.assert_allclose(rates, figures["rule/lr_per_epoch_200"], rtol=1e-7, atol=1e-12)


def test_patches_leave_out_what_a_plan_inserts_and_need_a_plain_tower():
    clip, width = small_clip(), 768
    tokens = torch.randn(2, width, generator=seeded(1))
    plan = Plan((TokenOp(INPUT, "insert", tokens, 1), TokenOp(2, "insert", tokens, 9), TokenOp(3, "append", tokens)))
    patches, features = clip.encode_patches(images(), plan)
    plain_patches, plain_features = reference.encode_patches(clip, images(), plan)
    assert patches.shape == (5, 16, width)
    near(patches, plain_patches)
    near(features, plain_features)
    with torch.device("meta"):
        other = CLIP(clip.geometry, name="RN50", visual=OpenClipTower(torch.nn.Identity()))
    with pytest.raises(UsageError, match="encode_patches needs a plain ViT as image tower, which RN50 does not have"):
        other.encode_patches(images())


@pytest.mark.parametrize("topk", [(), (0,), (1, 2, 3)])
def test_gallop_needs_a_number_of_patches_for_each_local_prompt(topk):
    with pytest.raises(UsageError, match=r"topk = .*: give one number above 0, or one for each of 4 prompts"):
        public_code.build("gallop", topk=topk)


def built_plotpp(stage=1):
    method = public_code.build("plotpp", dataset="eurosat")
    public_code.load_drawn(method, lambda name, _: 0.1)
    method.begin_stage(stage)
    return method


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [pytest.param("vision", marks=pytest.mark.slow), "joint"])
def test_plotpp_equals_the_public_code(stage, encoders):
    figures, method = figures_of("plotpp"), built_plotpp(stage == "joint")
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    near(run.classifier()(images()), figures[f"{stage}/eval_logits"])
    near(run.classifier()(images()[:1]), figures[f"{stage}/eval_logits_one_by_one"][:1])
    near(run.classifier(public_code.novel_space(method, figures))(images()), figures[f"{stage}/novel_logits"])
    engine = Engine(run, plan_run(method="plotpp", dataset="eurosat"))
    learned = {name.removeprefix("prompt_learner."): tensor for name, tensor in public_parameters(method).items()}
    start = learned["ctx"].detach().clone()
    for step, _ in take_steps(engine, [Batch(images(), LABELS, ())] * 3, 0.002, figures[f"{stage}/steps/loss"]):
        for name, tensor in learned.items() if not step else ():
            if (key := f"{stage}/grad/{name}") in figures:
                near_condensed(tensor.grad, figures[key])
    near_condensed(learned["ctx_vision"], figures[f"{stage}/steps/after_3/ctx_vision"])
    if stage == "joint":
        near_condensed(learned["ctx"], figures["joint/steps/after_3/ctx"])
    else:
        assert torch.equal(learned["ctx"], start)


def test_the_first_stage_of_plotpp_trains_the_visual_prompts_alone():
    figures, method = figures_of("plotpp"), built_plotpp(0)
    [loss] = method.loss(images(), LABELS, ()).values()
    near(loss.detach(), figures["vision/loss/ce"])
    loss.backward()
    near_condensed(method.vision.grad, figures["vision/grad/ctx_vision"])
    assert method.context.grad is None


@pytest.mark.parametrize("drawn", ["easy", "hard"])
def test_a_transport_ends_as_in_the_public_code_and_for_each_image_alone(drawn):
    figures = figures_of("plotpp")
    rows = torch.from_numpy(figures[f"sinkhorn/{drawn}/similarity"])
    near(transport_plan(rows[None])[0], figures[f"sinkhorn/{drawn}/plan"])
    alone = transport_plan(rows[:, None])[:, 0]
    near(alone, figures[f"sinkhorn/{drawn}/plan_row_by_row"])
    # Of twelve images each has the plan that it has among other ones.
    assert torch.equal(alone[3:7], transport_plan(rows[3:7, None])[:, 0])


def test_plotpp_has_the_sentences_and_the_start_of_the_public_code():
    figures, method = figures_of("plotpp"), public_code.build("plotpp", dataset="eurosat")
    assert np.array_equal(method.prompts.ids, figures["token_ids"])
    near_condensed(method.context, figures["init/ctx"])
    sentences = {name.lower().replace("describabletextures", "dtd"): rest for name, rest in (
        (line.split()[0], line.partition("whole=")[2]) for line in figures["rule/what_stays_fixed"].tolist()
    )}  # fmt: skip
    for dataset, whole in sentences.items():
        [known] = [name for name in CATALOGUE if name.replace("-", "") == dataset]
        assert "|".join(f"{sentence} dog ." for sentence in SENTENCES.get(known, COMMON)) == whole
