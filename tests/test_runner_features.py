"""Trainings on frozen features, through files: resuming, reloading, targets, and what they may read."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field
from rank_processes import run_ranks
from safetensors.torch import load_file
from sessions import evaluate, load_trained, make_run, train
from small_runs import make_runtime
from tiny_geometry import SHORT_OPTIONS, needed_options
from torch.nn.functional import normalize

import procap
from benchmarks.experiment.profiles import MINI
from benchmarks.suites import SUITES, load_suite
from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import METHODS, method_class, method_groups
from procap.methods.features import FeatureBank, FeatureMethod
from procap.methods.probe import NearestMean
from runner.config import RunConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.feature_training import FeatureLoader, choosing_images
from runner.planning import can_classify, plan_run
from runner.results import TrainResult
from runner.run_folders import RunFolder
from runner.setup import set_up, train_augment
from runner.stop_signals import Interrupted
from shards.files import file_sha256
from shards.image_selection import select_training_images
from shards.reader import open_dataset

ON_FEATURES = tuple(name for name in METHODS if issubclass(method_class(name), FeatureMethod))
QUICK = {name: {"epochs": 3} for name in ON_FEATURES if method_class(name).takes_steps}


def plan(checkpoint, method: str, **more) -> RunConfig:
    fields = {"shots": 2, "backbone": str(checkpoint), "overrides": QUICK.get(method, {}), **more}
    fields["options"] = SHORT_OPTIONS.get(method, {}) | fields.get("options", {})
    return plan_run(method=method, dataset="digits", **fields)


def tensors(runtime, config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(runtime.results / config.path).checkpoint_file)


@pytest.mark.parametrize("method", ON_FEATURES)
def test_a_training_on_features_is_read_back_and_classifies_what_it_can(method, few_digits, short_checkpoint, tmp_path):
    runtime, config = make_runtime(few_digits, tmp_path), plan(short_checkpoint, method)
    result = train(config, runtime)
    assert isinstance(result, TrainResult) and len(result.fewshot.samples) == 10
    assert result.images_per_second is None and result.phases["features"] > 0
    assert bool(result.steps) == (method in QUICK)
    trained = load_trained(config, runtime)
    for classes in ("base", "novel"):
        target = Target("digits", classes)
        if can_classify(config, target):
            assert evaluate(config, target, runtime, trained=trained).total > 0
        else:
            assert method in ("probe", "ncm", "lppp")
            with pytest.raises(UserError, match="has no rule for classes that it did not learn, such as 'five'"):
                evaluate(config, target, runtime, trained=trained)


@pytest.mark.parametrize(("method", "options"), [
    ("tipadapterf", {}), ("tipadapterf", {"selection": "test"}), ("taskres", {}), ("clap", {}), ("prolip", {}),
])  # fmt: skip
def test_a_paused_training_on_features_ends_with_the_bits_of_one_that_was_not(
    method, options, few_digits, short_checkpoint, tmp_path
):
    config = plan(short_checkpoint, method, options=options)
    whole, paused = (make_runtime(few_digits, tmp_path / name) for name in ("whole", "paused"))
    train(config, whole)
    train(config, paused, until=1)
    train(config, paused)
    for name, tensor in tensors(whole, config).items():
        assert torch.equal(tensor, tensors(paused, config)[name]), name


def train_blind(data: str, results: str, checkpoint: str, methods: dict[str, dict[str, str]]) -> None:
    """Train each method with these options in this process, which can open no file of the test split."""
    split = str(Path(data, "digits/test"))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and split in str(arguments[0]):
            raise RuntimeError(f"{arguments[0]} was opened")

    sys.addaudithook(refuse)
    for method, options in methods.items():
        short = {"epochs": 1, "batch_size": 5}
        config = plan(checkpoint, method, shots=1, options=options, overrides=short)
        result = train(config, make_runtime(data, results))
        assert isinstance(result, TrainResult), method


def test_a_training_opens_no_file_of_the_test_split(few_digits, short_checkpoint, tmp_path):
    """Neither images nor labels nor paths, unless the public rule of Tip-Adapter-F is asked for."""
    names = *ON_FEATURES, "coop", "procap", "dpc", "kdpl", "prograd"
    methods = {name: SHORT_OPTIONS.get(name, {}) | needed_options(name, short_checkpoint) for name in names}
    arguments = str(few_digits), str(tmp_path), str(short_checkpoint)
    [ended] = run_ranks(1, train_blind, *arguments, methods)
    assert ended.code == 0, ended.err
    [stopped] = run_ranks(1, train_blind, *arguments, {"tipadapterf": {"selection": "test"}})
    assert stopped.code and f"{few_digits / 'digits/test'}" in stopped.err and "was opened" in stopped.err


def test_the_public_rule_is_read_back_and_never_worse_on_the_test_images(few_digits, short_checkpoint, tmp_path):
    runtime, target = make_runtime(few_digits, tmp_path), Target("digits", "base")
    configs = [plan(short_checkpoint, "tipadapterf", options={"selection": by}) for by in ("validation", "test")]
    for config in configs:
        train(config, runtime)
    counts = [evaluate(config, target, runtime).correct for config in configs]
    assert counts[1] >= counts[0]


def test_image_features_of_a_packed_set_give_the_counts_of_the_nearest_mean(few_digits, short_checkpoint, tmp_path):
    runtime, config = make_runtime(few_digits, tmp_path), plan(short_checkpoint, "ncm", shots=0)
    train(config, runtime)
    evaluated = evaluate(config, Target("digits", "base"), runtime)
    read = partial(procap.features, "digits", classes="base", backbone=str(short_checkpoint), data=few_digits)
    known, test = read("train"), read("test")
    means = torch.stack([normalize(known.features[known.labels == label]).sum(dim=0) for label in range(5)])
    predicted = (normalize(test.features) @ normalize(means).t()).argmax(dim=1)
    assert test.classnames == ("zero", "one", "two", "three", "four") and len(test.paths) == evaluated.total
    assert int((predicted == test.labels).sum()) == evaluated.correct


class Weighted(NearestMean):
    """A method on features that reads a file in its training."""

    required_option = "weights"

    class Options(NearestMean.Options):
        weights: str = Field("", description="file of weights")

    @classmethod
    def file_digests(cls, options, dataset):
        return {"weights": file_sha256(Path(options.weights))}

    def prepare_training(self):
        super().prepare_training()
        self.weights = float(Path(self.options.weights).read_text())


def test_a_method_on_features_prepares_its_training_and_records_its_files(
    few_digits, short_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setitem(METHODS, "weighted", f"{__name__}:Weighted")
    runtime, file = make_runtime(few_digits, tmp_path / "results"), tmp_path / "weights.txt"
    with pytest.raises(UsageError, match=r"Weighted needs --option weights=\.\.\., which"):
        train(plan(short_checkpoint, "weighted"), runtime)
    config = plan(short_checkpoint, "weighted", options={"weights": str(file)})
    with pytest.raises(FileNotFoundError):
        train(config, runtime)
    file.write_text("0.5")
    assert train(config, runtime).files == {"weights": file_sha256(file)}
    file.write_text("0.6")
    with pytest.raises(UserError, match="was trained on another content of weights"):
        train(config, runtime)


def stop_while_encoding(data: str, results: str, checkpoint: str, stopped_rank: int) -> None:
    """Send this process a signal at its second batch, if it is the rank to be stopped; returns on Interrupted."""
    calls, encode = [], CLIP.encode_image
    rank = int(os.environ.get("RANK", "0"))

    def encode_and_stop(self, images, *more):
        calls.append(len(images))
        if len(calls) == 2 and rank == stopped_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return encode(self, images, *more)

    CLIP.encode_image = encode_and_stop
    # Of 10 images on two processes each has three batches.
    config = plan(checkpoint, "ncm", overrides={"test_batch_size": 2})
    with init_process_group(ranks_from_environment(), torch.device("cpu")) as group:
        with pytest.raises(Interrupted, match="SIGTERM: stopped base/digits/ncm") as caught:
            train(config, make_runtime(data, results), group=group)
        assert caught.value.exit_code == 143 and calls == [2, 2]
    print("stopped")


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_stops_the_encoding_of_images_on_all_ranks(size, few_digits, short_checkpoint, tmp_path):
    arguments = str(few_digits), str(tmp_path), str(short_checkpoint), size - 1
    for ended in run_ranks(size, stop_while_encoding, *arguments):
        assert (ended.code, ended.out) == (0, "stopped\n"), ended.err
    assert not list(tmp_path.rglob("train.json"))


def test_epochs_use_the_views_of_a_bank_in_turn(few_digits, short_checkpoint, short_clip):
    config = plan(short_checkpoint, "taskres")
    samples = select_training_images(open_dataset(few_digits, "digits"), 2, 1, "base").train
    numbers = torch.arange(len(samples))[:, None, None] * 10 + torch.arange(3)[None, :, None]
    bank = FeatureBank(numbers, torch.from_numpy(samples.labels), torch.zeros(0, 1), torch.zeros(0))
    loader = FeatureLoader(bank, samples, config, train_augment(config.recipe, short_clip))
    for epoch in range(7):
        for features, labels in loader.batches(epoch):
            images, views = features[:, 0] // 10, features[:, 0] % 10
            assert (views == epoch % 3).all()
            assert torch.equal(labels, bank.labels[images])


def test_groups_name_methods_and_suites_leave_out_targets_without_a_rule():
    groups = method_groups()
    assert groups["probabilistic"] == ["bpl", "rebapl", "procap"] and len(groups["adapters"]) == 15
    assert {*METHODS} - {name for group in groups.values() for name in group} == {"zeroshot", "skipt"}
    suite = load_suite("base-to-novel")
    assert suite.name in SUITES
    runs = suite.plan(suite.options(MINI, methods=("probe", "tipadapter"), datasets=("digits",), seeds=(1,)))
    targets = {run.variant.method: run.spec.targets for run in runs}
    assert targets == {"probe": ("digits:base:test",), "tipadapter": ("digits:base:test", "digits:novel:test")}
    assert {run.spec.config.recipe_name for run in runs} == {"published"}, "the profile's recipe is for prompts"


def test_a_setting_is_chosen_on_at_most_four_validation_images_per_class_also_without_shots(
    few_digits, short_checkpoint, tmp_path
):
    runtime = make_runtime(few_digits, tmp_path)
    run = make_run(plan(short_checkpoint, "probe", shots=0), runtime)
    setup = set_up(run)
    validation, test = choosing_images(run, setup.method, setup.selection.val)
    assert np.bincount(validation.labels).max() == 4 and len(validation) < len(setup.selection.val) and not len(test)
