"""Configurations: what makes two runs the same run, and what a user reads when something in one is wrong."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from procap.errors import UsageError, UserError
from procap.methods import ADDED_OPTIONS, method_options
from procap.recipe import Recipe
from runner.config import EvalSettings, RunConfig, Target, plan_run
from shards.errors import DataUsageError

RECIPE = Recipe(lr=0.0035, epochs=5, batch_size=4)
FIXED = RunConfig(
    method="coop", options={"n_ctx": 4, "depth": 9, "std": 0.02}, recipe=RECIPE, dataset="shapes", classes="base"
)


def test_identity_of_a_fixed_run_never_changes():
    # Results on people's disks are found by this number.
    assert FIXED.hash == "c93afa81"
    assert FIXED.path == "base/shapes/coop/mini/16shot/seed1-c93afa81"


@pytest.mark.parametrize(
    "change",
    [
        {"method": "maple"},
        {"options": {"n_ctx": 5, "depth": 9, "std": 0.02}},
        {"recipe": RECIPE.model_copy(update={"lr": 0.0036})},
        {"recipe": RECIPE.model_copy(update={"momentum": 0.8})},
        {"recipe": RECIPE.model_copy(update={"flip": False})},
        {"backbone": "ViT-B-16"},
        {"pretrained": "openai"},
        {"dataset": "digits"},
        {"classes": "all"},
        {"shots": 8},
        {"seed": 2},
        {"precision": "bf16"},
        {"picks": "0123456789abcdef"},
    ],
)
def test_everything_that_changes_weights_changes_the_identity(change):
    assert FIXED.model_copy(update=change).hash != FIXED.hash


@pytest.mark.parametrize("change", [{"test_batch_size": 7}, {"betas": (0.5, 0.5)}])
def test_what_sgd_training_never_reads_is_no_part_of_the_identity(change):
    assert FIXED.model_copy(update={"recipe": RECIPE.model_copy(update=change)}).hash == FIXED.hash


def test_an_option_that_a_method_got_later_leaves_older_runs_where_they_are():
    """Stored configurations without the option load, mean what they did, and have the same path as a new run."""
    for method, added in ADDED_OPTIONS.items():
        new = plan_run(method=method, dataset="shapes")
        stored = new.model_dump(mode="json")
        stored["options"] = {name: value for name, value in new.options.items() if name not in added}
        old = RunConfig.model_validate(stored)
        assert old == new and old.path == new.path and added.items() <= old.options.items()
        assert method_options(method, added) == method_options(method, {})
    changed = plan_run(method="procap", dataset="shapes", options={"target_suffix": "none"})
    assert changed.hash != plan_run(method="procap", dataset="shapes").hash


def test_equal_trainings_are_one_run_under_every_name_of_their_recipe():
    own = plan_run(method="procap", dataset="shapes")
    same = plan_run(method="procap", dataset="shapes", recipe="procap", overrides={"lr": own.recipe.lr})
    assert own.recipe_name == "published"
    assert same.path == own.path


def test_defaults_written_out_are_the_same_run():
    short = plan_run(method="coop", dataset="shapes")
    full = plan_run(
        method="coop",
        dataset=short.dataset.upper(),
        classes="base",
        shots=16,
        seed=1,
        backbone="mini",
        pretrained="embedded",
        precision="fp32",
        overrides=short.recipe.model_dump(),
        options=short.options,
    )
    assert full == short
    assert plan_run(method="coop", dataset="shapes", overrides={"lr": "2e-3"}) == plan_run(
        method="coop", dataset="shapes", overrides={"lr": 0.002}
    )


def test_same_recipe_control_and_overrides_are_told_apart():
    own = plan_run(method="maple", dataset="shapes")
    control = plan_run(method="maple", dataset="shapes", recipe="procap")
    changed = plan_run(method="maple", dataset="shapes", overrides={"epochs": 2})
    assert control.recipe == plan_run(method="procap", dataset="shapes").recipe
    assert [run.recipe_name for run in (own, control, changed)] == ["published", "procap", "custom"]
    assert len({run.path for run in (own, control, changed)}) == 3


def test_training_on_all_classes_takes_the_published_few_shot_settings():
    few, halves = (plan_run(method="coop", dataset="shapes", classes=classes) for classes in ("all", "base"))
    assert few == plan_run(method="coop", dataset="shapes", classes="all", task="few-shot")
    assert (few.options["n_ctx"], halves.options["n_ctx"]) == (16, 4)


def test_a_method_that_learns_nothing_keeps_zero_epochs():
    runs = [
        plan_run(method="zeroshot", dataset="shapes", **more)
        for more in ({}, {"overrides": {"epochs": 3, "lr": 1.0}}, {"recipe": "procap"})
    ]
    assert {run.recipe.epochs for run in runs} == {0}
    assert len({run.path for run in runs}) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"method": "copo"}, ["copo", "coop"]),
        ({"overrides": {"epoch": 3}}, ["'epoch'", "did you mean epochs"]),
        ({"overrides": {"epochs": "many"}}, ["epochs = 'many'", "integer"]),
        ({"overrides": {"batch_size": 0}}, ["batch_size = 0", "greater"]),
        ({"overrides": {"lr": float("inf")}}, ["lr", "finite"]),
        ({"options": {"nctx": 3}}, ["'nctx'", "did you mean n_ctx"]),
        ({"options": {"n_ctx": "four"}}, ["n_ctx", "integer"]),
        ({"recipe": "maple"}, ["recipe 'maple'", "published"]),
        ({"precision": "fp8"}, ["precision = 'fp8'", "bf16"]),
        ({"classes": "bas"}, ["'bas'", "did you mean base"]),
        ({"shots": -1}, ["shots = -1"]),
        ({"seed": "x"}, ["seed = 'x'"]),
        ({"task": "base-to-new"}, ["base-to-new", "base-to-novel"]),
    ],
)
def test_a_wrong_field_is_answered_in_one_line_that_helps(more, words):
    with pytest.raises((UsageError, DataUsageError)) as caught:
        plan_run(**{"method": "coop", "dataset": "shapes", **more})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("value", [float("nan"), [0.5, float("inf")], (float("-inf"), 1.0)])
def test_a_number_that_is_none_is_refused_alone_and_in_a_range(value):
    with pytest.raises(ValidationError, match="scale must be a finite number"):
        RunConfig.model_validate({**FIXED.model_dump(), "options": {"scale": value}})


def test_targets_are_read_and_named():
    assert Target.parse("shapes:new") == Target("shapes", "novel", "test")
    assert str(Target.parse("Digits")) == "digits:all:test"
    assert Target.parse("shapes:novel:test").file(EvalSettings()) == "shapes-novel-test.json"
    development = Target.parse("shapes:dev-novel:val")
    assert (development.classes, development.file(EvalSettings())) == ("dev-novel", "shapes-dev-novel-val.json")
    assert Target.parse_unchecked(str(development)) == development


def test_a_derived_set_takes_what_was_published_for_its_base():
    eurosat, small, shapes = (plan_run(method="procap", dataset=name) for name in ("eurosat", "EuroSAT-64px", "shapes"))
    assert small.dataset == "eurosat-64px" and small.recipe == eurosat.recipe != shapes.recipe
    imagenet = plan_run(method="coop", dataset="imagenet-256px", classes="all")
    assert imagenet.recipe == plan_run(method="coop", dataset="imagenet", classes="all").recipe


def test_picks_are_a_digest_and_mean_nothing_to_a_method_that_learns_nothing():
    assert plan_run(method="zeroshot", dataset="shapes", picks="0" * 16) == plan_run(
        method="zeroshot", dataset="shapes"
    )
    assert FIXED.model_copy(update={"picks": ""}).identity() == FIXED.identity() and "picks" not in FIXED.identity()
    with pytest.raises(UsageError, match=r"picks = '\.\./x'"):
        plan_run(method="coop", dataset="shapes", picks="../x")


@pytest.mark.parametrize("text", ["", "shapes:", "shapes:novel:test:x", "shapes:some", "shapes:all:trian", "shap3s"])
def test_a_wrong_target_is_refused_in_one_line(text):
    with pytest.raises((UserError, DataUsageError)) as caught:
        Target.parse(text)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError | DataUsageError)
    assert caught.value.exit_code == 2
