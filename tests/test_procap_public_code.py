"""Methods equal their public code in logits, loss terms and gradients, on figures measured there in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from public_code import CLASSNAMES, FIGURES, HEAD, LABELS, condense, draws, images, small_clip, walk

from procap.errors import UserError
from procap.methods import build_method, load_public
from procap.methods.method import Method
from procap.reference import with_plain_encoders
from procap.text import LabelSpace

TOLERANCE = 2e-5
"""Largest difference, relative to the largest element of the array."""


@dataclass(frozen=True)
class Case:
    """A method as it was measured: its options, its data set, its loss terms, and the size of its parameters."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    dataset: str = ""
    template: str = "a photo of a {}."
    layers: int = 4
    terms: dict[str, str] = field(default_factory=lambda: {"ce": "ce"})
    noise: tuple[int, ...] = ()

    def std(self, name: str) -> float:
        if self.method == "tcp":
            return 0.1 if name.endswith(("ctx", "linear1.weight")) else 0.05
        if self.method == "mma":
            return 0.05 if name.endswith("bias") or ".down." in name else 0.1
        if self.method == "coprompt":
            return 0.05 if "adapter" in name else 0.04 if "proj" in name else 0.1
        return 768**-0.5 if name.endswith("proj_rep") else 0.1


CASES = (
    Case("maple", {"depth": 3}),
    Case("ivlp", {"depth": 4, "vision_depth": 4}),
    Case("kgcoop", {}, "eurosat", "a centered satellite photo of {}.", terms={"ce": "ce", "kg": "kg_weighted"}),
    Case(
        "promptsrc",
        {"depth": 3, "vision_depth": 3},
        terms={"ce": "ce", "text": "text_weighted", "image": "image_weighted", "kl": "kl"},
    ),
    Case(
        "coprompt",
        {"depth": 3, "n_ctx": 2, "weight": 8.0},
        terms={"ce": "ce", "text": "text_weighted", "image": "image_weighted"},
        noise=(1,),
    ),
    Case(
        "tcp", {}, "oxford-pets", "a photo of a {}, a type of pet.", layers=10, terms={"ce": "ce", "kg": "kg_weighted"}
    ),
    Case("mma", {"first_block": 1}),
    Case(
        "mmrl",
        {"first_block": 2, "width": 64},
        "caltech101",
        terms={
            "ce": "ce_class_weighted",
            "ce_rep": "ce_rep_weighted",
            "reg_image": "reg_image_weighted",
            "reg_text": "reg_text_weighted",
        },
    ),
)


def maple_values(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Draw MaPLe's values, which were measured in another order than those of the other methods."""
    source = draws(13)
    names = ["ctx", "proj.weight", "proj.bias"]
    for i in range(2):
        names += [f"compound_prompts_text.{i}"]
        names += [f"compound_prompt_projections.{i}.{part}" for part in ("weight", "bias")]
    values = {}
    for name in names:
        std = 0.1 if name == "ctx" or "prompts_text" in name else 0.04
        shape = shapes[f"prompt_learner.{name}"]
        values[f"prompt_learner.{name}"] = torch.from_numpy(
            source.standard_normal(shape, dtype=np.float32) * np.float32(std)
        )
    return values


def built(case: Case, folder: Path, figures: Any) -> Method:
    """Build the method with the parameters that were measured; sentences are written to a file in `folder`."""
    options = case.options
    if "sentences" in figures.files:
        file = folder / "sentences.json"
        names = [name.replace("_", " ") for name in CLASSNAMES]
        file.write_text(json.dumps(dict(zip(names, figures["sentences"].tolist(), strict=True))))
        options = {**options, "sentences": str(file)}
    space = LabelSpace(CLASSNAMES, case.template, dataset=case.dataset)
    clip = small_clip(case.layers)
    method = build_method(case.method, clip, space, options, torch.Generator().manual_seed(0))
    parameters = dict(method.named_parameters())
    shapes = {theirs: tuple(parameters[ours].shape) for ours, theirs in method.public_names().items()}
    load_public(method, maple_values(shapes) if case.method == "maple" else walk(shapes, case.std))
    return method


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("encoders", ["fast", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_logits_losses_and_gradients_equal_the_public_code(case, encoders, tmp_path):
    figures = np.load(FIGURES / f"{case.method}.npz")
    method = built(case, tmp_path, figures)
    run = with_plain_encoders(method) if encoders == "plain" else method
    shown = torch.stack([images(), images(seed=12)], dim=1) if method.views == 2 else images()
    terms = run.loss(shown, LABELS, tuple(torch.tensor([value]) for value in case.noise))
    total = torch.stack(list(terms.values())).sum()
    assert difference(total.detach(), figures["loss/total"]) < TOLERANCE
    for ours, theirs in case.terms.items():
        assert difference(terms[ours].detach(), figures[f"loss/{theirs}"]) < TOLERANCE, ours
    total.backward()
    parameters = dict(method.named_parameters())
    for ours, theirs in method.public_names().items():
        if f"grad/{theirs}" in figures.files:
            gradient = parameters[ours].grad
            assert gradient is not None, ours
            measured, found = figures[f"grad/{theirs}"], condense(gradient.numpy())
            largest = float(gradient.abs().max())
            assert np.abs(found[:HEAD] - measured[:HEAD]).max() < TOLERANCE * largest, ours
            assert difference(found[-1:], measured[-1:]) < TOLERANCE, ours
    assert difference(run.classifier()(images()), figures["eval_logits"]) < TOLERANCE
    if "novel_logits" in figures.files:
        novel = replace(method.space, classnames=tuple(map(str, figures["novel_classnames"])))
        assert difference(run.classifier(novel)(images()), figures["novel_logits"]) < TOLERANCE


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("prompt_learner.ctx"), "lacks prompt_learner.ctx"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), "has unknown other"),
        (lambda tensors: tensors.update({"prompt_learner.ctx": torch.zeros(3, 512)}), r"is \[3, 512\], expected \[4"),
    ],
)
def test_tensors_of_another_checkpoint_are_one_clear_error(tiny_clip, tiny_space, change, message):
    method = build_method("kgcoop", small_clip(), tiny_space, {}, torch.Generator().manual_seed(0))
    tensors = {"prompt_learner.ctx": torch.zeros(4, 512)}
    change(tensors)
    with pytest.raises(UserError, match=f"not a checkpoint of KgCoOp: .*{message}"):
        load_public(method, tensors)
