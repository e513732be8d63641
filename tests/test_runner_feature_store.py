"""Features that an earlier run has stored change the time of a run and nothing else."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import run as command
from rank_processes import run_ranks
from safetensors.torch import load_file
from sessions import evaluate, train
from small_runs import make_runtime

from procap.clip import CLIP
from procap.errors import UsageError
from procap.plan import NO_CHANGE
from runner.api import features
from runner.config import Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.feature_store import EncodedImages, FeatureStore
from runner.planning import plan_run
from runner.progress_bar import ProgressDisplay
from runner.run_folders import RunFolder
from runner.session import Session

TARGET = Target("digits", "base")
OF_TIMES = {"seconds", "phases", "stored_seconds", "images_per_second", "images_per_second_model", "written"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of the store, in an empty cache."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PROCAP_FEATURES_GB", "1")
    return tmp_path / "home" / "features"


def run(method, few_digits, short_checkpoint, results, **more):
    """Train and evaluate; returns both results without times, and the checkpoint."""
    fields = {"shots": 2, "backbone": str(short_checkpoint), "overrides": {"epochs": 2} if method == "coop" else {}}
    config, runtime = plan_run(method=method, dataset="digits", **fields | more), make_runtime(few_digits, results)
    trained = train(config, runtime)
    tensors = load_file(RunFolder(results / config.path).checkpoint_file)
    return trained, evaluate(config, TARGET, runtime), {name: tensor.tolist() for name, tensor in tensors.items()}


def encode_blank(self, images, plan=NO_CHANGE):
    """Encode an image of the warm-up; there is none to encode else."""
    assert len(images) == 1 and not images.any()
    return self.visual(images, plan, self.optimized)[0]


def without_times(results):
    trained, evaluated, tensors = results
    return trained.model_dump(exclude=OF_TIMES | {"epochs"}), evaluated.model_dump(exclude=OF_TIMES), tensors


def test_the_progress_of_stored_features_reaches_their_number(
    few_digits, short_checkpoint, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ProgressDisplay, "PLAIN_SECONDS", 0)
    words = ["--methods", "zeroshot", "--datasets", "digits", "--backbone", short_checkpoint, "--data", few_digits]
    for name in "ab":
        code, _, err = command(capsys, "eval", *words, "--results", tmp_path / name, "--tracking", "off")
        shown = re.findall(r"(\d+)/(\d+) images", err)
        assert code == 0 and {done == total for done, total in shown[-1:]} == {True}, err


@pytest.mark.parametrize("method", ["probe", "tipadapter", "coop", "tda"])
def test_stored_features_give_the_bits_of_encoded_images(
    method, few_digits, short_checkpoint, folder, tmp_path, monkeypatch
):
    first = run(method, few_digits, short_checkpoint, tmp_path / "first")
    assert first[1].stored_seconds == 0 and list(folder.glob("*.safetensors"))
    if method != "coop":
        monkeypatch.setattr(CLIP, "encode_image", encode_blank)
    second = run(method, few_digits, short_checkpoint, tmp_path / "second")
    monkeypatch.undo()
    assert without_times(first) == without_times(second)
    # The rate is that of encoding and classifying, not that of reading a file.
    assert 0 < second[1].stored_seconds < second[1].seconds
    assert second[1].images_per_second < 1.5 * first[1].images_per_second


def test_features_of_a_tower_that_the_method_changes_are_not_stored(few_digits, short_checkpoint, folder, tmp_path):
    run("prolip", few_digits, short_checkpoint, tmp_path)
    assert not [*folder.glob("*")]


def test_features_that_a_resumed_training_reads_again_count_once(few_digits, short_checkpoint, folder, tmp_path):
    fields = {"shots": 2, "backbone": str(short_checkpoint), "overrides": {"epochs": 2, "batch_size": 5}}
    config = plan_run(method="clipadapter", dataset="digits", **fields)
    encoded, straight, paused = (make_runtime(few_digits, tmp_path / name) for name in "abc")
    train(config, encoded, until=1)
    train(config, paused, until=1)
    seconds = [train(config, runtime).stored_seconds for runtime in (straight, paused, encoded)]
    # What the first process has encoded is no stored work when it goes on.
    assert seconds[0] == pytest.approx(seconds[1]) and seconds[0] > 0 == seconds[2]


def test_features_from_python_are_those_that_a_training_has_stored(
    few_digits, short_checkpoint, folder, tmp_path, monkeypatch
):
    read = partial(features, "digits", classes="base", backbone=str(short_checkpoint), data=few_digits)
    monkeypatch.setenv("PROCAP_FEATURES_GB", "0")
    encoded = read("train"), read("test")
    monkeypatch.setenv("PROCAP_FEATURES_GB", "1")
    config = plan_run(method="ncm", dataset="digits", backbone=str(short_checkpoint), shots=0)
    train(config, make_runtime(few_digits, tmp_path))
    assert torch.equal(read("test").features, encoded[1].features)
    monkeypatch.setattr(CLIP, "encode_image", encode_blank)
    for split, computed in zip(("train", "test"), encoded, strict=True):
        assert torch.equal(read(split).features, computed.features)


def test_a_damaged_file_is_computed_again_and_the_oldest_make_room(folder, caplog):
    store = FeatureStore(folder, most_bytes=50_000)
    rows = torch.arange(2_000.0).reshape(20, 100)
    for number in range(9):
        store.write(f"list {number}", EncodedImages(rows + number, {"model": 0.5}))
        if number > 1:
            # A use, which keeps the first ones.
            assert torch.equal(store.read("list 0").features, rows)
    assert [number for number in range(9) if store.read(f"list {number}")] == [0, 4, 5, 6, 7, 8]
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 50_000
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert store.read("list 8") is None and "its SHA-256 differs" in caplog.text
    store.write("list 8", EncodedImages(rows, {}))
    assert torch.equal(store.read("list 8").features, rows)
    store.write("large", EncodedImages(torch.zeros(200, 100), {}))
    assert store.read("large") is None


def test_other_precision_shots_or_images_are_other_features(few_digits, short_checkpoint, folder, tmp_path):
    counts = []
    for number, more in enumerate(({}, {"shots": 1}, {"precision": "bf16"}, {"seed": 2}, {})):
        run("ncm", few_digits, short_checkpoint, tmp_path / str(number), **more)
        counts.append(len(list(folder.iterdir())))
    # Training images of one shot, all in bf16, training images of another seed, and nothing new.
    assert counts == [2, 3, 5, 6, 6]


def test_a_rate_is_that_of_the_workers_next_to_it(few_digits, short_checkpoint, folder, tmp_path):
    config = plan_run(method="zeroshot", dataset="digits", backbone=str(short_checkpoint))
    train(config, make_runtime(few_digits, tmp_path))
    results = [evaluate(config, TARGET, make_runtime(few_digits, tmp_path, workers=n), force=True) for n in (0, 2, 2)]
    assert [(each.workers, each.stored_seconds > 0) for each in results] == [(0, False), (2, False), (2, True)]


def test_features_of_a_folder_that_cannot_be_touched_are_read(folder, monkeypatch):
    FeatureStore(folder, 10**6).write("some", EncodedImages(torch.ones(10, 10), {}))

    def refuse(file):
        raise PermissionError(file)

    # As for the files of a different user.
    monkeypatch.setattr("os.utime", refuse)
    assert FeatureStore(folder, 10**6).read("some").features.sum() == 100 and [*folder.iterdir()]


def test_a_size_of_the_store_that_is_none_is_refused(few_digits, tmp_path, monkeypatch):
    for text in ("many", "-1", "nan"):
        monkeypatch.setenv("PROCAP_FEATURES_GB", text)
        with pytest.raises(UsageError, match=f"PROCAP_FEATURES_GB = {text}: give a number"):
            _ = Session(make_runtime(few_digits, tmp_path)).features


def test_clean_lists_what_can_be_made_again_and_deletes_it_when_told(folder, tmp_path, capsys):
    (disk := tmp_path / "disk").mkdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(disk)
    FeatureStore(folder, 10**6).write("some", EncodedImages(torch.zeros(10, 10), {}))
    kept = tmp_path / "home" / "data" / "digits" / "manifest.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    code, out, _ = command(capsys, "clean", "--json")
    size = json.loads(out)["bytes"]["features"]
    assert code == 0 and size == sum(file.stat().st_size for file in folder.iterdir()) > 400
    code, out, err = command(capsys, "clean", "features", "--yes", "--json")
    assert (code, json.loads(out)["bytes"]) == (0, {"features": size}) and "0.0 MB deleted" in err
    assert not any(disk.iterdir()) and kept.exists()
    code, _, err = command(capsys, "clean", "feature")
    assert code == 2 and "did you mean features" in err


def evaluate_in_group(data: str, results: str, checkpoint: str, method: str) -> None:
    """Print the answers of an evaluation by all processes, and whether their features were stored.

    The last process stores features in any case, as a separate host with different variables does.
    """
    if os.environ["RANK"] == "1":
        os.environ["PROCAP_FEATURES_GB"] = "1"
    config = plan_run(method=method, dataset="digits", shots=2, backbone=checkpoint, overrides={"test_batch_size": 8})
    with init_process_group(ranks_from_environment(), torch.device("cpu")) as group:
        runtime = make_runtime(data, results)
        train(config, runtime, group=group)
        result = evaluate(config, TARGET, runtime, group=group)
    print(result.predicted, result.confidence, result.stored_seconds > 0)


def test_stored_features_of_two_processes_give_the_answers_of_one(few_digits, short_checkpoint, folder, tmp_path):
    printed = []
    for number, (size, method, limit) in enumerate(
        ((2, "zeroshot", 1), (2, "ncm", 1), (1, "zeroshot", 1), (2, "ncm", 0))
    ):
        where = str(few_digits), str(tmp_path / str(number)), str(short_checkpoint)
        environ = {"PROCAP_HOME": os.environ["PROCAP_HOME"], "PROCAP_FEATURES_GB": str(limit)}
        ended = run_ranks(size, evaluate_in_group, *where, method, environ=environ)
        assert [each.code for each in ended] == [0] * size, ended[0].err
        assert len({each.out for each in ended}) == 1
        printed.append(ended[0].out.rsplit(maxsplit=1))
    # The stored time is that of two processes, so that one process computes the features again, with equal bits.
    assert [stored for _, stored in printed] == ["False", "True", "False", "False"]
    assert printed[0][0] == printed[2][0] and printed[1][0] == printed[3][0]
