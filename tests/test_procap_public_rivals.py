"""ProGrad, BPL and DePT equal their public code; figures as in test_procap_public_code."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, LABELS, draws, figures_of, images, near, near_condensed, take_steps
from torch.nn.utils import parameters_to_vector

from procap import reference, text
from procap.errors import UsageError
from procap.methods import aapl, build_method, dpc, method_class
from procap.methods.public import public_parameters
from procap.weights.loading import find_source, load_clip
from runner.engine import Batch, Engine
from runner.planning import plan_run
from runner.step_schedule import StepSchedule
from shards.catalogue import CATALOGUE


def built_prograd():
    method = public_code.build("prograd", "a photo of a person doing {}.", "ucf101", n_ctx=8)
    public_code.load_drawn(method, lambda name, shape: 0.1)
    return method


@pytest.mark.parametrize("labels", ["", "likely/", "conflict/"])
def test_prograd_removes_what_points_against_zero_shot_clip_as_the_public_code(labels):
    figures, method = figures_of("prograd"), built_prograd()
    engine = Engine(method, plan_run(method="prograd", dataset="ucf101"))
    batch = Batch(images(), torch.from_numpy(figures[f"{labels}input/labels"]), ())
    for step, _ in take_steps(engine, [batch] * 3, 0.002, figures[f"{labels}steps/loss"]):
        if step == 0:
            assert engine.objective.names == ("ce", "kl")
            near_condensed(method.context.grad, figures[f"{labels}grad/ctx"])
        if step == 1:
            near_condensed(method.context, figures[f"{labels}steps/after_1"])
    near_condensed(method.context, figures[f"{labels}steps/after_3"])
    assert bool(figures["conflict/rule/projected"]) and not figures["rule/projected"]


def test_prograd_has_the_templates_the_start_and_the_logits_of_the_public_code():
    figures, method = figures_of("prograd"), built_prograd()
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])
    start = public_code.build("prograd", method.space.template, "ucf101", n_ctx=8)
    near_condensed(start.context, figures["rule/init_ctx"])
    for dataset, template in public_code.by_dataset(figures["rule/templates"]).items():
        assert public_code.build("prograd", CATALOGUE[dataset].template, dataset).template == template


def built_bpl():
    method = public_code.build("bpl", samples=3)
    public_code.load_drawn(method, lambda name, _: 0.1 if name.endswith("ctx") else 0.05 if "mean" in name else 0.5)
    with torch.no_grad():
        method.logvar.sub_(1)
    return method


def test_bpl_equals_the_public_code():
    figures, method = figures_of("bpl"), built_bpl()
    noise = {name: torch.from_numpy(figures[f"noise/{name}"]) for name in ("train", "eval", "novel")}
    terms = method.loss(images(), LABELS, (noise["train"],))
    near(terms["ce"].detach(), figures["loss/nll"])
    near(terms["kl"].detach(), figures["loss/kl_weighted"])
    (terms["ce"] + terms["kl"]).backward()
    public = public_parameters(method)
    for name in ("ctx", "mean_posterior", "std_posterior"):
        near_condensed(public[f"prompt_learner.{name}"].grad, figures[f"grad/{name}"])
    for name, space in (("eval", method.space), ("novel", public_code.novel_space(method, figures))):
        method.inference_noise.copy_(noise[name])
        logits = method.classifier(space)(images())
        near(logits, figures[f"{name}_logits"])
        assert logits.exp().sum(dim=1).numpy() == pytest.approx(1, rel=1e-5)


def test_bpl_trains_as_the_public_code():
    figures, method = figures_of("bpl"), built_bpl()
    start = {name: value.detach().clone() for name, value in public_parameters(method).items()}
    engine = Engine(method, plan_run(method="bpl", dataset="dtd"))
    batches = [Batch(images(), LABELS, (torch.from_numpy(noise),)) for noise in figures["steps/noise"]]
    assert len([*take_steps(engine, batches, 0.002, figures["steps/loss"])]) == 3
    for name, value in public_parameters(method).items():
        after = figures[f"steps/after_3/{name.removeprefix('prompt_learner.')}"]
        near_condensed(value, after, like=start[name])


def test_a_reloaded_bpl_predicts_with_the_same_samples():
    first, second = public_code.build("bpl"), public_code.build("bpl")
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.classifier()(images()), second.classifier()(images()))


def built_dept(base):
    def std(name, shape):
        if "linear_probe" in name:
            return 0.1 if name.endswith("bias") else 0.05
        if "film" in name:
            return 0.1 if name.endswith("bias") else 0.2
        return 0.04 if "proj" in name else 0.1

    options = {"n_ctx": 4} if base == "coop" else {"depth": 3}
    method = public_code.build("dept" if base == "coop" else "dept-maple", **options)
    public_code.load_drawn(method, std)
    with torch.no_grad():
        method.image_film.scale.add_(1)
        method.text_film.scale.add_(1)
    return method


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("base", ["coop", "maple"])
def test_dept_equals_the_public_code(base, encoders):
    figures, method = figures_of("dept"), built_dept(base)
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    terms = run.loss(images(), LABELS, ())
    near(terms["ce"].detach(), figures[f"{base}/loss/ce_weighted"])
    near(terms["ce_linear"].detach(), figures[f"{base}/loss/ce_lp_weighted"])
    (terms["ce"] + terms["ce_linear"]).backward()
    for name, tensor in public_parameters(method).items():
        near_condensed(tensor.grad, figures[f"{base}/grad/{name}"])
    near(run.classifier()(images()), figures[f"{base}/eval_logits"])
    near(run.classifier(public_code.novel_space(method, figures))(images()), figures[f"{base}/novel_logits"])


def test_dept_trains_its_head_at_the_rates_of_the_public_code():
    figures, method = figures_of("dept"), built_dept("coop")
    config = plan_run(method="dept", dataset="dtd")
    schedule = StepSchedule(config.recipe, SimpleNamespace(steps_per_pass=1), method)
    rates = [schedule.rates(epoch, epoch) for epoch in range(10)]
    np.testing.assert_allclose(rates, figures["coop/rule/lr_per_epoch"], rtol=1e-9)
    assert method_class("dept").recipe().epochs == 10


@pytest.mark.parametrize("base", ["coop", "maple"])
@pytest.mark.parametrize("most_classes", [1000, 6])
def test_kdpl_equals_the_public_code(base, most_classes, monkeypatch):
    figures, prefix = figures_of("kdpl"), f"{base}/" if most_classes == 1000 else f"{base}/agnostic/"
    names = CLASSNAMES if most_classes == 1000 else tuple(map(str, figures["dictionary"]))
    name, depth = ("kdpl", {}) if base == "coop" else ("kdpl-maple", {"depth": 2})
    method = public_code.build(name, classnames=names, teacher="mini", most_classes=most_classes, **depth)
    public_code.load_maple(method)
    kind = "" if most_classes == 1000 else "agnostic/"
    logits = torch.from_numpy(figures[f"input/{kind}teacher_logits"])
    monkeypatch.setattr(type(method), "teacher_logits", lambda self, images: logits)
    if most_classes == 1000:
        near(method.classifier()(images()), figures[f"{prefix}eval_logits"])
        near(method.classifier(public_code.novel_space(method, figures))(images()), figures[f"{prefix}novel_logits"])
    public = {name.removeprefix("prompt_learner."): tensor for name, tensor in public_parameters(method).items()}
    engine, rate = Engine(method, plan_run(method="kdpl", dataset="dtd")), 0.002 if base == "coop" else 0.0035
    for step, terms in take_steps(engine, [Batch(images(), LABELS, ())] * 3, rate, figures[f"{prefix}steps/loss"]):
        for i, name in enumerate(engine.objective.names if not step else ()):
            near(2 * terms[i], figures[f"{prefix}loss/{name}"])
        for name, tensor in public.items() if not step else ():
            near_condensed(tensor.grad, figures[f"{prefix}grad/{name}"])
    for name, tensor in public.items():
        if (key := f"{prefix}steps/after_3/{name}") in figures:
            near_condensed(tensor, figures[key])


def test_the_teacher_of_kdpl_predicts_at_the_scale_of_the_student():
    mini_clip = load_clip("mini")
    space = text.LabelSpace(("circle", "square"))
    method = build_method("kdpl", mini_clip, space, {"teacher": "mini"}, torch.Generator().manual_seed(0))
    method.prepare_training()
    pixels = torch.randn(2, 3, *[mini_clip.geometry.image_size] * 2, generator=torch.Generator().manual_seed(1))
    zero_shot = build_method("zeroshot", mini_clip, space, {}, torch.Generator())
    near(method.teacher_logits(pixels), zero_shot.classifier()(pixels))
    file = find_source("mini", None).file
    assert method.file_digests(method.options, "") == {"teacher": hashlib.sha256(file.read_bytes()).hexdigest()}
    with pytest.raises(UsageError, match="KDPL needs --option teacher="):
        build_method("kdpl", mini_clip, space, {}, torch.Generator().manual_seed(0)).prepare_training()


def test_a_backbone_is_the_teacher_beside_the_folder_of_a_run_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mini").mkdir()
    Path("mini/config.json").touch()
    cls = method_class("kdpl")
    named = {name: cls.teacher_run(cls.Options(teacher=name)) for name in ("mini", "./mini", str(tmp_path / "mini"))}
    assert named == {"mini": None, "./mini": Path("mini"), str(tmp_path / "mini"): tmp_path / "mini"}


def pool_of_images(images, shots):
    """Training images of which each class has `shots`, one class behind the other, without random views."""
    labels = torch.arange(len(images)) // shots
    return SimpleNamespace(labels=labels, image=lambda i, generator: images[i])


def built_dpc(new_weight=0.0):
    method = public_code.build("dpc", similar=3, new_weight=new_weight)
    tuned = torch.from_numpy(0.1 * draws(13).standard_normal((4, 512), dtype=np.float32))
    public_code.load_public(method, {"tuned_ctx": tuned})
    method.begin_stage(0)
    return method


def test_dpc_equals_the_public_code(monkeypatch):
    figures, method, same_draws = figures_of("dpc"), built_dpc(), random.Random(5)
    monkeypatch.setattr(dpc.random, "Random", lambda seed: same_draws)
    method.training_images = pool_of_images(images(27, seed=20), 3)
    engine = Engine(method, plan_run(method="dpc", dataset="dtd"))
    batches = [Batch(*method.extend_batch(images(), LABELS, torch.Generator()), ()) for _ in range(3)]
    # Theirs has the negatives of an image behind it, ours behind the batch.
    assert sorted(batches[0].labels.tolist()) == sorted(figures["sample/labels"].tolist())
    assert batches[0].labels[5:].tolist() == [i // 3 for i in figures["sample/pool_index"]]
    for step, terms in take_steps(engine, batches, 0.002, figures["steps/loss"]):
        if step == 0:
            near(terms * 2, [figures["loss/ce_image"], figures["loss/ce_text"]])
            near_condensed(method.context.grad, figures["grad/prompt_learner.ctx"])
            assert figures["rule/gradient_factor"] == 1 / method.options.weight
        if step == 1:
            near_condensed(method.context, figures["steps/ctx_after_1"])
    near_condensed(method.context, figures["steps/ctx_after_3"])
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])


def test_dpc_mixes_both_prompts_for_new_classes():
    method, half = built_dpc(), built_dpc(0.5)
    with torch.no_grad():
        half.context.mul_(3)
        method.context.mul_(2)
    other = replace(method.space, dataset="another")
    assert torch.equal(half.classifier(other)(images()), method.classifier()(images()))
    assert not torch.equal(half.classifier()(images()), method.classifier()(images()))


def built_aapl():
    method = public_code.build("aapl")
    public_code.load_drawn(method, lambda name, shape: shape[1] ** -0.5 if name.endswith("weight") else 0.1)
    return method


def test_aapl_equals_the_public_code():
    figures, method = figures_of("aapl"), built_aapl()
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])
    batch = torch.cat([images()[[1, 3]], images(4, seed=53) * 2 - 0.3])[None], LABELS[1:2]
    engine = Engine(method, plan_run(method="aapl", dataset="dtd"))
    engine.set_recipe_rate(0.002)
    for step in range(3):
        terms = engine.terms(Batch(*batch, ()))
        near(terms.detach() / torch.tensor([1, 0.2]), figures["steps/loss"][step])
        engine.backward(terms)
        if not step:
            for name, tensor in public_code.public_parameters(method).items():
                near_condensed(tensor.grad, figures[f"grad/{name}"])
        engine.update()
    # Their stored weights "after three steps" hold a fourth update, on an unknown batch: weights without a gradient
    # have decayed four times. The losses of steps 2 and 3 compare the updates instead.


def test_aapl_draws_an_image_of_another_class_and_two_augmentations_for_both():
    figures, method = figures_of("aapl"), built_aapl()
    assert [*aapl.distortions(32)] == figures["rule/augmentations"].tolist()
    method.training_images = pool_of_images(images(27, seed=20), 3)
    pixels, labels = method.extend_batch(images(), LABELS, torch.Generator().manual_seed(1))
    again, _ = method.extend_batch(images(), LABELS, torch.Generator().manual_seed(1))
    assert torch.equal(pixels, again) and torch.equal(labels, LABELS) and torch.equal(pixels[:, 0], images())
    for six, label in zip(pixels, LABELS, strict=True):
        [second] = [i for i, image in enumerate(images(27, seed=20)) if torch.equal(image, six[1])]
        assert second // 3 != label and len({image.sum().item() for image in six}) > 2
    rotated = aapl.distort(images()[0], 8, torch.Generator())
    assert torch.equal(rotated, images()[0].rot90(1, (1, 2)))


def built_rebapl(seed=13, **options):
    method = public_code.build("rebapl", depth=2, **options)
    public_code.load_maple(method, seed)
    return method


@pytest.mark.parametrize("distance, rows", [("mse", 14), ("mse", 3), ("mmd", 14), ("mmd", 3)])
def test_rebapl_is_repelled_as_by_the_public_code(distance, rows):
    figures, method = figures_of("rebapl"), built_rebapl(distance=distance)
    method._images, method._past = images(5, seed=23), torch.from_numpy(figures["repulsion/past"])
    order = torch.from_numpy(figures["repulsion/order"])[:rows]
    terms = method.loss(images(), LABELS, (order,))
    near(terms["ce"].detach(), figures["loss/ce"])
    case = distance if rows == 14 else f"{distance}_3rows"
    near(terms["repulsion"].detach(), figures[f"repulsion/{case}/potential"])
    terms["repulsion"].backward()
    for name, parameter in public_code.public_parameters(method).items():
        if (key := f"repulsion/{case}/grad/{name}") in figures:
            near_condensed(parameter.grad, figures[key])


@pytest.mark.parametrize("repelled", [False, True])
def test_rebapl_takes_noisy_steps_as_the_public_code(repelled):
    figures, method = figures_of("rebapl"), built_rebapl()
    recipe = plan_run(method="rebapl", dataset="dtd").recipe
    method.training_images = SimpleNamespace(labels=torch.zeros(144))
    method.begin_epoch(2, 0.002, recipe)
    near(method._noise, figures["rule/noise_std"])
    steps, rows = "steps_repulsed" if repelled else "steps", torch.arange(14)
    method._images, method._past = images(5, seed=23), torch.from_numpy(figures["repulsion/past"])
    engine, source = Engine(method, plan_run(method="rebapl", dataset="dtd")), draws(91)
    engine.set_recipe_rate(0.002)
    for step in range(3):
        shapes = [tuple(parameter.shape) for parameter in method.parameters()]
        drawn = [torch.from_numpy(source.standard_normal(shape, dtype=np.float32)).flatten() for shape in shapes]
        noise = (method._noise * torch.cat(drawn), *((rows,) if repelled else ()))
        terms = engine.terms(Batch(images(), LABELS, noise))
        near(terms[0].detach(), figures[f"{steps}/loss"][step])
        engine.backward(terms)
        engine.update()
    for name, parameter in public_code.public_parameters(method).items():
        near_condensed(parameter, figures[f"{steps}/after_3/{name}"])


def test_rebapl_has_the_schedule_and_the_mean_logits_of_the_public_code():
    figures, method = figures_of("rebapl"), built_rebapl()
    recipe = plan_run(method="rebapl", dataset="dtd").recipe
    rates = StepSchedule(recipe, SimpleNamespace(steps_per_pass=1), method)
    np.testing.assert_allclose([rates.rates(e, e)[0] for e in range(15)], figures["schedule/sequential/lr"], rtol=1e-9)
    method.training_images = SimpleNamespace(labels=torch.zeros(144))
    noisy = [e for e in range(15) if method.begin_epoch(e, 0.002, recipe) in (True, False) and method._noise]
    assert noisy == figures["schedule/sequential/noisy_epochs"].tolist()
    samples = [parameters_to_vector(built_rebapl(seed).parameters()) for seed in (13, 14, 16)]
    method.samples = torch.stack(samples).detach()
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])


def test_rebapl_keeps_the_weights_at_the_end_of_each_cycle():
    method, recipe = built_rebapl(), plan_run(method="rebapl", dataset="dtd").recipe
    for epoch in range(15):
        with torch.no_grad():
            method.context.fill_(epoch)
        method.end_epoch(epoch, recipe)
    assert method.samples[:, 0].tolist() == [4, 9, 14]
