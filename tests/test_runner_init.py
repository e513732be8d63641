"""Trainings that start from a finished run."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sessions import evaluate, load_trained, make_run, state_of, train
from small_runs import make_runtime

from procap import teacher
from procap.errors import UserError
from procap.weights import loading
from procap.weights.loading import load_clip
from runner.config import Target
from runner.earlier_runs import check_same_images, preliminary_run, start_from
from runner.planning import plan_run
from runner.run_folders import RunFolder
from runner.run_state import RunSpec

FIELDS = {"dataset": "digits", "shots": 2}
SHORT = {"epochs": 2, "batch_size": 4, "warmup": "none"}


def tensors(runtime, config):
    return load_file(RunFolder(runtime.results / config.path).checkpoint_file)


@pytest.fixture(scope="module")
def runtime(few_digits, tmp_path_factory):
    return make_runtime(few_digits, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def coop(runtime, short_checkpoint):
    config = plan_run(method="coop", backbone=str(short_checkpoint), overrides={**SHORT, "lr": 0.01}, **FIELDS)
    train(config, runtime)
    return config


def test_a_training_starts_from_the_tensors_of_a_run_which_is_part_of_its_identity(coop, runtime, short_checkpoint):
    slow = {**SHORT, "epochs": 1, "lr": 1e-9}
    plain = plan_run(method="kgcoop", backbone=str(short_checkpoint), overrides=slow, **FIELDS)
    config = start_from(plain, make_run(coop, runtime), runtime.results)
    assert config.path != plain.path == plain.model_copy(update={"init": "elsewhere"}).path
    result = train(config, runtime)
    source = RunFolder(runtime.results / coop.path).read_training()
    assert result.files == {"init": source.checkpoint_sha256} == {"init": config.init_digest}
    assert torch.allclose(tensors(runtime, config)["context"], tensors(runtime, coop)["context"], atol=1e-7)
    assert train(config, runtime) == result, "a finished run is read"


def test_a_run_that_does_not_fit_is_refused_in_one_line(coop, runtime, short_checkpoint):
    def start(method="coop", **more):
        plain = plan_run(method=method, backbone=str(short_checkpoint), overrides={**SHORT, "lr": 0.1}, **FIELDS | more)
        train(start_from(plain, make_run(coop, runtime), runtime.results), runtime)

    wrong = [("does not fit this method", {"options": {"n_ctx": 2, "ctx_init": ""}}), ("other images", {"seed": 2})]
    wrong += [("no training on images", {"method": "taskres"}), ("other images", {"classes": "all"})]
    for message, fields in wrong:
        with pytest.raises(UserError, match=message) as raised:
            start(**fields)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="was chosen by test accuracy"):
        check_same_images(coop.model_copy(update={"options": {"selection": "test"}}), coop)
    for method, options in {"promptkd": {"unlabelled": "all"}, "mocoop": {"new_names": "names.txt"}}.items():
        wider = coop.model_copy(update={"method": method, "options": options})
        check_same_images(wider, wider)
        with pytest.raises(UserError, match=r"new classes.*, of which tables would say only: few-shot images, "):
            check_same_images(wider, coop)
    other = coop.model_copy(update={"init": coop.path, "init_digest": "0" * 64})
    with pytest.raises(UserError, match="SHA-256 differs"):
        train(other, runtime)


def test_dpc_trains_coop_first_and_keeps_its_prompt_for_new_classes(runtime, short_checkpoint, tmp_path):
    config = plan_run(method="dpc", backbone=str(short_checkpoint), overrides={**SHORT, "lr": 0.01}, **FIELDS)
    first = preliminary_run(config)
    train(config, runtime)
    mine, tuned = tensors(runtime, config), tensors(runtime, first)["context"]
    assert torch.equal(mine["tuned"], tuned) and not torch.equal(mine["context"], tuned)
    novel = Target("digits", "novel")
    assert evaluate(config, novel, runtime).correct == evaluate(first, novel, runtime).correct
    paused = make_runtime(runtime.data, tmp_path)
    train(config, paused, until=1)
    train(config, paused)
    assert all(torch.equal(tensor, mine[name]) for name, tensor in tensors(paused, config).items())


def test_runs_with_one_teacher_load_it_once(runtime, short_checkpoint, monkeypatch):
    loaded = []
    monkeypatch.setattr(teacher, "load_clip", lambda *names: loaded.append(names) or load_clip(*names))
    fields = {"options": {"teacher": f"{short_checkpoint}"}, "backbone": str(short_checkpoint), "overrides": SHORT}
    for config in (plan_run(method="kdpl", **fields, **FIELDS, seed=seed) for seed in (1, 2)):
        train(config, runtime)
    assert loaded == [(str(short_checkpoint), None)] and teacher.keep_clip.cache_info().currsize == 1
    train(plan_run(method="coop", **fields | {"options": {}}, **FIELDS, seed=3), runtime)
    assert not teacher.keep_clip.cache_info().currsize, "the memory of later runs does not include the teacher"


def test_a_look_at_a_finished_run_hashes_the_file_of_its_teacher_without_loading_it(
    runtime, short_checkpoint, monkeypatch, tmp_path
):
    large = Path(shutil.copy(short_checkpoint, tmp_path / "large.safetensors"))
    fields = {"options": {"teacher": str(large)}, "backbone": str(short_checkpoint), "overrides": SHORT}
    config = plan_run(method="kdpl", **fields, **FIELDS)
    assert train(config, runtime).files == {"teacher": hashlib.sha256(large.read_bytes()).hexdigest()}
    monkeypatch.delattr(loading, "load_clip")
    loading.file_digest.cache_clear()
    assert state_of(RunSpec(config=config, targets=()), runtime).is_finished


def test_kdpl_learns_from_the_predictions_of_a_finished_run(coop, runtime, short_checkpoint):
    folder = runtime.results / coop.path
    fields = {"options": {"teacher": str(folder)}, "backbone": str(short_checkpoint), "overrides": SHORT}
    config = plan_run(method="kdpl", **fields, **FIELDS)
    result = train(config, runtime)
    assert result.files == {"teacher": RunFolder(folder).read_training().checkpoint_sha256}
    assert result.epochs[0].terms["kl_forward"] > 0
    taught, learner = load_trained(config, runtime).method, load_trained(coop, runtime).method
    taught.teacher_classifier = learner.classifier()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(taught.teacher_logits(images), learner.classifier()(images))
    with pytest.raises(UserError, match="other images"):
        train(plan_run(method="kdpl", **fields, **FIELDS | {"seed": 2}), runtime)
