"""Trainings on images without labels: which images, what is recorded of them, and what a trained run still needs."""

import re
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sessions import evaluate, make_run, train
from small_runs import make_runtime

from benchmarks.results import frame as results
from procap.errors import UserError
from procap.methods import data_use
from runner.config import EvalSettings, Target
from runner.earlier_runs import preliminary_run
from runner.evaluate import score_images
from runner.hub import shared_files
from runner.planning import plan_run
from runner.run_folders import RunFolder
from runner.train import train_run
from runner.trained_runs import load_trained
from shards.files import LockHeld
from shards.image_selection import select_training_images, select_unlabelled
from shards.reader import open_dataset

SHORT = {"epochs": 1, "batch_size": 8, "warmup": "none"}


def planned(checkpoint, pool="few-shot", method="promptkd", **options):
    own = {"depth": 2, "width": 48} if method == "promptkd" else {}
    options = {"teacher": str(checkpoint), "unlabelled": pool} | own | options
    fields = {"backbone": str(checkpoint), "shots": 2, "overrides": SHORT}
    return plan_run(method=method, dataset="digits", options=options, **fields)


@pytest.mark.parametrize(("pool", "classes", "labels"), [
    ("few-shot", "base", range(5)), ("base", "base", range(5)), ("all", "base", range(10)),
    ("base", "dev-base", range(3)), ("all", "dev-base", range(5)),
])  # fmt: skip
def test_a_pool_has_the_images_of_its_classes_without_labels(few_digits, pool, classes, labels):
    dataset = open_dataset(few_digits, "digits")
    fewshot = select_training_images(dataset, 2, seed=1, classes=classes)
    chosen = select_unlabelled(dataset, fewshot, pool, classes)
    assert chosen.class_labels == tuple(labels) and {*chosen.images.labels.tolist()} == {-1}
    train = dataset.open_images("train")
    every = train.subset(np.flatnonzero(np.isin(train.labels, [*labels]))).paths
    assert chosen.images.paths == (fewshot.train.paths if pool == "few-shot" else every)


def test_a_run_records_its_pool_and_says_what_it_has_looked_at(few_digits, short_checkpoint, tmp_path):
    runtime, digests = make_runtime(few_digits, tmp_path), set()
    seen = {"few-shot": "none few-shot base", "base": "none base base", "all": "none train all"}
    for pool, looked_at in seen.items():
        config = planned(short_checkpoint, pool)
        result = train(config, runtime)
        record = result.unlabelled
        # The few-shot samples are listed where the run has seen them.
        assert (result.fewshot is not None) == (pool == "few-shot")
        assert record.pool == pool and record.images == {"few-shot": 10, "base": 61, "all": 120}[pool]
        digests.add((config.hash, record.digest))
        card = shared_files(make_run(config, runtime), "me/promptkd")["README.md"].decode()
        assert f"Learned from {record.images} images of digits without labels ({pool}), seed 1" in card
        assert f"it has looked at: {data_use('promptkd', config.options)}." in card
        for half in ("base", "novel"):
            evaluate(config, Target("digits", half), runtime)
        uses = data_use("promptkd", config.options)
        assert f"{uses.labelled} {uses.unlabelled} {uses.names}" == looked_at
        assert data_use("caspl", config.options).labelled == "few-shot"
    assert len(digests) == len({digest for _, digest in digests}) == 3
    rows = results.load(tmp_path)
    assert {*(rows.labelled + " " + rows.unlabelled + " " + rows["names"])} == {*seen.values()}


def test_learned_classes_need_no_teacher_any_more_and_new_ones_the_same_teacher(few_digits, short_checkpoint, tmp_path):
    runtime = make_runtime(few_digits, tmp_path / "results")
    teacher = plan_run(method="coop", dataset="digits", backbone=str(short_checkpoint), shots=2, overrides=SHORT)
    result, folder = train(teacher, runtime), RunFolder(runtime.results / teacher.path)
    config = planned(short_checkpoint, teacher=str(folder.path))
    assert train(config, runtime).files == {"teacher": result.checkpoint_sha256}
    base, novel = (Target("digits", half) for half in ("base", "novel"))
    assert evaluate(config, novel, runtime).num_classes == 5
    tensors = folder.checkpoint_file.read_bytes()
    folder.checkpoint_file.write_bytes(tensors + b" ")
    assert evaluate(config, base, runtime).num_classes == 5
    with pytest.raises(UserError, match="SHA-256 differs"):
        evaluate(config, novel, runtime, force=True)
    train(teacher, runtime, force=True)
    shutil.rmtree(folder.path)
    with pytest.raises(UserError, match=re.escape(str(folder.path))) as raised:
        evaluate(config, novel, runtime, force=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("pool", ["few-shot", "all"])
def test_caspl_boosts_in_its_own_recipe_once_for_all_seeds_if_no_few_shot_image_is_read(short_checkpoint, pool):
    configs = [
        planned(short_checkpoint, pool, method="caspl", boost_depth=2, boost_epochs=3).model_copy(update={"seed": seed})
        for seed in (1, 2)
    ]
    first, second = map(preliminary_run, configs)
    assert (first.recipe.epochs, first.recipe.lr, first.recipe.batch_size) == (3, 0.0025, 4)
    assert (first.path == second.path) == (pool == "all") and first.shots == {"few-shot": 2, "all": 0}[pool]


def test_images_count_as_known_among_the_names_of_the_runs_classes_alone(few_digits, short_checkpoint, tmp_path):
    runtime, names = make_runtime(few_digits, tmp_path), []
    config = planned(short_checkpoint, "all")
    train(config, runtime)
    started = make_run(config, runtime)
    method = load_trained(started).method
    make_classifier = method.classifier
    method.classifier = lambda space: names.append(space.classnames) or make_classifier(space)
    score_images(started, Target("digits", "novel"))
    assert (len(method.space.classnames), *map(len, names)) == (10, 5) and names[0] == method.space.classnames[:5]


def test_a_training_waits_for_a_first_phase_that_another_process_trains(
    few_digits, short_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("runner.session.HELD_SECONDS", 0)
    config = planned(short_checkpoint, "base", method="caspl", boost_depth=2, boost_epochs=1)
    started = make_run(config, make_runtime(few_digits, tmp_path))
    first = started.session.get_run(preliminary_run(started.config))
    with ExitStack() as lock:
        lock.enter_context(first.folder.locked())
        with pytest.raises(LockHeld, match="wait for it or stop it"):
            train_run(first)
        monkeypatch.setattr("warnings.warn", lambda held: lock.close())
        assert train_run(started).status == first.read_training().status == "finished"


def test_caspl_keeps_the_boosting_tokens_of_its_first_phase(few_digits, short_checkpoint, tmp_path):
    runtime = make_runtime(few_digits, tmp_path)
    config = planned(short_checkpoint, "base", method="caspl", boost_depth=2, boost_epochs=1)
    result, first = train(config, runtime), preliminary_run(config)
    folders = [RunFolder(tmp_path / each.path) for each in (config, first)]
    assert folders[1].read_training().unlabelled.pool == "base" and result.unlabelled is None
    assert result.files == {"init": folders[1].read_training().checkpoint_sha256}
    whole, boosting = (load_file(folder.checkpoint_file) for folder in folders)
    assert boosting.items() and all(torch.equal(whole[name], tensor) for name, tensor in boosting.items())
    assert {*whole} - {*boosting} == {"context"} and result.trainable_parameters == whole["context"].numel()
    with pytest.raises(UserError, match="has learned from every image, without labels"):
        EvalSettings(temperature="shots").for_run(config)
