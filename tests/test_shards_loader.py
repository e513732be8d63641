"""Streams: the same batches and results by index and from start to end, and each test image exactly once."""

import itertools
import json
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_server import LocalServer
from rank_processes import run_ranks
from sessions import evaluate, train
from small_runs import make_runtime, seeded
from toy_shards import toy_source

from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.planning import plan_run
from shards import pipeline
from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.kept_crops import KeptCrops
from shards.loader import DecodedImages, LoaderOptions, TrainLoader, evaluation_batches, shard_order
from shards.mirror import mirror_root
from shards.pack import pack_source
from shards.reader import ImageList, open_dataset
from shards.transforms import EvalTransform, TrainAugment

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
AUGMENT = TrainAugment(8, MEAN, STD, (0.3, 1.0), colour_jitter=0.2, rotation=5)
TWO_VIEWS = TrainAugment(8, MEAN, STD, augmentation="randaugment", views=2)
TRANSFORM = EvalTransform(8, MEAN, STD)
PACKINGS = (1, 5, 50)  # images per shard


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    pack_source(toy_source(per_shard=5), root)
    return root


@pytest.fixture(scope="module")
def packings(tmp_path_factory) -> dict[int, tuple[ImageList, torch.Tensor]]:
    """The training images by images per shard, with what the test transform makes of them one by one."""
    splits = {}
    for per_shard in PACKINGS:
        root = tmp_path_factory.mktemp("packed")
        pack_source(toy_source(per_shard=per_shard), root)
        split = open_dataset(root, "toy").open_images("train")
        splits[per_shard] = split, torch.stack([TRANSFORM(split.image(i)) for i in range(len(split))])
    return splits


@pytest.fixture
def train_part(root) -> ImageList:
    return open_dataset(root, "toy").open_images("train")


@pytest.fixture
def test_part(root) -> ImageList:
    return open_dataset(root, "toy").open_images("test")


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(("batch", "steps", "sizes"), [(4, 5, {4}), (23, 1, {23}), (22, 1, {22}), (24, 1, {23})])
def test_the_last_batch_is_dropped_only_when_there_is_a_full_one(train_part, batch, steps, sizes):
    loader = TrainLoader(train_part, batch, AUGMENT, seed=1)
    batches = list(loader.batches(0))
    assert len(batches) == loader.steps_per_pass == steps
    assert {len(labels) for _, labels in batches} == sizes
    images, labels = batches[0]
    assert images.shape[1:] == (3, 8, 8) and images.dtype == torch.float32 and labels.dtype == torch.int64


def test_an_epoch_visits_images_once_in_an_order_of_seed_and_epoch(train_part):
    loader = TrainLoader(train_part, 4, AUGMENT, seed=1)
    orders = [tuple(loader.order(epoch)) for epoch in range(4)]
    assert all(sorted(order) == list(range(23)) for order in orders) and len(set(orders)) == 4
    assert orders == [tuple(TrainLoader(train_part, 9, AUGMENT, seed=1).order(epoch)) for epoch in range(4)]
    assert TrainLoader(train_part, 4, AUGMENT, seed=2).order(0) != list(orders[0])
    labels = torch.cat([labels for _, labels in loader.batches(0)])
    assert labels.tolist() == train_part.labels[list(orders[0][:20])].tolist()


