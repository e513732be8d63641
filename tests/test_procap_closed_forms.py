"""GDA, SS-Text, CLAP, cross-modal adaptation and ProLIP equal their public code; figures in tests/public_code/."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import public_code
import pytest
import torch
from public_code import draws, figures_of, images, near, near_condensed, small_clip, take_steps
from torch.nn import functional as F

from procap import recipe
from procap.classifier import unit
from procap.methods import crossmodal, method_class
from procap.methods.features import FeatureBank
from procap.methods.gda import ALPHAS, gaussian_logits
from procap.methods.public import load_public_state, public_state
from runner.engine import Batch, Engine
from runner.feature_training import FeatureLoader
from runner.planning import plan_run
from shards.catalogue import CATALOGUE

PET = "a photo of a {}, a type of pet."


def tensors(figures, *names):
    return [torch.from_numpy(figures[name]) for name in names]


def bank_of(views, labels, val=None):
    """Make a bank of features [N, V, E]; val: features and labels of validation images."""
    features, val_labels = val or (views[:0, 0], labels[:0])
    return FeatureBank(views, labels, features, val_labels)


def with_text(name, text, **options):
    """Build a method whose class features, and features of one prompt per class, are `text` [C, E]."""
    method = public_code.build(name, **options)
    method._constants |= {"text": text, "prompts": text[None]}
    return method


def bank_of_gda(figures):
    views, labels, val, val_labels = tensors(
        figures, *(f"input/{name}" for name in ("train_features", "train_labels", "val_features", "val_labels"))
    )
    return bank_of(views.transpose(0, 1), labels, (val, val_labels))


@pytest.mark.parametrize("setting, covariance", [("few", "shared"), ("base", "class")])
def test_gda_equals_the_public_code(setting, covariance):
    figures = figures_of("gda")
    text, test = tensors(figures, "input/text", "input/test_features")
    method, bank = with_text("gda", text, covariance=covariance), bank_of_gda(figures)
    method.fit(bank)
    near_condensed(method.rows, figures[f"{setting}/W"])
    near(method.bias, figures[f"{setting}/b"])
    parts = method.head(method.space).keywords
    for alpha, expected in zip(ALPHAS, figures[f"{setting}/val_accuracy"], strict=True):
        logits = gaussian_logits(bank.val_features, **parts | {"alpha": torch.tensor(alpha)})
        assert 100 * float((logits.argmax(1) == bank.val_labels).double().mean()) == pytest.approx(expected, abs=1e-4)
    method.finish(bank)
    assert method.alpha == pytest.approx(float(figures[f"{setting}/alpha"]))
    near(method.head(method.space)(test), figures[f"{setting}/test_logits"])
    assert figures["rule/alphas"] == pytest.approx(ALPHAS)


def test_gda_estimates_new_classes_as_the_public_code(monkeypatch):
    figures = figures_of("gda")
    text, new_text, test = tensors(figures, "input/text", "input/new_text", "input/new_test_features")
    method, bank = with_text("gda", text, covariance="class"), bank_of_gda(figures)
    method.fit(bank)
    method.finish(bank)
    rows, bias = method.estimate_new(new_text)
    near_condensed(rows, figures["new/W"])
    near(bias, figures["new/b"])
    monkeypatch.setattr(type(method), "text", lambda self, space: new_text)
    new = replace(method.space, classnames=tuple("abcde"))
    near(method.head(new)(test), figures["new/test_logits"])


def test_gda_has_the_estimator_of_the_public_code_for_each_task():
    options = {task: method_class("gda").task_options(task) for task in ("base-to-novel", "few-shot", "cross-dataset")}
    assert options == {"base-to-novel": {"covariance": "class"}, "few-shot": {}, "cross-dataset": {}}


@pytest.mark.parametrize("name, options", {
    "sstext": {"weighting": "equal", "repel": False}, "sstext_plus": {}, "per_class": {"repel": False},
    "repel_equal": {"weighting": "equal"},
}.items())  # fmt: skip
def test_sstext_equals_the_public_code(name, options):
    figures = figures_of("sstext")
    features, labels, text, test = tensors(
        figures, *(f"input/{part}" for part in ("features", "labels", "text", "test_features"))
    )
    method = with_text("sstext", text, **options)
    method.fit(bank_of(features[:, None], labels))
    near_condensed(method.rows, figures[f"{name}/weights"])
    near(method.head(method.space)(test), figures[f"{name}/eval_logits"])


def test_sstext_keeps_the_class_feature_of_a_class_without_images():
    text = torch.from_numpy(draws(5).standard_normal((9, 512), dtype=np.float32))
    method = with_text("sstext", text, repel=False)
    labels = torch.tensor([0, 0, 1])
    method.fit(bank_of(torch.ones(3, 1, 512), labels))
    assert torch.equal(method.rows[2:], text[2:])
    # By hand: class 0 has 2 of 3 images, so two thirds of the scaled sum of its features.
    near(method.rows[0], text[0] + 2 / 3 * 100 * 2)


def test_clap_equals_the_public_code():
    figures, method = figures_of("clap"), public_code.build("clap", PET, "oxford-pets")
    features = small_clip().encode_image(images(18, seed=501))
    near(method.classifier()(images()), figures["clip/eval_logits_at_start"])
    near(method.classifier(novel_space(method))(images()), figures["clip/novel_logits_of_untrained_weights"])
    labels = torch.arange(9).repeat_interleave(2)
    method.fit(bank_of(features[:, None], labels))
    near(method.multipliers, figures["clip/multipliers"])
    with torch.no_grad():
        method.rows.add_(0.4 * torch.from_numpy(draws(501).standard_normal((9, 512), dtype=np.float32)))
    terms = method.loss(features, labels, ())
    near(terms["ce"].detach(), figures["clip/loss/ce"])
    near(terms["constraint"].detach(), figures["clip/loss/constraint"])
    sum(terms.values()).backward()
    near_condensed(method.rows.grad, figures["clip/grad/prototypes"])
    near(method.classifier()(images()), figures["clip/eval_logits"])


def novel_space(method):
    return replace(method.space, classnames=tuple(map(str, figures_of("crossmodal")["images/aux/novel_classnames"])))


@pytest.mark.parametrize("constraint", [True, False])
def test_clap_trains_as_the_public_code(constraint):
    figures, prefix = figures_of("clap"), "cloud/" if constraint else "cloud/unconstrained/"
    text, features, labels, test, rows = tensors(
        figures,
        *(f"cloud/{name}" for name in ("base_text_features", "train_features", "train_labels", "test_features")),
        "cloud/steps/rows",
    )
    method = with_text("clap", text, constraint=constraint)
    with torch.no_grad():
        method.rows.copy_(text)
    method.fit(bank_of(features[:, None], labels))
    near(method.multipliers, figures["cloud/multipliers"])
    engine = Engine(method, plan_run(method="clap", dataset="oxford-pets", classes="all"))
    batches, losses = [Batch(features[i], labels[i], ()) for i in rows], "steps/loss" if constraint else "loss"
    steps, start = take_steps(engine, batches, figures["cloud/steps/lr"], figures[f"{prefix}{losses}"]), text.clone()
    for step, _ in steps:
        if constraint and step < 2:
            near_condensed(method.rows.grad, figures[f"cloud/grad_{step + 1}"])
        if constraint and step in (1, 5):
            near_condensed(method.rows, figures[f"cloud/steps/after_{step}"])
    assert not torch.equal(method.rows, start)
    near_condensed(method.rows, figures[f"{prefix}{'steps/' * constraint}after_last"])
    near(method.head(method.space)(test).detach(), figures[f"{prefix}eval_logits"])


def test_recipe_and_templates_of_clap_are_those_of_the_public_code():
    figures, published = figures_of("clap"), method_class("clap").recipe("few-shot", 16, "imagenet")
    rates = [recipe.epoch_rate(published, epoch) for epoch in range(300)]
    np.testing.assert_allclose(rates, figures["rule/lr_300_epochs"], rtol=1e-9)
    lines = np.array([line.replace(": ", "=", 1) for line in figures["rule/templates"].tolist()])
    for dataset, template in public_code.by_dataset(lines[:11]).items():
        assert CATALOGUE[dataset].template == template


class Samples:
    """Training images of which only the labels are read."""

    def __init__(self, labels):
        self.labels, self.rows = np.asarray(labels), {"size": np.ones(len(labels), np.int64)}

    def __len__(self):
        return len(self.labels)


def test_batches_of_clap_have_any_views_of_any_images():
    labels, seed = [0, 0, 1, 1, 2, 2], 3
    # Feature v + 10 i belongs to view v of image i.
    views = torch.arange(4) + 10 * torch.arange(6)[:, None]
    config = plan_run(method="clap", dataset="dtd", seed=seed, overrides={"batch_size": 16})
    loader = FeatureLoader(
        bank_of(views[..., None].float(), torch.tensor(labels)), Samples(labels), config, None, pooled=True
    )
    [(first, first_labels)], [(second, _)] = ([*loader.batches(epoch)] for epoch in (0, 1))
    assert len(first) == 16 and len({*first[:, 0].tolist()}) == 16 and not torch.equal(first, second)
    assert first_labels.tolist() == [labels[int(value // 10)] for value in first[:, 0]]
    assert torch.equal(first, next(loader.batches(0))[0])


def test_a_checkpoint_of_claps_public_code_is_read():
    method, twin = public_code.build("clap"), public_code.build("clap")
    with torch.no_grad():
        method.rows.mul_(2)
    extra = {"base_text_features": torch.zeros(9, 512), "logit_scale": torch.zeros(())}
    assert [*public_state(method)] == ["prototypes"]
    load_public_state(twin, public_state(method) | extra)
    assert torch.equal(twin.rows, method.rows)


@pytest.fixture
def short_search(monkeypatch):
    """The single setting of the figures of cross-modal adaptation, and their batches; returns samples and batches."""
    figures = figures_of("crossmodal")
    parts = {name: torch.from_numpy(figures[f"input/{name}"]) for name in (
        "image_features", "image_labels", "image_rows", "text_features", "text_labels", "text_rows", "val_features",
        "val_labels", "test_features",
    )}  # fmt: skip
    for name, value in {"GRID": ((3e-3, 0.01),), "VALIDATE_EVERY": 10, "BATCHES": (8,)}.items():
        monkeypatch.setattr(crossmodal, name, value)
    image_rows, text_rows = parts["image_rows"], len(parts["image_features"]) + parts["text_rows"]

    def batches(counts, *_):
        sources = [image_rows, text_rows][: len(counts)]
        return [torch.cat([rows[step % len(rows)] for rows in sources]) for step in range(70)]

    monkeypatch.setattr(crossmodal, "draw_batches", batches)
    return figures, parts, batches


def fitted_crossmodal(parts, **options):
    method = public_code.build("crossmodal", iterations=70, **options)
    # The figures have the prompts class by class.
    method._constants["prompts"] = parts["text_features"].unflatten(0, (9, 7)).transpose(0, 1)
    image, labels = parts["image_features"][:, None], parts["image_labels"]
    method.fit(bank_of(image, labels, (parts["val_features"], parts["val_labels"])))
    return method


@pytest.mark.parametrize("run", ["zeroshot", "random", "unimodal"])
def test_crossmodal_chooses_the_step_of_the_public_code(run, short_search, monkeypatch):
    figures, parts, _ = short_search
    start = torch.from_numpy(figures["input/random_start" if run == "random" else "zeroshot_weights"])
    with monkeypatch.context() as patched:
        if run == "random":
            patched.setattr(crossmodal.CrossModal, "text", lambda self, space: start)
        method = fitted_crossmodal(parts, texts=run != "unimodal")
    near_condensed(method.rows, figures[f"{run}/select/kept_weight"])
    near(method.head(method.space)(parts["test_features"]), figures[f"{run}/eval_logits"])
    if run == "zeroshot":
        near(method.text(method.space), start)
        averaged = fitted_crossmodal(parts, wise=True)
        near(averaged.head(method.space)(parts["test_features"]), figures["zeroshot/eval_logits_wiseft"])


@pytest.mark.parametrize("run", ["zeroshot", "random", "unimodal"])
def test_crossmodal_trains_as_the_public_code(run, short_search):
    figures, parts, batches = short_search
    before = torch.from_numpy(figures["input/random_start" if run == "random" else "zeroshot_weights"])
    samples = torch.cat([unit(parts["image_features"]), unit(parts["text_features"])])
    labels = torch.cat([parts["image_labels"], parts["text_labels"]])
    taken = [(samples[rows], labels[rows]) for rows in batches([0] if run == "unimodal" else [0, 0])]
    scale, after = 100.0, {0: "1", 9: "10", 69: "last"}
    for step, heads in enumerate(crossmodal.train_heads(before, taken, crossmodal.GRID, scale, 70)):
        features, targets = taken[step]
        # A small loss is a difference of numbers as large as the logits.
        near(F.cross_entropy(scale * features @ before.t(), targets), figures[f"{run}/steps/loss"][step], largest=1)
        if step in after:
            near_condensed(heads[0], figures[f"{run}/steps/after_{after[step]}"])
        before = heads[0].clone()
        rate = 3e-3 * crossmodal.rate_factor(step, 3e-3, 70)
        assert rate == pytest.approx(float(figures[f"{run}/steps/lr"][step]))


def test_crossmodal_learns_from_mirror_images_and_prompts_as_the_public_code():
    figures = figures_of("crossmodal")
    method = public_code.build("crossmodal", dataset="imagenet")
    pixels, labels = images(18, seed=51), torch.arange(9).repeat_interleave(2)
    # As by the feature bank: each image, and its mirror image behind it.
    views = torch.stack([small_clip().encode_image(pixels), small_clip().encode_image(pixels.flip(-1))], dim=1)
    near(
        crossmodal.linear_logits(small_clip().encode_image(images()), method.text(method.space), method.scale()),
        figures["images/zeroshot_logits"],
    )
    near(method.classifier(novel_space(method))(images()), figures["images/novel_zeroshot_logits"])
    prompts = unit(method.prompt_features(method.space)).transpose(0, 1).flatten(0, 1)
    samples = [unit(views.transpose(0, 1)).flatten(0, 1), prompts]
    targets = [labels.repeat(2), torch.arange(9).repeat_interleave(7)]
    for run in ("linear", "uni"):
        rows = [torch.from_numpy(figures[f"images/{run}/input/image_rows"])]
        rows += [torch.from_numpy(figures["images/linear/input/text_rows"])] if run == "linear" else []
        batches = [
            tuple(
                torch.cat([part[row[step]] for part, row in zip(parts, rows, strict=False)])
                for parts in (samples, targets)
            )
            for step in range(3)
        ]
        start = method.text(method.space)
        [*_, heads] = crossmodal.train_heads(start, batches, [(1e-3, 0.01)], 100.0, 12_800)
        features = small_clip().encode_image(images())
        near(crossmodal.linear_logits(features, heads[0], method.scale()), figures[f"images/{run}/eval_logits"])
        averaged = crossmodal.linear_logits(features, (heads[0] + start) / 2, method.scale())
        near(averaged, figures[f"images/{run}/eval_logits_wise_ft"])


def test_crossmodal_leaves_out_the_batch_sizes_of_the_public_code():
    for line in figures_of("crossmodal")["images/rule/valid_batch_sizes"].tolist():
        texts, count, kind, valid = re.match(r"texts=(\d+) images=(\d+) (\w+) valid=(.*)", line).groups()
        counts = [int(count), int(texts)] if kind == "cross_modal" else [int(count)]
        if valid != "fails":
            assert [sum(parts) for parts in crossmodal.batch_parts(counts)] == json.loads(valid)
        else:
            assert crossmodal.batch_parts(counts) == [(5,)]


def test_batches_of_crossmodal_take_each_row_once_in_a_pass():
    rows = [*crossmodal.draw_batches([7, 4], (3, 2), 4, torch.Generator().manual_seed(1))]
    for first, second in pairwise(rows):
        assert {*first.tolist()} <= {*range(11)} and (first[:3] < 7).all() and (first[3:] >= 7).all()
        assert second.numel() == 5
    # Two batches are a pass over either source, of whose seven rows one is left out.
    assert len({*torch.cat(rows[:2]).tolist()}) == len({*torch.cat(rows[2:]).tolist()}) == 10


def prolip_steps(method, views, labels, figures, prefix=""):
    """Take the steps of the figures, whose losses and distances are compared."""
    method.fit(bank_of(views, labels))
    engine = Engine(method, plan_run(method="prolip", dataset="oxford-pets", classes="all"))
    terms = np.stack([figures[f"{prefix}steps/ce"], 0.5 * figures[f"{prefix}steps/squared_distance"]], axis=1)
    batches = [Batch(views[:, view], labels, ()) for view in figures[f"{prefix}steps/view"]]
    return take_steps(engine, batches, figures[f"{prefix}steps/lr"], terms)


def test_prolip_equals_the_public_code(monkeypatch):
    figures = figures_of("prolip")
    views, labels, text, new_text, test, new_test = tensors(
        figures, *(f"input/{name}" for name in ("views", "labels", "text", "new_text", "test", "new_test"))
    )
    method, start = with_text("prolip", text), small_clip().visual.proj.clone()
    near(method.head(method.space)(test).detach(), figures["eval_logits_at_start"])
    for step, _ in prolip_steps(method, views.transpose(0, 1), labels, figures):
        if step in (0, 9):
            near_condensed(method.projection.grad, figures[f"{'last_' * bool(step)}grad/proj"])
        if step in (1, 2):
            # A step changes weights of 0.04 by 1e-5: float32 holds the change to 4e-9 alone.
            near_condensed(method.projection - start, figures[f"steps/change_after_{step}"], 1e-3)
    near(method.head(method.space)(test).detach(), figures["eval_logits"])
    assert method.penalty == figures["rule/lambda"] and torch.equal(small_clip().visual.proj, start)
    monkeypatch.setattr(type(method), "text", lambda self, space: new_text)
    near(method.head(replace(method.space, classnames=tuple("abcde")))(new_test).detach(), figures["novel_logits"])


def test_prolip_classifies_images_as_the_public_code():
    figures, method = figures_of("prolip"), public_code.build("prolip", PET)
    views = torch.stack(
        [small_clip().encode_image(images(18, seed=51 + view), method.image_plan()) for view in range(3)]
    )
    near_condensed(views, figures["images/before_projection"])
    near(method.classifier()(images()), figures["images/zeroshot_logits"])
    assert (
        len([*prolip_steps(method, views.transpose(0, 1), torch.arange(9).repeat_interleave(2), figures, "images/")])
        == 4
    )
    near(method.classifier()(images()), figures["images/eval_logits"])
    near(method.classifier(novel_space(method))(images()), figures["images/novel_logits"])


def test_recipe_of_prolip_has_the_rates_of_the_public_code():
    published = method_class("prolip").recipe("few-shot", 16, "dtd").model_copy(update={"epochs": 10})
    assert [recipe.step_rate(published, step, 10) for step in range(10)] == pytest.approx(
        figures_of("prolip")["steps/lr"].tolist()
    )
