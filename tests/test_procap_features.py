"""Methods that learn from frozen image features equal their public code; figures in tests/public_code/."""

import copy
import json
from dataclasses import replace

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, LABELS, draws, figures_of, images, near, near_condensed, small_clip, take_steps
from small_runs import perturb, pictures, seeded
from tiny_geometry import SHORT_OPTIONS

from procap import recipe, text
from procap.classifier import unit
from procap.errors import UserError
from procap.methods import METHODS, build_method, method_class
from procap.methods.features import FeatureBank, FeatureMethod
from procap.methods.lppp import step_sizes
from procap.methods.public import public_parameters
from procap.methods.tipadapter import ALPHAS, BETAS, search_values
from runner.engine import Batch, Engine
from runner.planning import plan_run
from shards.catalogue import CATALOGUE

PET, ACTION = "a photo of a {}, a type of pet.", "a photo of a person doing {}."


def encode(pixels):
    with torch.no_grad():
        return small_clip().encode_image(pixels)


def bank_of(*passes, labels, val=None):
    """Make a bank of views [N, E]; val: features and labels of validation images."""
    val_features, val_labels = val or (torch.zeros(0, 512), torch.zeros(0, dtype=torch.int64))
    return FeatureBank(torch.stack(passes, dim=1), labels, val_features, val_labels)


def fitted_tipadapter(name="tipadapter", **options):
    labels = torch.arange(9).repeat_interleave(2)
    passes = [encode(images(18, seed=51 + number)) for number in range(3)]
    method = public_code.build(name, PET, alpha=1.17, beta=1.0, **options)
    method.fit(bank_of(*passes, labels=labels))
    return method, labels


def test_tipadapter_equals_the_public_code():
    figures, (method, _) = figures_of("tipadapter"), fitted_tipadapter()
    near_condensed(method.keys, figures["cache_keys"])
    near(method.classifier()(images()), figures["eval_logits"])
    for (beta, alpha), logits in zip(figures["grid"], figures["grid_logits"], strict=True):
        method.beta.fill_(beta)
        method.alpha.fill_(alpha)
        near(method.classifier()(images()), logits)


def test_training_of_tipadapterf_equals_the_public_code():
    figures, (method, labels) = figures_of("tipadapter"), fitted_tipadapter("tipadapterf")
    published = plan_run(method="tipadapterf", dataset="oxford-pets", classes="all", data=None)
    config = published.model_copy(update={"recipe": published.recipe.model_copy(update={"epochs": 4})})
    engine = Engine(method, config)
    rates = [recipe.step_rate(config.recipe, step, 4) for step in range(4)]
    assert rates == pytest.approx(figures["steps/lr"].tolist())
    batches = [Batch(encode(images(18, seed=141 + step)), labels, ()) for step in range(4)]
    for step, _ in take_steps(engine, batches, figures["steps/lr"], figures["steps/loss"]):
        if not step:
            near_condensed(method.keys.grad, figures["grad/keys"])
    near_condensed(method.keys, figures["final_keys"])
    near(method.classifier()(images()), figures["eval_logits_f"])


def test_tipadapter_chooses_alpha_and_beta_as_the_public_code():
    figures = figures_of("tipadapter")
    cloud = {key.removeprefix("cloud/"): torch.from_numpy(figures[key]) for key in figures.files if "cloud/" in key}
    method = public_code.build("tipadapter", alpha=20, beta_end=12, alpha_end=60)
    method._constants["text"] = cloud["text"]
    labels = torch.arange(9).repeat_interleave(2)
    bank = bank_of(cloud["keys"], labels=labels, val=(cloud["val_features"], cloud["labels"]))
    method.fit(bank)
    method.finish(bank)
    best_beta, best_alpha = figures["cloud/search/best_beta_alpha"]
    correct = figures["cloud/search/correct"]
    i, j = ([*search_values(end, count)].index(pytest.approx(best)) for end, count, best in
            ((12, BETAS, method.beta.item()), (60, ALPHAS, method.alpha.item())))  # fmt: skip
    assert correct[i, j] == correct.max(), "the chosen pair is among the best of the public code"
    assert (method.beta.item(), method.alpha.item()) == pytest.approx((best_beta, best_alpha))


