"""Few-shot samples and halves: the draws of CoOp, proven on the published split files."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from published_splits import split_files
from toy_shards import CLASSNAMES, COUNTS, label, pixels, toy_source

from procap import errors
from shards import manifest, pack, reader, source
from shards.image_selection import (
    draw_positions,
    select_class_labels,
    select_labels,
    select_target_images,
    select_training_images,
)


@dataclass
class Published:
    """A published split file."""

    paths: dict[str, list[str]]
    labels: dict[str, list[int]]


def published(name: str) -> Published:
    splits = split_files()[f"split_zhou_{name}.json"]
    return Published(
        {split: [path for path, _, _ in rows] for split, rows in splits.items()},
        {split: [int(label) for _, label, _ in rows] for split, rows in splits.items()},
    )


def blocks(*sizes: int) -> list[int]:
    return [label for label, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(("seed", "train", "val"), [
    (1, [[4, 18, 2, 8], [15, 63, 97, 57], [967, 777, 429, 192]], [[7, 0, 3, 5], [38, 0, 28, 17]]),
    (2, [[1, 2, 18, 11], [21, 94, 85, 39], [515, 1240, 434, 1242]], [[0, 4, 5, 1], [27, 25, 32, 23]]),
])  # fmt: skip
def test_draws_are_those_of_python_random_train_then_val_from_one_stream(seed, train, val):
    in_train, in_val = draw_positions(blocks(20, 100, 1300), blocks(8, 40), 4, seed)
    starts = np.repeat([0, 20, 120], 4)
    assert (np.array(in_train) - starts).reshape(3, 4).tolist() == train
    assert (np.array(in_val) - np.repeat([0, 8], 4)).reshape(2, 4).tolist() == val


def coops_own_words(split: Published, shots: int, seed: int) -> tuple[list[str], list[str]]:
    """CoOp's rule as it is written there: one global stream, records kept in a dict of lists by label."""
    random.seed(seed)
    drawn = []
    for part, number in (("train", shots), ("val", min(shots, 4))):
        by_label: dict[int, list[str]] = defaultdict(list)
        for path, number_of_class in zip(split.paths[part], split.labels[part], strict=True):
            by_label[number_of_class].append(path)
        dataset = []
        for items in by_label.values():
            dataset.extend(random.sample(items, number) if len(items) >= number else items)
        drawn.append(dataset)
    return drawn[0], drawn[1]


ALL_DRAWS = {
    "Caltech101": "efe85c60fde4805f", "OxfordPets": "cf02ce5047cae81c", "StanfordCars": "0a9fea254c5027f3",
    "OxfordFlowers": "98c0fb64b199628f", "DescribableTextures": "08d65ffe9bf97d2d", "EuroSAT": "19ab83c617ff6f6f",
    "UCF101": "fd4de229b3f8b45c",
}  # fmt: skip
"""Digest over the digests of 1, 2, 4, 8 and 16 shots times seeds 0 to 3, train and val."""


@pytest.mark.parametrize("name", ALL_DRAWS)
def test_every_shot_and_seed_draws_what_coop_draws(name):
    split = published(name)
    digests = []
    for shots in (1, 2, 4, 8, 16):
        for seed in (0, 1, 2, 3):
            picks = draw_positions(split.labels["train"], split.labels["val"], shots, seed)
            parts = zip(("train", "val"), picks, strict=True)
            found = [[split.paths[part][i] for i in of_part] for part, of_part in parts]
            assert tuple(found) == coops_own_words(split, shots, seed)
            digests += map(manifest.lines_digest, found)
    assert manifest.lines_digest(digests) == ALL_DRAWS[name]


@pytest.mark.parametrize(("name", "classes", "train", "val", "test"), [
    ("Caltech101", (50, 50), (2594, 1534), (1036, 613), (1549, 916)),
    ("OxfordPets", (19, 18), (1508, 1436), (377, 359), (1881, 1788)),
    ("StanfordCars", (98, 98), (3240, 3269), (812, 823), (4002, 4039)),
    ("OxfordFlowers", (51, 51), (1744, 2349), (696, 937), (1053, 1410)),
    ("DescribableTextures", (24, 23), (1440, 1380), (576, 552), (864, 828)),
    ("EuroSAT", (5, 5), (7000, 6500), (2800, 2600), (4200, 3900)),
    ("UCF101", (51, 50), (3926, 3713), (975, 923), (1934, 1849)),
])  # fmt: skip
def test_halves_have_the_published_sizes(name, classes, train, val, test):
    labels = published(name).labels
    for k, half in enumerate(("base", "new")):
        chosen = select_labels(labels["train"], half)
        assert len(chosen) == classes[k]
        for split, sizes in (("train", train), ("val", val), ("test", test)):
            assert sum(label in set(chosen) for label in labels[split]) == sizes[k]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 20), st.integers(0, 3))
def test_every_class_gives_its_shots_without_repetition_in_order_of_appearance(labels, shots, seed):
    picks, none = draw_positions(labels, [], shots, seed)
    assert none == [] and len(set(picks)) == len(picks)
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    expected = counts if shots == 0 else {label: min(shots, count) for label, count in counts.items()}
    assert {label: [labels[i] for i in picks].count(label) for label in counts} == expected
    if shots:
        assert list(dict.fromkeys(labels[i] for i in picks)) == list(counts)