def test_augmentation_depends_on_seed_pass_and_image_not_on_the_batch(train_part):
    small, large = TrainLoader(train_part, 4, AUGMENT, seed=1), TrainLoader(train_part, 20, AUGMENT, seed=1)
    assert torch.equal(torch.cat([images for images, _ in small.batches(3)]), next(large.batches(3))[0])
    one = {i: image for i, image in zip(small.order(0), torch.cat([x for x, _ in small.batches(0)]), strict=False)}
    two = {i: image for i, image in zip(small.order(1), torch.cat([x for x, _ in small.batches(1)]), strict=False)}
    assert sum(torch.equal(one[i], two[i]) for i in one.keys() & two.keys()) < 3


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(0, 23), batch=st.integers(1, 12), world_size=st.integers(1, 6), workers=st.integers(0, 3),
    per_shard=st.sampled_from(PACKINGS),
)  # fmt: skip
def test_processes_evaluate_every_image_exactly_once(packings, count, batch, world_size, workers, per_shard):
    """In the batches of one process, and equally many on each, whatever the shards, workers and processes."""
    whole, reference = packings[per_shard]
    split = whole.subset(range(count))
    ranks = [
        list(evaluation_batches(split, TRANSFORM, batch, workers, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert [len(batches) for batches in ranks] == [-(-count // batch // world_size)] * world_size
    real = []
    for images, labels, indices in (part for batches in ranks for part in batches):
        if -1 in indices:
            assert (indices.tolist(), labels.tolist(), len(images), bool(images.any())) == ([-1], [-1], 1, False)
        else:
            real.append(indices.tolist())
            assert labels.tolist() == split.labels[indices.numpy()].tolist()
            assert torch.equal(images, torch.stack([reference[i] for i in indices.tolist()]))
    assert real == [list(range(start, min(start + batch, count))) for start in range(0, count, batch)]
    # Rank 0, which reports the speed, never has padding.
    assert not any(-1 in indices for _, _, indices in ranks[0])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 23), batch=st.integers(1, 30), world_size=st.integers(1, 6), workers=st.integers(0, 3),
    start=st.integers(0, 4), epoch=st.integers(0, 2), augment=st.sampled_from([AUGMENT, TWO_VIEWS]),
)  # fmt: skip
def test_processes_share_the_training_batch_of_one(packings, count, batch, world_size, workers, start, epoch, augment):
    """Equally many steps on all of them, resumed or not; their parts together are what one process would see."""
    split = packings[5][0].subset(range(count))
    whole = list(TrainLoader(split, batch, augment, seed=1).batches(epoch))
    assert len(whole) == max(1, count // batch)
    assert all(images.shape[1:] == augment.shape for images, _ in whole)
    for rank in range(world_size):
        loader = TrainLoader(split, batch, augment, 1, LoaderOptions(workers, rank, world_size))
        part = list(loader.batches(epoch, start))
        assert same(part, [(images[rank::world_size], labels) for images, labels in whole[start:]])


def test_a_part_of_the_images_is_evaluated_in_order(test_part):
    for count in (0, 1, 7, 17):
        part = test_part.subset(range(count))
        indices = [i for *_, batch in evaluation_batches(part, TRANSFORM, 5) for i in batch.tolist()]
        assert indices == list(range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_stops_the_evaluation(tmp_path, workers):
    pack_source(toy_source(per_shard=5), tmp_path)
    split = open_dataset(tmp_path, "toy").open_images("test")
    (tmp_path / "toy/test/2.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"2\.tar cannot be used"):
        list(evaluation_batches(split, TRANSFORM, 4, workers))


def test_threads_end_when_a_stream_is_left_early(train_part):
    before = set(threading.enumerate())
    loader = TrainLoader(train_part, 4, AUGMENT, 1, LoaderOptions(workers=3)).batches(0)
    next(loader)
    started = set(threading.enumerate()) - before
    assert started and all(thread.is_alive() for thread in started)
    del loader
    assert not any(thread.is_alive() for thread in started)


def test_decoded_images_are_kept_up_to_a_bound(train_part):
    size = 4 * 9 * 7
    for room in (0, 3 * size, 100 * size):
        images = DecodedImages(train_part, room)
        first, second = ([images[i] for i in range(23)] for _ in range(2))
        assert sum(a is b for a, b in zip(first, second, strict=True)) == min(23, room // size)
        bounded = TrainLoader(train_part, 4, AUGMENT, 1, LoaderOptions(cache_bytes=room))
        assert same(list(bounded.batches(0)), list(TrainLoader(train_part, 4, AUGMENT, seed=1).batches(0)))


MANY_PHOTOS = """
import io, sys
from pathlib import Path
import numpy as np, torch
from PIL import Image
sys.path.insert(0, "tests")
from toy_shards import toy_source
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.source import ImageRecord
from shards.loader import evaluation_batches
from shards.transforms import EvalTransform
def photo(number):
    noise = np.random.default_rng(number).integers(0, 256, (38, 50, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).resize((500, 375)).save(data, "JPEG")
    return data.getvalue()
def photos(split):
    several = [photo(number) for number in range(10)]
    for i in range(450):
        yield ImageRecord(f"{i}.jpg", 0, several[i % 10])
def peak():
    # Of this program alone, in kilobytes: what getrusage tells begins with those of its parent.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
torch.set_num_threads(1)
root = Path(sys.argv[1])
pack_source(toy_source(photos, counts={"test": 450}, per_shard=50), root)
test = open_dataset(root, "toy").open_images("test")
transform = EvalTransform(224, (0.5, 0.5, 0.5), (1, 1, 1))
for count in (50, 450):
    batches = evaluation_batches(test.subset(np.arange(count)), transform, 10, workers=2)
    assert sum(len(indices) for _, _, indices in batches) == count
    print(peak())
"""


def test_evaluation_takes_no_more_memory_for_more_images(tmp_path):
    """If anything held 400 photographs more, decoded or as the tower reads them, that would be 225 MB or more.

    How much the allocator keeps depends on how the threads of the decoder meet: 50 MB were seen on a busy machine.
    """
    program = [sys.executable, "-c", MANY_PHOTOS, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr
    few, many = map(int, run.stdout.split())
    assert many - few < 120_000


TARGETS = [Target("digits", "base"), Target("digits", "novel")]


@pytest.fixture
def server(tmp_path):
    pack_source(toy_source(per_shard=4), tmp_path / "there")
    with LocalServer(tmp_path / "there") as server:
        yield server


@pytest.fixture
def mirrored(server, tmp_path) -> Path:
    return mirror_root(server.url, tmp_path / "cache")


def flat(batches: Any) -> list[torch.Tensor]:
    return [tensor for batch in batches for tensor in batch]


@pytest.mark.parametrize(("workers", "world_size", "count"), [(0, 1, 17), (3, 1, 7), (2, 3, 17)])
def test_streamed_batches_are_those_of_local_shards_and_nothing_is_stored(server, mirrored, workers, world_size, count):
    local = open_dataset(server.folder, "toy").open_images("test").subset(range(count))
    streamed = open_dataset(mirrored, "toy", remote=True).open_images("test", sequential=True).subset(range(count))
    for rank in range(world_size):
        share = {"rank": rank, "world_size": world_size}
        expected = flat(evaluation_batches(local, TRANSFORM, 3, **share))
        batches = flat(evaluation_batches(streamed, TRANSFORM, 3, workers, **share))
        assert len(batches) == len(expected) and all(map(torch.equal, batches, expected))
    assert not list(mirrored.rglob("*.tar"))


def test_users_get_a_webdataset_of_every_sample_once(server, mirrored):
    split = open_dataset(server.folder, "toy").open_images("test")
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


BREAK = {
    "without its end mark": (lambda data: data[:-1024], "bytes instead of"),
    "one image altered": (lambda data: data.replace(b"IDAT", b"IDAU", 1), "SHA-256 differs"),
    "longer": (lambda data: data + bytes(10), "more than"),
}


@pytest.mark.parametrize("kind", BREAK)
def test_a_broken_shard_is_refused_by_name(server, mirrored, kind):
    build, words = BREAK[kind]
    file = server.folder / "toy" / "test" / "1.tar"
    file.write_bytes(build(file.read_bytes()))
    streamed = open_dataset(mirrored, "toy", remote=True).open_images("test", sequential=True)
    for read in (
        lambda: list(evaluation_batches(streamed, TRANSFORM, 3)),
        lambda: list(pipeline("toy", "test", root=server.url)),
    ):
        with pytest.raises(UserError, match=words) as error:
            read()
        assert "test/1.tar" in str(error.value) and "\n" not in str(error.value)


def runtime(data: str, results: str, no_cache: bool) -> RuntimeConfig:
    return make_runtime(data, results, no_cache=no_cache, workers=1)


def evaluate_streamed(data: str, results: str, checkpoint: str) -> None:
    ranks = ranks_from_environment()
    place = runtime(data, results if ranks.is_first else f"{results}-of-{ranks.rank}", no_cache=True)
    config = plan_run(method="coop", dataset="digits", shots=2, backbone=checkpoint, overrides={"epochs": 1})
    with init_process_group(ranks, torch.device("cpu")) as group:
        found = [evaluate(config, target, place, group=group, force=True) for target in TARGETS]
        print(json.dumps([[one.correct, one.predicted] for one in found]))


def test_an_evaluation_without_a_cache_equals_the_local_one_on_one_and_two_processes(short_checkpoint, tmp_path):
    counts = {"train": 60, "val": 20, "test": 61}
    pack_source(replace(builtin_source(find("digits")), counts=counts, per_shard=20), tmp_path / "data")
    results = tmp_path / "results"
    local = runtime(str(tmp_path / "data"), str(results), no_cache=False)
    config = plan_run(method="coop", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides={"epochs": 1})
    train(config, local)
    expected = [evaluate(config, target, local) for target in TARGETS]
    wanted = [[one.correct, one.predicted] for one in expected]
    with LocalServer(tmp_path / "data") as server:
        mirrored = mirror_root(server.url, tmp_path / "cache")
        for data in (tmp_path / "data", mirrored):
            place = runtime(str(data), str(results), no_cache=True)
            found = [evaluate(config, target, place, force=True) for target in TARGETS]
            assert [[one.correct, one.predicted] for one in found] == wanted
            assert [one.calibration for one in found] == [one.calibration for one in expected]
        ended = run_ranks(2, evaluate_streamed, str(mirrored), str(results), str(short_checkpoint))
        assert json.loads(ended[0].out.splitlines()[-1]) == json.loads(json.dumps(wanted))
    assert not list(mirrored.rglob("*.tar"))


@pytest.mark.parametrize(("cache_bytes", "window_bytes"), [(0, 4_000), (3_000, 4_000), (2**30, None)])
def test_streamed_training_batches_are_those_of_stored_shards_on_any_number_of_processes(
    server, mirrored, cache_bytes, window_bytes
):
    stored = open_dataset(server.folder, "toy").open_images("train")
    streamed = open_dataset(mirrored, "toy", remote=True).open_images("train", sequential=True)
    plain = TrainAugment(8, MEAN, STD)
    rooms = {"cache_bytes": cache_bytes, "window_bytes": window_bytes}
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        expected = TrainLoader(stored, 4, plain, 1, LoaderOptions(0, rank, world_size, **rooms))
        loader = TrainLoader(streamed, 4, plain, 1, LoaderOptions(2, rank, world_size, **rooms))
        for epoch, start in ((0, 0), (1, 3)):
            assert same(list(loader.batches(epoch, start)), list(expected.batches(epoch, start)))
    assert not list(mirrored.rglob("*.tar"))


def most_held(split: ImageList, order: list[int]) -> int:
    """The most images that a reader of whole shards holds: those of begun shards that were not used yet."""
    sizes, begun, held, most = Counter(split.rows["shard"].tolist()), set(), 0, 0
    for shard in split.rows["shard"][order].tolist():
        held += 0 if shard in begun else sizes[shard]
        begun.add(shard)
        most = max(most, held)
        held -= 1
    return most


def test_a_training_on_all_images_mixes_them_within_a_window(packings):
    for per_shard, (split, _) in packings.items():
        size = int(split.rows["size"].sum())
        assert shard_order(split, None, seeded()) == shard_order(split, size, seeded())
        for part in (1, 2, 4):
            order = shard_order(split, size // part, seeded())
            assert sorted(order) == [*range(len(split))] and order != shard_order(split, size // part, seeded(1))
            assert most_held(split, order) <= len(split) / part + per_shard


@pytest.mark.parametrize("method", ["coop", pytest.param("aapl", marks=pytest.mark.slow), "taskres"])
def test_a_run_on_all_images_streams_them_and_learns_what_it_learns_from_stored_ones(
    method, short_checkpoint, tmp_path, monkeypatch
):
    counts = {"train": 60, "val": 20, "test": 20}
    pack_source(replace(builtin_source(find("digits")), counts=counts, per_shard=10), tmp_path / "data")
    monkeypatch.setattr("runner.setup.WINDOW_BYTES", 3_000)
    config = plan_run(
        method=method, dataset="digits", shots=0, backbone=str(short_checkpoint),
        overrides={"epochs": 2, "batch_size": 4},
    )  # fmt: skip
    learned = {}
    with LocalServer(tmp_path / "data") as server:
        mirrored = mirror_root(server.url, tmp_path / "cache")
        for data in (tmp_path / "data", mirrored):
            settings = runtime(str(data), str(tmp_path / data.name), no_cache=True)
            result = train(config, settings)
            learned[data] = [epoch.terms for epoch in result.epochs], result.checkpoint_sha256
    assert learned[tmp_path / "data"] == learned[mirrored] and learned[mirrored][0]
    assert not list(mirrored.rglob("*.tar"))


@pytest.mark.parametrize(("room", "workers", "read"), [(2**20, 0, 0), (2**20, 2, 0), (1000, 0, 12), (0, 0, 17)])
def test_crops_are_kept_between_evaluations_while_there_is_room(test_part, monkeypatch, room, workers, read):
    """And the batches are the same, also of a part of the images."""
    kept, decoded, decode = KeptCrops(room), [], ImageList.decode
    monkeypatch.setattr(ImageList, "decode", lambda self, i, data: decoded.append(i) or decode(self, i, data))
    plain = [batch for batch, _, _ in evaluation_batches(test_part, TRANSFORM, 4)]
    for expected in (len(test_part), read):
        decoded.clear()
        batches = evaluation_batches(kept.wrap(test_part, TRANSFORM), TRANSFORM, 4, workers)
        assert all(torch.equal(one, other) for one, (other, _, _) in zip(plain, batches, strict=True))
        assert len(decoded) == expected
    part = kept.wrap(test_part.subset([3, 1]), TRANSFORM)
    assert all(part.decode_pixels(i, data).flags.writeable for i, data in enumerate(part.stream([0, 1])))
    [(images, _, _)] = evaluation_batches(part, TRANSFORM, 2)
    assert torch.equal(images, plain[0][[3, 1]])


def test_kept_crops_are_those_of_one_transform_and_split(few_digits):
    dataset = open_dataset(few_digits, "digits")
    kept, smaller = KeptCrops(), EvalTransform(6, MEAN, STD)
    parts = [dataset.open_images(split) for split in ("test", "train")]
    for images, transform in itertools.product(parts, (smaller, TRANSFORM)):
        plain, wrapped = (
            [pixels for pixels, _, _ in evaluation_batches(each, transform, 4)]
            for each in (images, kept.wrap(images, transform))
        )
        assert all(map(torch.equal, wrapped, plain))