def test_the_public_rule_of_tipadapterf_keeps_the_epoch_and_the_setting_with_the_best_test_accuracy():
    figures = figures_of("tipadapter")
    cloud = {key.removeprefix("cloud/"): torch.from_numpy(figures[key]) for key in figures.files if "cloud/" in key}
    method = public_code.build("tipadapterf", alpha=20, beta_end=12, alpha_end=60, selection="test")
    method._constants["text"] = cloud["text"]
    train_labels = torch.arange(9).repeat_interleave(2)
    val, test = ((cloud[f"{split}_features"], cloud["labels"]) for split in ("val", "test"))
    bank = FeatureBank(cloud["keys"][:, None], train_labels, *val, *test)
    method.bank = bank
    method.fit(bank)
    config = plan_run(method="tipadapterf", dataset="oxford-pets", classes="all", data=None, overrides={"epochs": 4})
    engine = Engine(method, config)
    accuracies = []
    for step, features in enumerate(cloud["train_passes"]):
        engine.set_recipe_rate(0.01 * recipe.step_rate(config.recipe, step, 4) / config.recipe.lr)
        engine.backward(engine.terms(Batch(features, train_labels, ())))
        engine.update()
        accuracies.append(100 * float((method.head(method.space)(test[0]).argmax(1) == test[1]).double().mean()))
        method.end_epoch(step, config.recipe)
    assert accuracies == pytest.approx(figures["cloud/steps/test_accuracy_per_epoch"].tolist(), abs=1e-4)
    kept = method.best_keys.clone()
    method.finish(bank)
    at_start, searched, reported = figures["cloud/steps/final_reported_accuracy"]
    assert torch.equal(method.keys, kept)
    right = method.head(method.space)(test[0]).argmax(1) == test[1]
    assert 100 * float(right.double().mean()) == pytest.approx(reported, abs=1e-4)
    best = figures["cloud/search_f/best_beta_alpha"] if searched > at_start else (1.0, 20.0)
    assert (method.beta.item(), method.alpha.item()) == pytest.approx(tuple(best))


def test_options_of_tipadapter_by_data_set_are_those_of_the_public_code():
    names = {"fgvc": "fgvc-aircraft", "oxford_flowers": "oxford-flowers", "oxford_pets": "oxford-pets",
             "stanford_cars": "stanford-cars"}  # fmt: skip
    for line in figures_of("tipadapter")["rule/options"].tolist():
        fields = dict(part.split("=", 1) for part in line.replace(", ", ",").split(" "))
        dataset = names.get(fields["dataset"], fields["dataset"])
        options = method_class("tipadapterf").task_options("few-shot", 16, dataset)
        beta_end, alpha_end = json.loads(fields["search_scale"])
        assert options == {"alpha": float(fields["init_alpha"]), "beta_end": beta_end, "alpha_end": alpha_end}
        trained = method_class("tipadapterf").recipe("few-shot", 16, dataset)
        assert (trained.epochs, trained.lr) == (int(fields["train_epoch"]), float(fields["lr"]))


def test_new_classes_of_tipadapter_get_no_votes():
    method, _ = fitted_tipadapter()
    space = replace(method.space, classnames=("dog", "a new class"))
    zero_shot = build_method("zeroshot", small_clip(), method.space, {}, torch.Generator())
    logits, plain = method.classifier(space)(images()), zero_shot.classifier(space)(images())
    near(logits[:, 1], plain[:, 1])
    assert (logits[:, 0] > plain[:, 0]).all()


