"""Methods equal their public code in logits, loss terms and gradients, on figures measured there in float32."""

import json
import random
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, FIGURES, HEAD, LABELS, condense, draws, images, small_clip, walk
from tiny_geometry import SHORT_OPTIONS

from procap import recipe, reference, teacher, text
from procap.methods import build_method
from procap.methods.public import public_names
from procap.methods.skipt import SkipT, SkipTOptions, keep_odds
from runner.engine import Batch, Engine
from runner.epoch_average import EpochAverage
from runner.planning import plan_run
from shards.catalogue import CATALOGUE
from shards.loader import one_class_order

TOLERANCE = 2e-5
"""Largest difference, relative to the largest element of the array."""

DOCUMENTED = {
    row[0].strip("` "): float(row[3])
    for line in (Path(__file__).parents[1] / "docs/methods.md").read_text(encoding="utf-8").splitlines()
    if len(row := line.strip("|").split("|")) == 5 and re.fullmatch(r"\s*\d\.\de-\d\d?\s*", row[3])
}
"""Differences by method, as the table of docs/methods.md states them."""


@dataclass(frozen=True)
class Case:
    """A method as it was measured: its options, its data set, its loss terms, and the size of its parameters."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    template: str = "a photo of a {}."
    terms: dict[str, str] = field(default_factory=lambda: {"ce": "ce"})
    noise: tuple[int, ...] = ()

    def std(self, name: str) -> float:
        if self.method == "tcp":
            return 0.1 if name.endswith(("ctx", "linear1.weight")) else 0.05
        if self.method == "mma":
            return 0.05 if name.endswith("bias") or ".down." in name else 0.1
        if self.method == "coprompt":
            return 0.05 if "adapter" in name else 0.04 if "proj" in name else 0.1
        if self.method == "mmrlpp":
            return 64**-0.5 if name.endswith("weight") else 0.05 if name.endswith(("A", "B")) else 0.1
        return 768**-0.5 if name.endswith("proj_rep") else 0.1


CASES = (
    Case("maple", {"depth": 3}),
    Case("ivlp", {"depth": 4, "vision_depth": 4}),
    Case("kgcoop", {}, "eurosat", "a centered satellite photo of {}.", terms={"ce": "ce", "kg": "kg_weighted"}),
    Case("promptsrc", {"depth": 3, "vision_depth": 3},
         terms={"ce": "ce", "text": "text_weighted", "image": "image_weighted", "kl": "kl"}),
    Case("coprompt", {"depth": 3, "n_ctx": 2, "weight": 8.0},
         terms={"ce": "ce", "text": "text_weighted", "image": "image_weighted"}, noise=(1,)),
    Case("tcp", {}, "oxford-pets", "a photo of a {}, a type of pet.", terms={"ce": "ce", "kg": "kg_weighted"}),
    Case("mma", {"first_block": 1}),
    Case("mmrl", {"first_block": 2, "width": 64}, "caltech101",
         terms={"ce": "ce_class_weighted", "ce_rep": "ce_rep_weighted", "reg_image": "reg_image_weighted",
                "reg_text": "reg_text_weighted"}),
    Case("mmrlpp", {"first_block": 1, "width": 64, "projection_rank": 16, "reg_weight": 3.0}, "ucf101",
         "a photo of a person doing {}.",
         terms={"ce": "ce_class_weighted", "ce_rep": "ce_rep_weighted", "reg_image": "reg_image_weighted",
                "reg_text": "reg_text_weighted"}),
)  # fmt: skip


def built(case, folder, figures):
    """Build the method with the parameters that were measured; sentences are written to a file in `folder`."""
    options = case.options
    if "sentences" in figures.files:
        file = folder / "sentences.json"
        names = [name.replace("_", " ") for name in CLASSNAMES]
        file.write_text(json.dumps(dict(zip(names, figures["sentences"].tolist(), strict=True))))
        options = {**options, "sentences": str(file)}
    # A prompt of TCP enters block 8.
    clip = small_clip(10) if case.method == "tcp" else None
    method = public_code.build(case.method, case.template, case.dataset, clip=clip, **options)
    if case.method == "maple":
        public_code.load_maple(method)
    else:
        public_code.load_drawn(method, lambda name, shape: case.std(name))
    return method


def built_2sfs():
    method = public_code.build("2sfs")
    shapes = public_code.shapes_of(method)
    shapes.pop("classifier")
    values = {name: value + name.endswith("weight") for name, value in walk(shapes, lambda name: 0.1).items()}
    values["classifier"] = 0.05 * torch.from_numpy(draws(14).standard_normal((9, 512), dtype=np.float32))
    public_code.load_public(method, values)
    return method


def check_gradients(name, method, figures):
    """Compare every gradient with the figures; returns the public names of the tensors that have one."""
    parameters = dict(method.named_parameters())
    gradients = {theirs: parameters[ours].grad for ours, theirs in public_names(method).items()}
    measured = {key.removeprefix("grad/"): figures[key] for key in figures.files if key.startswith("grad/")}
    assert measured.keys() <= gradients.keys()
    compared = sorted(theirs for theirs in measured if gradients[theirs] is not None)
    for theirs in compared:
        gradient, found = gradients[theirs], condense(gradients[theirs].numpy())
        assert_near(name, "gradients", found[:HEAD], measured[theirs][:HEAD], float(gradient.abs().max()))
        assert_near(name, "gradients", found[-1:], measured[theirs][-1:])
    return compared


def assert_near(method: str, column: str, ours: Any, theirs: Any, largest: float | None = None) -> None:
    """Compare with the tolerance, and with what the table states: other processors may round ten times as coarsely.

    largest: the largest element of the whole array, if only a part of it is compared.
    """
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    difference = float(np.abs(ours - theirs).max() / (largest or np.abs(theirs).max()))
    stated = DOCUMENTED[method]
    assert difference < min(TOLERANCE, max(10 * stated, 1e-6)), f"{column} of {method} differ by {difference:.1e}"


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_logits_losses_and_gradients_equal_the_public_code(case, encoders, tmp_path):
    figures = np.load(FIGURES / f"{case.method}.npz")
    method = built(case, tmp_path, figures)
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    shown = torch.stack([images(), images(seed=12)], dim=1) if method.views == 2 else images()
    terms = run.loss(shown, LABELS, tuple(torch.tensor([value]) for value in case.noise))
    total = torch.stack(list(terms.values())).sum()
    assert_near(case.method, "loss", total.detach(), figures["loss/total"])
    for ours, theirs in case.terms.items():
        assert_near(case.method, "loss", terms[ours].detach(), figures[f"loss/{theirs}"])
    total.backward()
    assert len(check_gradients(case.method, method, figures)) == sum(key.startswith("grad/") for key in figures.files)
    assert_near(case.method, "logits", run.classifier()(images()), figures["eval_logits"])
    if "novel_logits" in figures.files:
        novel = public_code.novel_space(method, figures)
        assert_near(case.method, "logits", run.classifier(novel)(images()), figures["novel_logits"])


@pytest.mark.parametrize(("name", "beta"), [("other_beta", 0.6), ("beta_one", 1.0)])
def test_beta_of_mmrlpp_counts_in_inference_as_in_the_public_code(name, beta, tmp_path):
    figures, case = np.load(FIGURES / "mmrlpp.npz"), CASES[-1]
    method = built(replace(case, options={**case.options, "fresh": beta}), tmp_path, figures)
    novel = public_code.novel_space(method, figures)
    assert_near("mmrlpp", "logits", method.classifier(novel)(images()), figures[f"{name}/novel_logits"])


@pytest.mark.parametrize("stage", [0, 1])
def test_both_stages_of_2sfs_equal_the_public_code(stage):
    figures = np.load(FIGURES / "2sfs.npz")
    method = built_2sfs()
    rows = method.rows.detach().clone()
    method.begin_stage(stage)
    at_start = figures["stage2/eval_logits_at_init" if stage else "train_logits"]
    assert_near("2sfs", "logits", method.classifier()(images()), at_start)
    with torch.no_grad():
        method.rows.copy_(rows)
    loss = method.loss(images(), LABELS, ())["ce"]
    loss.backward()
    assert_near("2sfs", "loss", loss.detach(), figures["stage2/loss/total" if stage else "loss/total"])
    trained = ["classifier"] if stage else sorted(figures["rule/stage1_trainable"])
    assert check_gradients("2sfs", method, figures) == trained


def test_2sfs_infers_trained_names_with_their_rows_and_other_names_with_the_text_tower():
    figures, method = np.load(FIGURES / "2sfs.npz"), built_2sfs()
    for name in ("eval", "novel", "mixed"):
        names = CLASSNAMES if name == "eval" else tuple(map(str, figures[f"{name}_classnames"]))
        logits = method.classifier(text.LabelSpace(names))(images())
        assert_near("2sfs", "logits", logits, figures[f"{name}_logits"])
    upper = method.classifier(text.LabelSpace(("RIVER", *CLASSNAMES)))(images())
    assert (upper[:, 0] - upper[:, 2]).abs().max() > 1, "another spelling is another class"


def test_2sfs_has_the_steps_and_rates_of_the_public_code():
    figures, method = np.load(FIGURES / "2sfs.npz"), built_2sfs()
    for shots, steps, first, _ in figures["rule/budget"].tolist():
        assert method.recipe(shots=shots).iterations == steps and method.stage_starts(steps) == (0, first)
    for stage in (1, 2):
        measured = figures[f"rule/lr_1shot_stage{stage}"].tolist()
        rates = [recipe.step_rate(method.recipe(shots=1), step, len(measured)) for step in range(len(measured))]
        assert rates == pytest.approx(measured, rel=1e-9)


def built_skipt() -> SkipT:
    method = public_code.build("skipt", dataset="imagenet", first_block=2, keep_labels=False)
    shapes = public_code.shapes_of(method)

    def std(name: str) -> float:
        if len(shapes[name]) == 1:
            return 0.1 if ".ln_" in name else 0.02
        return shapes[name][0 if name.endswith(("proj", "text_projection")) else 1] ** -0.5

    values = {name: value + (".ln_" in name and name.endswith("weight")) for name, value in walk(shapes, std).items()}
    public_code.load_public(method, values)
    method.uniform = torch.from_numpy(np.load(FIGURES / "skipt.npz")["input/uniform"])
    return method


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
def test_skipt_equals_the_public_code(encoders):
    figures, method = np.load(FIGURES / "skipt.npz"), built_skipt()
    run = reference.with_plain_encoders(method) if encoders == "plain" else method
    image = run.clip.encode_image(images(), run.plans(run.prompts)[0])
    assert run.chosen_classes(image, LABELS).tolist() == figures["skip/kept_classes"].tolist()
    loss = run.loss(images(), LABELS, ())["ce"]
    assert_near("skipt", "loss", loss.detach(), figures["loss/total"])
    loss.backward()
    assert len(check_gradients("skipt", method, figures)) == 54
    assert_near("skipt", "logits", run.classifier()(images()), figures["eval_logits"])
    novel = public_code.novel_space(method, figures)
    assert_near("skipt", "logits", run.classifier(novel)(images()), figures["novel_logits"])


def test_skipt_uses_the_classes_of_a_batch_of_many_classes():
    image, labels = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    for keep, count in ((True, 5), (False, 4)):
        method = public_code.build("skipt", classnames=CLASSNAMES[:5], first_block=3, keep_labels=keep)
        assert len(method.chosen_classes(image, labels)) == count


def test_skipt_has_the_odds_and_batches_of_the_public_code():
    figures = np.load(FIGURES / "skipt.npz")
    for classes in (3, 5, 9, 10, 24, 51, 100):
        measured = figures[f"rule/keep_probability_{classes}"]
        odds = keep_odds(classes, SkipTOptions()).numpy()
        np.testing.assert_allclose(odds, measured, rtol=1e-5, atol=1e-7)
    for sizes, seed, name in (((16,) * 5, 1, "5x16_seed1"), ((6, 4, 9), 2, "6_4_9_seed2")):
        labels = [label for label, size in enumerate(sizes) for _ in range(size)]
        assert one_class_order(labels, 4, random.Random(seed)) == figures[f"rule/batches_{name}"].ravel().tolist()


@pytest.mark.parametrize("name", ["kgcoop", "tcp", "mmrl", "skipt"])
def test_prompts_and_references_of_every_data_set_are_those_of_the_public_code(short_clip, name):
    figures = np.load(FIGURES / f"{name}.npz")
    for kind in {"rule/templates", "rule/references"} & {*figures.files}:
        templates = public_code.by_dataset(figures[kind])
        assert len(templates) == 15
        for dataset, template in templates.items():
            space = text.LabelSpace(("dog",), CATALOGUE[dataset].template, dataset=dataset)
            method: Any = build_method(name, short_clip, space, SHORT_OPTIONS.get(name, {}), torch.Generator())
            if kind == "rule/templates":
                words = short_clip.tokenize(space.prompts(template))
                first = 5 if name == "tcp" else 0
                assert torch.equal(method.prompts.ids[:, first:], words[:, first:]), dataset
            else:
                assert torch.equal(method.reference(space), teacher.text_bank(short_clip, space, [template])), dataset


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("ivlp", "mma", "promptsrc")]


@pytest.mark.parametrize("name", ["kgcoop", "tcp", *LONGER])
def test_trained_tensors_equal_those_of_the_public_code(name, tmp_path):
    """After one step or three in the published recipe, or four epochs of two steps that PromptSRC averages."""
    figures = np.load(FIGURES / f"{name}.npz")
    [case] = (case for case in CASES if case.method == name)
    method, config = built(case, tmp_path, figures), plan_run(method=name, dataset="dtd")
    batches = [(images(), LABELS)]
    if "steps/labels" in figures.files:
        batches = [(images(4, seed=100 + k), torch.from_numpy(own)) for k, own in enumerate(figures["steps/labels"])]
    start = {name: parameter.detach().clone() for name, parameter in method.named_parameters()}
    engine, average = Engine(method, config), EpochAverage(method, epochs=4, mean=3, std=1)
    engine.set_recipe_rate(config.recipe.lr)
    for step, (batch, labels) in enumerate(batches):
        terms = engine.terms(Batch(batch, labels, ()))
        if "steps/losses" in figures.files:
            assert terms.detach().sum().item() == pytest.approx(figures["steps/losses"][step], rel=2e-5)
        engine.backward(terms)
        engine.update()
        if step % 2:
            average.add(step // 2)
    if config.recipe.average:
        average.apply()
    trained = dict(method.named_parameters())
    for ours, theirs in public_names(method).items():
        before, after = (condense(tensors[ours].detach().numpy())[:HEAD] for tensors in (start, trained))
        measured = figures[f"after/{theirs}"][:HEAD] - before
        # Rounding of the tensors is larger in their changes.
        np.testing.assert_allclose(after - before, measured, atol=1e-3 * np.abs(measured).max(), rtol=0)
