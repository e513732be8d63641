"""Streams: the same batches whatever the workers, processes or interruptions, and each test image exactly once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_shards import toy_source

from shards.errors import DataError
from shards.loader import DecodedImages, TrainStream, evaluation_batches
from shards.pack import pack_source
from shards.reader import Split, open_dataset
from shards.transforms import TrainAugment, eval_transform

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
AUGMENT = TrainAugment(8, MEAN, STD, (0.3, 1.0), colour_jitter=0.2, rotation=5)
TRANSFORM = eval_transform(8, MEAN, STD)
PACKINGS = (1, 5, 50)  # images per shard


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    pack_source(toy_source(), root, per_shard=5)
    return root


@pytest.fixture(scope="module")
def packings(tmp_path_factory) -> dict[int, tuple[Split, torch.Tensor]]:
    """The training images by images per shard, with what the test transform makes of them one by one."""
    splits = {}
    for per_shard in PACKINGS:
        root = tmp_path_factory.mktemp("packed")
        pack_source(toy_source(), root, per_shard=per_shard)
        split = open_dataset(root, "toy").split("train")
        splits[per_shard] = split, torch.stack([TRANSFORM(split.image(i)) for i in range(len(split))])
    return splits


@pytest.fixture
def train(root) -> Split:
    return open_dataset(root, "toy").split("train")


@pytest.fixture
def test(root) -> Split:
    return open_dataset(root, "toy").split("test")


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(("batch", "steps", "sizes"), [(4, 5, {4}), (23, 1, {23}), (22, 1, {22}), (24, 1, {23})])
def test_the_last_batch_is_dropped_only_when_there_is_a_full_one(train, batch, steps, sizes):
    stream = TrainStream(train, batch, AUGMENT, seed=1)
    batches = list(stream.epoch(0))
    assert len(batches) == stream.steps_per_epoch == steps
    assert {len(labels) for _, labels in batches} == sizes
    images, labels = batches[0]
    assert images.shape[1:] == (3, 8, 8) and images.dtype == torch.float32 and labels.dtype == torch.int64


def test_an_epoch_visits_images_once_in_an_order_of_seed_and_epoch(train):
    stream = TrainStream(train, 4, AUGMENT, seed=1)
    orders = [tuple(stream.order(epoch)) for epoch in range(4)]
    assert all(sorted(order) == list(range(23)) for order in orders) and len(set(orders)) == 4
    assert orders == [tuple(TrainStream(train, 9, AUGMENT, seed=1).order(epoch)) for epoch in range(4)]
    assert TrainStream(train, 4, AUGMENT, seed=2).order(0) != list(orders[0])
    labels = torch.cat([labels for _, labels in stream.epoch(0)])
    assert labels.tolist() == train.labels[list(orders[0][:20])].tolist()


def test_augmentation_depends_on_seed_epoch_and_image_not_on_the_batch(train):
    small, large = TrainStream(train, 4, AUGMENT, seed=1), TrainStream(train, 20, AUGMENT, seed=1)
    assert torch.equal(torch.cat([images for images, _ in small.epoch(3)]), next(large.epoch(3))[0])
    one = {i: image for i, image in zip(small.order(0), torch.cat([x for x, _ in small.epoch(0)]), strict=False)}
    two = {i: image for i, image in zip(small.order(1), torch.cat([x for x, _ in small.epoch(1)]), strict=False)}
    assert sum(torch.equal(one[i], two[i]) for i in one.keys() & two.keys()) < 3


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(0, 23),
    batch=st.integers(1, 12),
    world_size=st.integers(1, 6),
    workers=st.integers(0, 3),
    per_shard=st.sampled_from(PACKINGS),
)
def test_processes_evaluate_every_image_exactly_once(packings, count, batch, world_size, workers, per_shard):
    """In blocks of the list and in equally many batches of equal sizes, whatever the shards, workers and processes."""
    whole, reference = packings[per_shard]
    split = whole.subset(range(count))
    ranks = [
        list(evaluation_batches(split, TRANSFORM, batch, workers, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    sizes = [[len(indices) for _, _, indices in batches] for batches in ranks]
    assert all(of_rank == sizes[0] for of_rank in sizes)
    assert sum(sizes[0]) == -(-count // world_size) and set(sizes[0][:-1]) <= {batch}
    seen: list[int] = []
    for batches in ranks:
        padding = 0
        for image, label, i in (one for part in batches for one in zip(*part, strict=True)):
            if i < 0:
                padding += 1
                assert (i, label) == (-1, -1) and not image.any()
            else:
                seen.append(int(i))
                assert label == split.labels[i] and torch.equal(image, reference[i])
        assert padding <= 1
    assert seen == list(range(count))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 23),
    batch=st.integers(1, 30),
    world_size=st.integers(1, 6),
    workers=st.integers(0, 3),
    start=st.integers(0, 4),
    epoch=st.integers(0, 2),
)
def test_processes_share_the_training_batch_of_one(packings, count, batch, world_size, workers, start, epoch):
    """Equally many steps on all of them, resumed or not; their parts together are what one process would see."""
    split = packings[5][0].subset(range(count))
    whole = list(TrainStream(split, batch, AUGMENT, seed=1).epoch(epoch))
    assert len(whole) == max(1, count // batch)
    for rank in range(world_size):
        stream = TrainStream(split, batch, AUGMENT, seed=1, workers=workers, rank=rank, world_size=world_size)
        part = list(stream.epoch(epoch, start))
        assert same(part, [(images[rank::world_size], labels) for images, labels in whole[start:]])


def test_a_limit_takes_the_first_images(test):
    for limit in (0, 1, 7, 17, 99):
        indices = [i for _, _, batch in evaluation_batches(test, TRANSFORM, 5, limit=limit) for i in batch.tolist()]
        assert indices == list(range(min(limit, 17)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_the_evaluation(tmp_path, workers):
    pack_source(toy_source(), tmp_path, per_shard=5)
    split = open_dataset(tmp_path, "toy").split("test")
    (tmp_path / "toy/test/2.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"2\.tar was cut short"):
        list(evaluation_batches(split, TRANSFORM, 4, workers))


def test_threads_end_when_a_stream_is_left_early(train):
    before = set(threading.enumerate())
    stream = TrainStream(train, 4, AUGMENT, seed=1, workers=3).epoch(0)
    next(stream)
    own = set(threading.enumerate()) - before
    assert own and all(thread.is_alive() for thread in own)
    del stream
    assert not any(thread.is_alive() for thread in own)


def test_decoded_images_are_kept_up_to_a_bound(train):
    size = 4 * 9 * 7
    for room in (0, 3 * size, 100 * size):
        images = DecodedImages(train, room)
        first, second = ([images[i] for i in range(23)] for _ in range(2))
        assert sum(a is b for a, b in zip(first, second, strict=True)) == min(23, room // size)
        bounded = TrainStream(train, 4, AUGMENT, seed=1, cache_bytes=room)
        assert same(list(bounded.epoch(0)), list(TrainStream(train, 4, AUGMENT, seed=1).epoch(0)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_is_read_in_the_first_epoch_only(train, workers, monkeypatch):
    reads: list[int] = []
    read = Split.read
    monkeypatch.setattr(Split, "read", lambda split, i: (reads.append(i), read(split, i))[1])
    stream = TrainStream(train, 4, AUGMENT, seed=1, workers=workers)
    for epoch in range(6):
        list(stream.epoch(epoch))
    used = {i for epoch in range(6) for i in stream.order(epoch)[:20]}
    assert sorted(reads) == sorted(used)
    again = TrainStream(train, 4, AUGMENT, seed=1, workers=workers, cache_bytes=0)
    list(again.epoch(0))
    list(again.epoch(1))
    assert len(reads) == len(used) + 40


MANY_PHOTOS = """
import io, sys
from pathlib import Path
import numpy as np, torch
from PIL import Image
sys.path.insert(0, "tests")
from toy_shards import toy_source
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.records import ImageRecord
from shards.loader import evaluation_batches
from shards.transforms import eval_transform

def photos(split):
    for i in range(10):
        noise = np.random.default_rng(i).integers(0, 256, (38, 50, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(noise).resize((500, 375)).save(data, "JPEG")
        yield ImageRecord(f"{i}.jpg", 0, data.getvalue())

def peak():
    # Of this program alone, in kilobytes: what getrusage tells begins with those of its parent.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.set_num_threads(1)
root = Path(sys.argv[1])
pack_source(toy_source(photos, counts={"test": 10}), root)
test = open_dataset(root, "toy").split("test")
transform = eval_transform(224, (0.5, 0.5, 0.5), (1, 1, 1))
for count in (50, 250):
    batches = evaluation_batches(test.subset(np.arange(count) % 10), transform, 10, workers=2)
    assert sum(len(indices) for _, _, indices in batches) == count
    print(peak())
"""


def test_evaluation_takes_no_more_memory_for_more_images(tmp_path):
    """If anything held 200 photographs more, decoded or as the tower reads them, that would be 120 MB or more."""
    program = [sys.executable, "-c", MANY_PHOTOS, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr
    few, many = map(int, run.stdout.split())
    assert many - few < 60_000