def test_taskres_equals_the_public_code():
    figures, method = figures_of("taskres"), public_code.build("taskres", PET)
    near(method.classifier()(images()), figures["eval_logits_at_start"])
    features = encode(images())
    engine = Engine(method, plan_run(method="taskres", dataset="oxford-pets", classes="all"))
    losses = figures["steps/loss"]
    assert len([*take_steps(engine, [Batch(features, LABELS, ())] * len(losses), 2e-3, losses)]) > 1
    near_condensed(method.residual, figures["final"])
    with torch.no_grad():
        method.residual.copy_(torch.from_numpy(0.2 * draws(13).standard_normal((9, 512), dtype=np.float32)))
    method.residual.grad = None
    loss = method.loss(features, LABELS, ())["ce"]
    loss.backward()
    near(loss.detach(), figures["loss/ce"])
    near_condensed(method.residual.grad, figures["grad/residual"])
    near(method.classifier()(images()), figures["eval_logits"])
    novel = public_code.novel_space(method, figures)
    near(method.classifier(novel)(images()), figures["novel_logits_without_residual"])


def test_clipadapter_equals_the_public_code():
    figures, method = figures_of("clipadapter"), public_code.build("clipadapter", ACTION)
    public_code.load_drawn(method, lambda name, shape: shape[1] ** -0.5)
    public = public_parameters(method)
    assert sum(parameter.numel() for parameter in method.parameters()) == figures["rule/trainable"][0]
    features = encode(images())
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])
    engine = Engine(method, plan_run(method="clipadapter", dataset="ucf101", classes="all"))
    losses = figures["steps/loss"]
    for step, _ in take_steps(engine, [Batch(features, LABELS, ())] * len(losses), 0.002, losses):
        for name, parameter in public.items() if not step else ():
            near_condensed(parameter.grad, figures[f"grad/{name}"])
    for name, parameter in public.items():
        near_condensed(parameter, figures[f"after/{name}"])


def lppp_bank():
    labels = torch.arange(9).repeat_interleave(2)
    train, noise = images(18, seed=71), images(18, seed=72)
    return bank_of(encode(train), labels=labels, val=(encode(train + 1.2 * noise), labels))


def without_val(bank):
    return replace(bank, val_features=bank.val_features[:0], val_labels=bank.val_labels[:0])


def test_lppp_equals_the_public_code():
    figures, bank = figures_of("lppp"), lppp_bank()
    for steps in (1, 10, 20, 300):
        method = public_code.build("lppp", steps=steps)
        method.bias.copy_(torch.from_numpy(figures["param/classifier.bias"]))
        method.fit(without_val(bank))
        near_condensed(method.rows, figures[f"steps/weight_after_{steps}"])
        near(method.bias, figures[f"steps/bias_after_{steps}"])
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.alpha, figures["steps/alpha_last"][0])
    image = unit(bank.features[:, 0])
    lr, lr_alpha = step_sizes(image, image @ method.text(method.space).t())
    assert (lr, lr_alpha) == pytest.approx((float(figures["rule/lr_w"]), float(figures["rule/lr_alpha"])), rel=2e-5)


def test_lppp_keeps_the_step_with_the_highest_validation_accuracy():
    figures, bank = figures_of("lppp"), lppp_bank()
    accuracies = figures["select/val_accuracy"]
    kept = len(accuracies) - 1 - int(np.argmax(accuracies[::-1]))
    assert kept == figures["select/kept_epoch"]
    chosen, stopped = public_code.build("lppp"), public_code.build("lppp", steps=kept + 1)
    for method, seen in ((chosen, bank), (stopped, without_val(bank))):
        method.bias.copy_(torch.from_numpy(figures["param/classifier.bias"]))
        method.fit(seen)
    assert torch.equal(chosen.rows, stopped.rows) and torch.equal(chosen.alpha, stopped.alpha)


@pytest.mark.parametrize("name", ["probe", "ncm", "lppp"])
def test_a_method_without_a_rule_for_new_classes_refuses_them(name):
    method = public_code.build(name)
    method.fit(lppp_bank())
    logits = method.classifier()(images())
    order = tuple(reversed(CLASSNAMES))
    near(method.classifier(replace(method.space, classnames=order))(images()), logits.flip(1))
    with pytest.raises(UserError, match="no rule for classes that it did not learn, such as 'cat'"):
        method.classifier(replace(method.space, classnames=("dog", "cat")))


