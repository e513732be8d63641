"""Configurations and files of a run: what makes two the same, what is refused and why, and one writer at a time."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from procap.errors import UsageError, UserError
from procap.methods import METHODS
from procap.recipe import READ_UNDER, Recipe
from runner import checkpoint
from runner.api import Session
from runner.config import EvalSettings, RunConfig, Target
from runner.devices import resolve_device
from runner.environment_defaults import set_environment_defaults
from runner.planning import plan_run
from runner.provenance import source_state
from runner.results import EpochLog, Progress, read_document, write_bytes, write_json
from runner.run_folders import RunFolder, find_runs

RECIPE = Recipe(lr=0.0035, epochs=5, batch_size=4)

OPTIONS = {"n_ctx": 4, "depth": 9, "std": 0.02}
FIXED = RunConfig(method="coop", options=OPTIONS, recipe=RECIPE, dataset="shapes", classes="base")


def test_identity_of_a_fixed_run_never_changes():
    # Results on people's disks are found by this number.
    assert FIXED.hash == "7dbd3b5e" and FIXED.path == "base/shapes/coop/mini/16shot/seed1-7dbd3b5e"
    assert FIXED.model_copy(update={"recipe": RECIPE.model_copy(update={"test_batch_size": 7})}).hash == FIXED.hash
    parts = {"classes": "base", "dataset": "shapes", "method": "coop", "backbone": "mini", "shots": "16shot"}
    assert RunConfig.parse_path(f"/other/{FIXED.path}") == {**parts, "seed": "seed1-7dbd3b5e"}


@pytest.mark.parametrize("change", [
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
    {"weights_digest": "0123456789abcdef"},
])  # fmt: skip
def test_everything_that_changes_weights_changes_the_identity(change):
    assert FIXED.model_copy(update=change).hash != FIXED.hash


UNREAD = {
    "momentum": ({"optimizer": "adamw"}, 0.5), "betas": ({"optimizer": "sgd"}, (0.5, 0.5)),
    "eps": ({"optimizer": "sgd"}, 1e-3), "drop_last": ({"batches": "class"}, False),
    "min_lr": ({"schedule": "epoch"}, 1e-3), "warmup_epochs": ({"warmup": "none"}, 3),
    "warmup_lr": ({"warmup": "none", "schedule": "step"}, 1e-3),
    "crop_scale": ({"augmentation": "randaugment"}, (0.5, 1.0)), "flip": ({"augmentation": "randaugment"}, False),
    "colour_jitter": ({"augmentation": "randaugment"}, 0.5), "rotation": ({"augmentation": "randaugment"}, 5.0),
}  # fmt: skip
"""A recipe in which a training does not read the field, and a value of it."""


def test_every_field_that_depends_on_another_one_is_in_the_cases_below():
    assert UNREAD.keys() == READ_UNDER.keys()


@pytest.mark.parametrize("name", UNREAD)
def test_a_field_that_its_recipe_does_not_read_is_refused_and_is_no_part_of_the_identity(name):
    recipe, value = UNREAD[name]
    with pytest.raises(UsageError, match=f"{name} = .* is not read by coop in this recipe: give {READ_UNDER[name][0]}"):
        Session().get_run(method="coop", dataset="shapes", overrides={**recipe, name: value})
    plain = plan_run(method="coop", dataset="shapes", overrides=recipe)
    changed = plain.recipe.model_copy(update={name: value})
    assert plain.model_copy(update={"recipe": changed}).hash == plain.hash


@pytest.mark.parametrize("warmup", ["constant", "linear"])
def test_a_schedule_per_step_with_a_warm_up_is_no_run_from_before_it_had_one(warmup):
    steps = RECIPE.model_copy(update={"schedule": "step", "warmup": warmup})
    schemas = [FIXED.model_copy(update={"recipe": recipe}).identity()["schema"] for recipe in (steps, RECIPE)]
    assert schemas == [3, 2]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_trained_at_a_rate_of_its_vision_tower_or_refuses_it(name):
    plan = partial(plan_run, method=name, dataset="shapes")
    if name in ("skipt", "2sfs", "cliplora"):
        assert plan(overrides={"vision_lr": 0.5}).hash != plan().hash
    else:
        with pytest.raises(UsageError, match=f"vision_lr = 0.5 is not read by {name} in this recipe: leave it out"):
            Session().get_run(method=name, dataset="shapes", overrides={"vision_lr": 0.5})


@pytest.mark.parametrize(("method", "name", "value"), [
    ("probe", "lr", 0.5), ("ncm", "epochs", 3), ("lppp", "epochs", 3), ("tipadapter", "batch_size", 8),
    ("tipadapter", "epochs", 3), ("taskres", "batches", "class"), ("zeroshot", "lr", 0.5), ("zeroshot", "epochs", 2),
    ("probe", "flip", False),
])  # fmt: skip
def test_a_method_refuses_what_its_training_does_not_read(method, name, value):
    with pytest.raises(UsageError, match=f"{name} = .* is not read by {method} in this recipe: leave it out"):
        Session().get_run(method=method, dataset="shapes", overrides={name: value})


def test_a_closed_form_is_one_run_under_all_recipes():
    published, control = (plan_run(method="probe", dataset="shapes", recipe=name) for name in ("published", "procap"))
    assert published.path == control.path


@pytest.mark.parametrize(("fields", "words"), [
    ({"average": (15, 0)}, "greater than 0"),
    ({"average": (1000, 1)}, "gives no weight to any of 20 epochs"),
    ({"crop_scale": (0.0, 1.0)}, "range of the image's area"),
    ({"crop_scale": (0.9, 0.1)}, "range of the image's area"),
    ({"crop_scale": (0.5, 1.5)}, "range of the image's area"),
    ({"betas": (1.5, 2.0)}, "less than 1"),
    ({"betas": (0.9, 1.0)}, "less than 1"),
    ({"betas": (-0.1, 0.999)}, "greater than or equal to 0"),
    ({"betas": (math.nan, 0.9)}, "less than 1|finite"),
])  # fmt: skip
def test_numbers_that_no_training_can_use_are_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        Recipe(lr=0.1, epochs=20, batch_size=1, optimizer="adamw", **fields)


def test_weights_count_by_their_content_and_not_by_their_path(short_checkpoint, tmp_path):
    places = tmp_path / "one" / "short.safetensors", tmp_path / "two" / "short.safetensors"
    for place in places:
        place.parent.mkdir()
        shutil.copy(short_checkpoint, place)
    here, there = (plan_run(method="coop", dataset="shapes", backbone=str(place)) for place in places)
    assert here.hash == there.hash and here.path == there.path and here != there
    tensors = load_file(places[1])
    changed = {name: tensor + 1 if name == "visual.proj" else tensor for name, tensor in tensors.items()}
    other = tmp_path / "three" / "short.safetensors"
    other.parent.mkdir()
    with safe_open(short_checkpoint, framework="pt") as file:
        save_file(changed, other, file.metadata())
    assert plan_run(method="coop", dataset="shapes", backbone=str(other)).hash != here.hash


def test_a_packed_set_in_the_default_folder_is_planned_by_its_name(few_digits, tmp_path, monkeypatch):
    shutil.copytree(few_digits / "digits", tmp_path / "scans")
    manifest = tmp_path / "scans" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"digits"', '"scans"'))
    monkeypatch.setenv("PROCAP_DATA", str(tmp_path))
    assert plan_run(method="coop", dataset="scans").dataset == "scans"


def test_equal_trainings_are_one_run_under_every_name_of_their_recipe():
    own = plan_run(method="procap", dataset="shapes")
    same = plan_run(method="procap", dataset="shapes", recipe="procap", overrides={"lr": own.recipe.lr})
    assert own.recipe_name == "published" and same.path == own.path


def test_defaults_written_out_are_the_same_run():
    short = plan_run(method="coop", dataset="shapes")
    full = plan_run(
        method="coop", dataset=short.dataset.upper(), classes="base", shots=16, seed=1, backbone="mini",
        pretrained="embedded", precision="fp32", overrides=short.recipe.model_dump(), options=short.options,
    )  # fmt: skip
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


@pytest.mark.parametrize(("more", "words"), [
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
])  # fmt: skip
def test_a_wrong_field_is_answered_in_one_line_that_helps(more, words):
    with pytest.raises(UsageError) as caught:
        plan_run(**{"method": "coop", "dataset": "shapes", **more})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_targets_are_read_and_named():
    assert Target.parse("shapes:new") == Target("shapes", "novel", "test")
    assert str(Target.parse("Digits")) == "digits:all:test"
    assert Target.parse("shapes:novel:test").file(EvalSettings()) == "shapes-novel-test.json"
    development = Target.parse("shapes:dev-novel:val")
    assert (development.classes, development.file(EvalSettings())) == ("dev-novel", "shapes-dev-novel-val.json")
    assert Target.parse_unchecked(str(development)) == development


@pytest.mark.parametrize("text", ["", "shapes:", "shapes:novel:test:x", "shapes:some", "shapes:all:trian", "shap3s"])
def test_a_wrong_target_is_refused_in_one_line(text):
    with pytest.raises((UserError, UsageError)) as caught:
        Target.parse(text)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


CONFIG = RunConfig(method="coop", recipe=Recipe(lr=0.1, epochs=1, batch_size=1), dataset="digits", classes="all")
EPOCH = EpochLog(epoch=0, lr=1e-5, terms={"ce": 0.1}, seconds=0.3, images_per_second=None)
PROGRESS = Progress(config_hash=CONFIG.hash, step=3, steps=9, epochs=[EPOCH], seconds=0.3, environment={"gpu": None})


def test_a_document_comes_back_as_it_was_written(tmp_path):
    write_json(tmp_path / "deep" / "progress.json", PROGRESS)
    assert read_document(tmp_path / "deep" / "progress.json", Progress) == PROGRESS
    assert json.loads((tmp_path / "deep" / "progress.json").read_text())["schema"] == 1
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["progress.json"]


def test_an_epoch_without_a_loss_term_is_refused(tmp_path):
    empty = PROGRESS.model_copy(update={"epochs": [EPOCH.model_copy(update={"terms": {}})]})
    write_json(tmp_path / "progress.json", empty)
    with pytest.raises(UserError, match=r"epochs.0.terms"):
        read_document(tmp_path / "progress.json", Progress)


def test_a_full_disk_keeps_the_old_file_and_is_said_in_one_line(tmp_path):
    file = tmp_path / "train.json"
    write_bytes(file, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*train\.json"):
            write_bytes(file, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_bytes() == b"old" and [left.name for left in tmp_path.iterdir()] == ["train.json"]


def test_a_run_has_one_writer_and_a_dead_one_does_not_count(tmp_path):
    folder = RunFolder(tmp_path / "run")
    code = (
        "import sys, pathlib; from runner.run_folders import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"held by another process .pid {other.pid}"), folder.locked():
            pass
        other.kill()
    with folder.locked():
        pass


def test_runs_are_found_and_cleared(tmp_path):
    folder = RunFolder(tmp_path / CONFIG.path)
    write_json(folder.config_file, CONFIG)
    write_json(folder.progress_file, PROGRESS)
    write_bytes(folder.result_file(Target("digits")), b"{}")
    write_json(tmp_path / "mlartifacts" / "1" / "0a1b" / "artifacts" / "config.json", CONFIG)
    assert find_runs(tmp_path) == [folder] and folder.read_config() == CONFIG
    folder.clear()
    assert find_runs(tmp_path) == [] and not folder.result_files() and find_runs(tmp_path / "nowhere") == []


def test_the_commit_is_that_of_the_source_tree_and_dirt_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert source_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    assert source_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("two")
    assert source_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "mps"])
def test_a_device_that_is_not_here_is_refused_with_what_would_work(name):
    with pytest.raises(UserError, match=r"cpu") as caught:
        resolve_device(name)
    assert caught.value.exit_code == 2


def test_libraries_are_kept_offline_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    set_environment_defaults()
    assert os.environ["HF_HUB_OFFLINE"] == "0" and os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_disk_without_locks_blocks_no_run(tmp_path, monkeypatch):
    """As some network disks are; there the launcher keeps runs apart."""
    import errno
    import fcntl

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunFolder(tmp_path / "run").locked():
        pass


CARD = checkpoint.CheckpointCard(
    config=CONFIG, classnames=("zero", "one"), template="a photo of the digit {}.",
    templates=("a photo of the digit {}",), backbone_digest="00", manifest_digest="11",
)  # fmt: skip

IDENTITY = {"config_hash": "aa", "backbone_digest": "bb"}


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.tokens = nn.Parameter(torch.randn(4, 8, generator=draw))
        self.scale = nn.Parameter(torch.randn((), generator=draw))

    def adapt_shapes(self, tensors: dict[str, torch.Tensor]) -> None:
        """Keep the shapes, as most methods do."""


def test_prompts_come_back_bit_for_bit_with_their_card(tmp_path):
    method = Small(0)
    sha256 = checkpoint.save_checkpoint(tmp_path / "c.safetensors", method, CARD)
    tensors, card = checkpoint.read_checkpoint(tmp_path / "c.safetensors", sha256)
    assert card == CARD
    other = Small(1)
    checkpoint.load_into(other, tensors, tmp_path / "c.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(method.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("change", "word"), [
    (lambda tensors: tensors.pop("scale"), "lacks scale"),
    (lambda tensors: tensors.update(more=torch.zeros(1)), "unknown more"),
    (lambda tensors: tensors.update(tokens=torch.zeros(4, 9)), r"tokens is \[4, 9\], expected"),
])  # fmt: skip
def test_tensors_that_do_not_fit_the_method_are_named(change, word):
    tensors = dict(Small(0).state_dict())
    change(tensors)
    with pytest.raises(UserError, match=word):
        checkpoint.load_into(Small(0), tensors, Path("c.safetensors"))


def test_two_states_are_kept_and_a_broken_newest_falls_back(tmp_path, caplog):
    keeper = checkpoint.StateFiles(tmp_path, IDENTITY)
    paths = [keeper.save(checkpoint.TrainState(step=step), {}) for step in (1, 2, 3)]
    assert sorted(tmp_path.iterdir()) == paths[1:]
    paths[2].write_bytes(paths[2].read_bytes()[:-3])
    state, _ = keeper.unpack(keeper.newest())
    assert state.step == 2 and str(paths[2]) in caplog.text
    paths[1].write_bytes(b"")
    assert keeper.newest() is None


def test_a_state_of_another_engine_is_refused(tmp_path):
    checkpoint.StateFiles(tmp_path, IDENTITY | {"engine": "ddp"}).save(checkpoint.TrainState(step=1), {})
    with pytest.raises(UserError, match=r"its engine is ddp, here it is deepspeed; start over with --force"):
        checkpoint.StateFiles(tmp_path, IDENTITY | {"engine": "deepspeed"}).newest()
