"""Shards read from start to end by webdataset: the same images and results as by index, and no broken shard passes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_server import Answer, LocalServer
from rank_processes import run_ranks
from small_runs import make_runtime
from toy_shards import toy_source

from benchmarks.cli import main
from runner.config import RuntimeConfig, Target, plan_run
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.evaluate import evaluate
from runner.train import train
from shards import loader, pipeline, remote
from shards.builtin_sources import builtin_source
from shards.errors import DataError
from shards.loader import TrainStream, evaluation_batches
from shards.mirror import mirror_root
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.transforms import TrainAugment, eval_transform

STATISTICS = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
TRANSFORM = eval_transform(16, *STATISTICS)
TARGETS = [Target("digits", "base"), Target("digits", "novel")]


@pytest.fixture
def server(tmp_path):
    pack_source(toy_source(), tmp_path / "there", per_shard=4)
    with LocalServer(tmp_path / "there") as server:
        yield server


@pytest.fixture
def root(server, tmp_path) -> Path:
    return mirror_root(server.url, tmp_path / "cache")


def flat(batches: Any) -> list[torch.Tensor]:
    return [tensor for batch in batches for tensor in batch]


@pytest.mark.parametrize(("workers", "world_size", "limit"), [(0, 1, None), (3, 1, 7), (2, 3, None)])
def test_streamed_batches_are_those_of_local_shards_and_nothing_is_stored(server, root, workers, world_size, limit):
    local = open_dataset(server.folder, "toy").split("test")
    streamed = open_dataset(root, "toy", stream=True).split("test")
    for rank in range(world_size):
        share: dict[str, Any] = {"limit": limit, "rank": rank, "world_size": world_size}
        expected = flat(evaluation_batches(local, TRANSFORM, 3, **share))
        found = flat(evaluation_batches(streamed, TRANSFORM, 3, workers, **share))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert not list(root.rglob("*.tar"))


@pytest.mark.parametrize("window", [6, 2**16])
def test_training_on_all_images_streams_the_batches_of_local_shards(server, root, monkeypatch, window):
    monkeypatch.setattr(loader, "WINDOW", window)
    augment = TrainAugment(16, *STATISTICS)
    local = open_dataset(server.folder, "toy").split("train")
    streamed = open_dataset(root, "toy", stream=True).split("train")
    for epoch in range(2):
        order = TrainStream(local, 4, augment, seed=1).order(epoch)
        assert sorted(order) == list(range(len(local)))
        for rank in range(2):
            streams = [TrainStream(s, 4, augment, seed=1, rank=rank, world_size=2) for s in (local, streamed)]
            expected, found = (flat(stream.epoch(epoch, start_step=1)) for stream in streams)
            assert expected and len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert not list(root.rglob("*.tar"))


def test_a_window_of_shards_serves_each_process_its_own_shards(monkeypatch):
    """Sets beyond the window are dealt by shard: with lanes in turn each of two processes needs half of the shards."""

    class Sixteen:
        rows = np.array([(n // 10,) for n in range(160)], [("shard", int)])

        def __len__(self) -> int:
            return 160

    monkeypatch.setattr(loader, "WINDOW", 80)
    order = loader._window_order(Sixteen(), torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    assert sorted(order) == list(range(160)) and order[:80] != sorted(order[:80])
    needed = [{order[p] // 10 for p in range(rank, 80, 2)} for rank in range(2)]
    assert [len(shards) for shards in needed] == [4, 4] and not needed[0] & needed[1]


def test_users_get_a_webdataset_of_every_sample_once(server, root):
    split = open_dataset(server.folder, "toy").split("test")
    for where in (str(server.folder), server.url, f"file://{server.folder}"):
        samples = list(pipeline("toy", "test", root=where))
        assert [sample["__key__"] for sample in samples] == [f"s{n:07d}" for n in range(len(split))]
        assert [int(sample["cls"]) for sample in samples] == split.labels.tolist()
        assert [sample["png"] for sample in samples] == [split.read(i) for i in range(len(split))]
    image, label = next(iter(pipeline("toy", "test", root=server.url).decode("pil").to_tuple("png", "cls")))
    assert (image.tobytes(), label) == (split.image(0).tobytes(), split.labels[0])


def test_workers_of_a_data_loader_share_the_shards(server):
    dataset = pipeline("toy", "train", root=str(server.folder)).to_tuple("__key__")
    keys = [key for batch in torch.utils.data.DataLoader(dataset, num_workers=2) for (key,) in batch]
    assert sorted(keys) == [f"s{n:07d}" for n in range(len(open_dataset(server.folder, "toy").labels("train")))]


def cut_between_members(file: Path) -> bytes:
    import tarfile

    with tarfile.open(file) as tar:
        return file.read_bytes()[: tar.getmembers()[3].offset]


BREAK = {
    "cut between members": (cut_between_members, "truncated"),
    "cut inside a member": (lambda file: file.read_bytes()[:700], "truncated"),
    "without its end mark": (lambda file: file.read_bytes()[:-1024], "truncated"),
    "one image altered": (lambda file: file.read_bytes().replace(b"IDAT", b"IDAU", 1), "SHA-256 differs"),
    "garbage": (lambda file: b"s" * file.stat().st_size, "not a readable shard"),
    "longer": (lambda file: file.read_bytes() + bytes(10), "more than"),
    "an archive in an archive": (lambda file: __import__("gzip").compress(file.read_bytes()), "does not begin"),
    "empty": (lambda file: b"", "does not begin"),
}


@pytest.mark.parametrize("kind", BREAK)
def test_a_broken_shard_is_refused_by_name(server, root, kind):
    build, words = BREAK[kind]
    file = server.folder / "toy" / "test" / "1.tar"
    file.write_bytes(build(file))
    streamed = open_dataset(root, "toy", stream=True).split("test")
    for read in (
        lambda: list(evaluation_batches(streamed, TRANSFORM, 3)),
        lambda: list(pipeline("toy", "test", root=server.url)),
    ):
        with pytest.raises(DataError, match=words) as error:
            read()
        assert "test/1.tar" in str(error.value) and "\n" not in str(error.value)


def test_a_connection_that_ends_early_is_refused(server, root):
    server.always["/toy/test/0.tar"] = Answer(cut=2000)
    with pytest.raises(DataError, match=r"test/0\.tar"):
        list(evaluation_batches(open_dataset(root, "toy", stream=True).split("test"), TRANSFORM, 3))


def test_a_server_that_stalls_in_the_middle_of_a_stream_is_named_before_the_time_limit(server, root, monkeypatch):
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(remote, "SOCKET_SECONDS", 0.5)
    server.always["/toy/test/0.tar"] = Answer(cut=2000, stall=1.0)
    split = open_dataset(root, "toy", stream=True).split("test")
    url = f"{server.url}/toy/test/0.tar"
    with pytest.warns(UserWarning, match=f"^waiting for {url}$"), pytest.raises(DataError, match="no answer in time"):
        list(evaluation_batches(split, TRANSFORM, 3))


def test_a_pause_between_images_of_a_stream_is_not_reported(server, monkeypatch, recwarn):
    monkeypatch.setattr(remote, "STALL_SECONDS", 1.0)
    images = iter(pipeline("toy", "test", root=server.url))
    next(images)
    time.sleep(1.5)
    assert not [warning for warning in recwarn if "waiting for" in str(warning.message)]


def runtime(data: str, results: str, no_cache: bool) -> RuntimeConfig:
    return make_runtime(data, results, no_cache=no_cache, workers=1)


def evaluate_streamed(data: str, results: str, checkpoint: str) -> None:
    """Evaluate a finished run without a cache, on one of several processes."""
    ranks = ranks_from_environment()
    place = runtime(data, results if ranks.first else f"{results}-of-{ranks.rank}", no_cache=True)
    config = plan_run(method="coop", dataset="digits", shots=2, backbone=checkpoint, overrides={"epochs": 1})
    with init_process_group(ranks, torch.device("cpu")) as group:
        found = [evaluate(config, target, place, group=group, force=True) for target in TARGETS]
        print(json.dumps([[one.correct, one.correct_bits] for one in found]))


def test_an_evaluation_without_a_cache_equals_the_local_one_on_one_and_two_processes(short_checkpoint, tmp_path):
    from dataclasses import replace

    from shards.catalogue import find

    counts = {"train": 60, "val": 20, "test": 61}
    pack_source(replace(builtin_source(find("digits")), counts=counts), tmp_path / "data", per_shard=20)
    results = tmp_path / "results"
    local = runtime(str(tmp_path / "data"), str(results), no_cache=False)
    config = plan_run(method="coop", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides={"epochs": 1})
    train(config, local)
    expected = [evaluate(config, target, local) for target in TARGETS]
    wanted = [[one.correct, one.correct_bits] for one in expected]
    with LocalServer(tmp_path / "data") as server:
        root = mirror_root(server.url, tmp_path / "cache")
        for data in (tmp_path / "data", root):
            place = runtime(str(data), str(results), no_cache=True)
            found = [evaluate(config, target, place, force=True) for target in TARGETS]
            assert [[one.correct, one.correct_bits] for one in found] == wanted
            assert [one.calibration for one in found] == [one.calibration for one in expected]
        ended = run_ranks(2, evaluate_streamed, str(root), str(results), str(short_checkpoint))
        assert json.loads(ended[0].out.splitlines()[-1]) == json.loads(json.dumps(wanted))
    assert not list(root.rglob("*.tar"))


@pytest.mark.parametrize("flags", [[], ["--no-cache"]])
def test_the_command_line_stores_no_shard_of_a_url_with_no_cache(few_digits, tmp_path, monkeypatch, capsys, flags):
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    run = ["--methods", "zeroshot", "--datasets", "digits", "--tracking", "off", "--device", "cpu", "--json"]
    correct = []
    with LocalServer(few_digits) as server:
        for data, more in ((str(few_digits), []), (server.url, flags)):
            place = ["--data", data, "--results", str(tmp_path / ("url" if more else "folder")), *more]
            assert main(["train", *run, *place]) == main(["eval", *run, *place, "--force"]) == 0
            evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])["evaluated"]
            correct.append([(one["target"], one["correct"]) for one in evaluated])
    assert correct[0] == correct[1]
    assert len(list((tmp_path / "home").rglob("*.tar"))) == (0 if flags else 1)
