"""MoCoOp equals its public code; figures as in test_procap_public_code."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, LABELS, figures_of, images, near, near_condensed, small_clip, take_steps, walk

from procap.errors import UserError
from procap.methods import data_use, public
from procap.methods.mocoop import COMMON, count_vectors, split_template, template_groups
from procap.methods.public import public_parameters
from procap.text import LabelSpace
from runner.engine import Batch, Engine
from runner.planning import plan_run
from runner.step_schedule import StepSchedule
from shards.catalogue import CATALOGUE

RUNS = {
    # images of a step, and whether training sees the names of new classes
    "all": (slice(None), False),
    "base": (slice(None), True),
    "single": (slice(1, 2), True),
}


@pytest.fixture
def name_file(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("\n".join(figures_of("mocoop")["novel_classnames"]) + "\n")
    return str(file)


def built_mocoop(name_file="", **options):
    template = CATALOGUE["fgvc-aircraft"].template
    method = public_code.build("mocoop", template, "fgvc-aircraft", clip=small_clip(2), new_names=name_file, **options)
    learned = {name: tensor for name, tensor in public_parameters(method).items() if not name.startswith("image_")}
    drawn = walk(
        {name: tuple(tensor.shape) for name, tensor in learned.items()},
        lambda name: 0.5 if name.endswith("gate.weight") else 0.1,
        306,
    )
    with torch.no_grad():
        for name, tensor in drawn.items():
            learned[name].copy_(tensor)
    method.prepare_training()
    return method


@pytest.mark.parametrize("run", RUNS)
def test_mocoop_equals_the_public_code(run, name_file):
    figures, (chosen, sees_new) = figures_of("mocoop"), RUNS[run]
    method = built_mocoop(name_file if sees_new else "")
    terms = method.loss(images()[chosen], LABELS[chosen], ())
    for name, weight in {"ce": 1, "text": 5, "gate": 1}.items():
        near(terms[name].detach() / weight, figures[f"{run}/loss/{name}"])
    sum(terms.values()).backward()
    for name, tensor in public_parameters(method).items():
        if np.any(figures[f"{run}/grad/{name}"]):
            near_condensed(tensor.grad, figures[f"{run}/grad/{name}"])
        else:
            assert not tensor.grad.any()


def test_mocoop_tokenizes_and_classifies_as_the_public_code(name_file):
    figures, method = figures_of("mocoop"), built_mocoop(name_file)
    assert np.array_equal(method.prompts.ids.unflatten(0, (5, 9)), figures["token_ids"])
    everything = method.expert_prompts(method.text_space, ".").ids
    assert np.array_equal(everything.unflatten(0, (5, 14)), figures["token_ids_of_text_loss"])
    near(method.classifier()(images()), figures["eval_logits"])
    near(method.classifier(public_code.novel_space(method, figures))(images()), figures["novel_logits"])


def test_mocoop_trains_as_the_public_code(name_file):
    figures, method = figures_of("mocoop"), built_mocoop(name_file)
    engine = Engine(method, plan_run(method="mocoop", dataset="fgvc-aircraft"))
    losses = figures["base/steps/loss"]
    assert len([*take_steps(engine, [Batch(images(), LABELS, ())] * 3, 0.032, losses)]) == 3
    for name, tensor in public_parameters(method).items():
        near_condensed(tensor, figures[f"base/steps/after_3/{name}"])


def test_layer_norms_of_mocoop_train_at_a_tenth_of_the_rate_after_the_warm_up():
    config, method = plan_run(method="mocoop", dataset="dtd"), built_mocoop()
    rates = [
        StepSchedule(config.recipe, SimpleNamespace(steps_per_pass=1), method).rates(epoch, epoch)
        for epoch in (0, 2, 3)
    ]
    assert rates == [[1e-5, 1e-5], [1e-5, 1e-5], pytest.approx([0.032, 0.0032])]


def test_the_groups_of_templates_of_mocoop_are_those_of_the_public_code():
    names = {"fgvc_aircraft": "fgvc-aircraft", "oxford_flowers": "oxford-flowers"}
    known = {"caltech101", "dtd", "fgvc-aircraft", "oxford-flowers", "sun397", "ucf101"}
    for line in figures_of("mocoop")["rule/data_sets"].tolist():
        name, sizes, firsts = re.match(r"(\w+): templates \d+, groups \[(.*)\], first .* after: (.*)", line).groups()
        if (dataset := names.get(name, name)) in known:
            groups = template_groups(LabelSpace(("dog",), CATALOGUE[dataset].template, dataset=dataset))
            assert ", ".join(str(len(group)) for group in groups) == sizes
            parts = [split_template(group[0]) for group in groups]
            shown = [
                f"'{group[0]}' {count_vectors(a)} {count_vectors(b)}"
                for group, (a, b) in zip(groups, parts, strict=True)
            ]
            assert "; ".join(shown) == firsts
    # A data set of a user's own has its template and the common groups.
    assert template_groups(LabelSpace(("dog",), "a {} of mine.")) == (("a {} of mine.",), *COMMON)
    assert template_groups(LabelSpace(("dog",))) == COMMON


def test_a_checkpoint_of_mocoops_public_code_is_read_without_what_is_not_learned():
    method, twin = built_mocoop(), built_mocoop()
    with torch.no_grad():
        method.gate.weight.mul_(2)
    state = public.public_state(method) | {
        "prompt_learner.ctx_after_1": torch.zeros(0, 512), "prompt_learner.token_prefix_all": torch.zeros(1),
        "text_encoder.module.positional_embedding": torch.zeros(2), "prompt_learner.grouped_prototypes": torch.zeros(1),
    }  # fmt: skip
    public.load_public_state(twin, state)
    assert torch.equal(twin.gate.weight, method.gate.weight)


def test_a_file_of_new_names_may_be_called_templates_and_list_all_classes(name_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = Path(name_file).read_text().splitlines()
    Path("templates").write_text("\n".join([*CLASSNAMES, "annual crop", *new, "", "dog ", *new]), "utf-8-sig")
    names = built_mocoop("templates").text_space.names()
    assert names == tuple(name.replace("_", " ") for name in (*CLASSNAMES, *new))


def test_mocoop_says_when_its_training_saw_names_of_new_classes(name_file, tmp_path):
    assert data_use("mocoop", {"new_names": name_file}).further == ("names of new classes",)
    assert not data_use("mocoop", {}).further
    with pytest.raises(UserError, match=r"new_names = .*absent: .*No such file.*one class name a line"):
        built_mocoop(str(tmp_path / "absent"))