def test_templates_of_the_catalogue_are_those_of_the_public_code():
    for method in ("taskres", "clipadapter"):
        for dataset, template in public_code.by_dataset(figures_of(method)["rule/templates"]).items():
            assert CATALOGUE[dataset].template == template


def test_prompts_of_a_class_of_imagenet_are_as_many_as_in_the_public_code():
    space = text.LabelSpace(CLASSNAMES, dataset="imagenet")
    for name, count in {"taskres": 8, "tipadapter": 7, "lppp": 7, "clipadapter": 1}.items():
        assert len(build_method(name, small_clip(), space, {}, torch.Generator()).templates(space)) == count


PAIR = ("red circle", "blue square", "red circle", "green ring", "yellow star", "white cross", "black disc")
"""Classes of which two have one name, as two pairs of ImageNet have."""


def swapped(method, name, tensor):
    """A learned tensor with what belongs to the classes 0 and 2 swapped."""
    order = torch.tensor([2, 1, 0, 3, 4, 5, 6])
    if name == "key_labels":
        return order[tensor]
    return tensor[order] if tensor.dim() and len(tensor) == len(PAIR) else tensor


@pytest.mark.parametrize("name", METHODS)
def test_two_classes_of_one_name_keep_what_each_of_them_has_learned(name, short_clip):
    space, options = text.LabelSpace(PAIR), SHORT_OPTIONS.get(name, {})
    method = build_method(name, short_clip, space, options, seeded())
    if isinstance(method, FeatureMethod):
        labels = torch.arange(7).repeat_interleave(2)
        method.fit(bank_of(torch.randn(14, 48, generator=seeded(3)), labels=labels))
    if name == "promptkd":
        # Its teacher computes them when a training begins.
        method.class_features = torch.randn(7, 48, generator=seeded(3))
    perturb(method)
    twin = copy.deepcopy(method)
    tensors = {key: swapped(method, key, tensor) for key, tensor in method.state_dict().items()}
    twin.load_state_dict(tensors)
    with torch.no_grad():
        logits, crossed = (each.classifier()(pictures()) for each in (method, twin))
    torch.testing.assert_close(crossed, logits[:, [2, 1, 0, 3, 4, 5, 6]], atol=1e-5, rtol=1e-5)
    learns_classes = any(not torch.equal(tensors[key], tensor) for key, tensor in method.state_dict().items())
    assert learns_classes == (not torch.allclose(logits[:, 0], logits[:, 2], atol=1e-4))


ON_FEATURES = [name for name in METHODS if issubclass(method_class(name), FeatureMethod)]


@pytest.mark.parametrize("name", [name for name in ON_FEATURES if method_class(name).knows_new_classes])
def test_classes_that_are_new_get_logits_in_every_precision(name, short_clip):
    classes = ("cat", "dog", "fox", "owl")
    method = build_method(name, short_clip, text.LabelSpace(classes), SHORT_OPTIONS.get(name, {}), seeded())
    width = short_clip.visual.proj.shape[0] if name == "prolip" else 48
    method.fit(bank_of(torch.randn(12, width, generator=seeded(3)), labels=torch.arange(4).repeat_interleave(3)))
    space = text.LabelSpace((*classes[:2], "red circle"))
    for precision in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", precision):
            logits = method.classifier(space)(pictures())
        assert logits.dtype == torch.float32 and logits.isfinite().all()


def test_a_name_that_two_classes_share_is_found_in_order_or_counts_as_new(short_clip):
    method = build_method("taskres", short_clip, text.LabelSpace(PAIR), {}, seeded())
    both, single = text.LabelSpace(("green ring", *PAIR[:3])), text.LabelSpace(("red circle", "blue square"))
    assert method.known(both).tolist() == [3, 0, 1, 2]
    with pytest.warns(UserWarning, match="'red circle' is the name of 2 of the classes trained on and 1 of those here"):
        assert method.known(single).tolist() == [-1, 1]
    probe = build_method("probe", short_clip, text.LabelSpace(PAIR), {}, seeded())
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"no rule for classes that .* such as 'red circle'"):
        probe.classifier(single)