@settings(deadline=None)
@given(st.sets(st.integers(0, 300), min_size=1))
def test_development_halves_part_the_base_labels_and_leave_novel_ones_alone(labels):
    base, dev_base, dev_novel = (select_labels(labels, name) for name in ("base", "dev-base", "dev-novel"))
    assert dev_base + dev_novel == base == select_labels(base, "all")
    assert dev_base == select_labels(base, "base") and dev_novel == select_labels(base, "novel")
    assert 0 <= len(dev_base) - len(dev_novel) <= 1
    assert not set(dev_base + dev_novel) & set(select_labels(labels, "novel"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> reader.PackedDataset:
    root = tmp_path_factory.mktemp("toy")
    pack.pack_source(toy_source(), root)
    return reader.open_dataset(root, "toy")


def test_samples_are_stable_and_the_same_for_a_base_run_as_for_all_classes(toy):
    everything, base, novel = (select_training_images(toy, 2, 1, classes) for classes in ("all", "base", "novel"))
    assert everything.digest == manifest.lines_digest(everything.train.paths) == "020599b08bb8b514"
    chosen = set(base.train.paths) | set(novel.train.paths)
    assert chosen == set(everything.train.paths)
    assert [path for path in everything.train.paths if path in base.train.paths] == base.train.paths
    assert base.classnames == CLASSNAMES[:3] and novel.classnames == CLASSNAMES[3:]
    assert novel.class_labels == (3, 4) and sorted(set(novel.train.labels.tolist())) == [0, 1]
    for path, new in zip(novel.train.paths, novel.train.labels, strict=True):
        assert CLASSNAMES.index(path.split("/")[1]) == novel.class_labels[new]


def test_a_development_run_takes_of_the_base_samples_those_of_its_classes(toy):
    base, half = (select_training_images(toy, 2, 1, classes) for classes in ("base", "dev-base"))
    assert half.classnames == CLASSNAMES[:2]
    kept = [path for path in base.train.paths if path.split("/")[1] in half.classnames]
    val = [path for path in base.val.paths if path.split("/")[1] in half.classnames]
    assert (half.train.paths, half.val.paths) == (kept, val)
    assert sorted(set(half.train.labels.tolist())) == [0, 1]
    with pytest.raises(errors.UsageError, match=r"one class \('crane .floating.'\) in its dev-novel half"):
        select_training_images(toy, 2, 1, "dev-novel")


def test_a_choice_without_classes_is_refused_by_name(tmp_path):
    two = [0, 1]

    def images(split):
        return (source.ImageRecord(f"{split}/{i}.png", two[i % 2], source.png(pixels(split, i))) for i in range(4))

    pack.pack_source(toy_source(images, classnames=CLASSNAMES[:2], counts={"train": 4, "test": 4}), tmp_path)
    dataset = reader.open_dataset(tmp_path, "toy")
    assert len(select_target_images(dataset, "dev-base").images) == 2
    with pytest.raises(errors.UsageError, match="'toy' has no image of dev-novel classes in its test split"):
        select_target_images(dataset, "dev-novel")


def test_val_takes_at_most_four_and_small_classes_give_what_they_have(toy):
    train, val = (np.bincount([label(i) for i in range(COUNTS[split])]) for split in ("train", "val"))
    assert train.min() < 5 < train.max() and val.min() < 4 < val.max()
    drawn = select_training_images(toy, 5, 1)
    assert np.bincount(drawn.train.labels).tolist() == np.minimum(train, 5).tolist()
    assert np.bincount(drawn.val.labels).tolist() == np.minimum(val, 4).tolist()


def test_zero_shots_means_every_image_in_list_order(toy):
    assert select_training_images(toy, 0, 1).train.paths == toy.open_images("train").paths


@pytest.mark.parametrize(("shots", "classes", "message"), [
    (64, "all", r"--shots 64: the largest class of 'toy' has 6 training images"),
    (2, "odd", r"unknown choice of classes 'odd': known: all, base, novel, dev-base, dev-novel$"),
    (2, "Novell", r"unknown choice of classes 'Novell': did you mean novel.*\?$"),
])  # fmt: skip
def test_impossible_requests_are_answered(toy, shots, classes, message):
    with pytest.raises(errors.UsageError, match=message):
        select_training_images(toy, shots, 1, classes)


def test_evaluation_keeps_every_test_image_of_its_classes_in_list_order(toy):
    test = toy.open_images("test")
    for classes in ("all", "base", "new", "dev-base", "dev-novel"):
        selection = select_target_images(toy, classes)
        assert list(selection.class_labels) == select_class_labels(toy, classes)
        kept = [i for i in range(len(test)) if test.labels[i] in selection.class_labels]
        assert selection.images.paths == [test.paths[i] for i in kept]
        assert [selection.class_labels[new] for new in selection.images.labels] == [test.labels[i] for i in kept]
        assert selection.classnames == tuple(CLASSNAMES[label] for label in selection.class_labels)


def test_a_test_only_set_has_no_halves_and_nothing_to_train_on(tmp_path):
    pack.pack_source(toy_source(counts={"test": 17}), tmp_path)
    dataset = reader.open_dataset(tmp_path, "toy")
    assert len(select_target_images(dataset).images) == 17
    with pytest.raises(errors.UsageError, match="test set without halves"):
        select_target_images(dataset, "base")
    with pytest.raises(errors.UsageError, match="no images to train on"):
        select_training_images(dataset, 16, 1)


def test_the_command_lists_what_a_run_trains_on(tmp_path, capsys):
    pack.pack_source(toy_source(), tmp_path / "data")
    dataset = reader.open_dataset(tmp_path / "data", "toy")
    code, document, text = run(
        capsys, "data", "few-shot", "toy", "--data", dataset.folder.parent, "--shots", 2, "--json"
    )
    expected, written = select_training_images(dataset, 2, 1), json.loads(document)
    assert code == 0 and written["train_digest"] == expected.digest
    assert [image["path"] for image in written["train"]] == expected.train.paths
    assert all(f" {path}\n" in text for path in expected.train.paths)
