"""Uneven few-shot samples: sizes of classes, what they share with balanced ones, and who cannot learn from them."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from command_line import run
from made_results import put_config, put_score, table_of
from sessions import train
from small_runs import make_runtime
from toy_shards import CLASSNAMES, pixels, toy_source

from benchmarks.experiment.profiles import MINI
from benchmarks.results import load
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from procap.errors import UsageError
from runner.config import RunConfig
from runner.planning import plan_run
from shards import pack, reader, source
from shards.image_selection import draw_positions, select_training_images
from shards.uneven_samples import draw_uneven

LABELS = [label for label in range(3) for _ in range(20)]


def decayed(ratio: float, shots: int = 16) -> list[int]:
    balanced = draw_positions(LABELS, [], shots, 1)[0]
    return draw_uneven(f"decay:{ratio:g}", LABELS, balanced, range(3), shots, 1)


def test_a_decay_falls_exponentially_from_the_shots_to_their_share():
    """16 x 0.25^(0, 1/2, 1) = 16, 8, 4; 16 x 0.06^(0, 1/2, 1) = 16, 3.92, 0.96; no class is left without an image."""
    sizes = [Counter(LABELS[i] for i in decayed(ratio)) for ratio in (0.25, 0.06, 0.01)]
    assert [sorted(size.values()) for size in sizes] == [[4, 8, 16], [1, 4, 16], [1, 2, 16]]
    # The order of the classes is that of the seed, whatever the ratio.
    assert len({tuple(label for label, _ in size.most_common()) for size in sizes}) == 1
    orders = {tuple(draw_uneven("decay:0.1", LABELS, range(60), range(3), 9, seed)) for seed in range(5)}
    assert len(orders) > 1


def test_a_smaller_ratio_keeps_some_of_the_images_of_a_larger_one():
    balanced = draw_positions(LABELS, [], 16, 1)[0]
    quarter, least = decayed(0.25), decayed(0.06)
    assert {*least} < {*quarter} < {*balanced}
    assert quarter == [i for i in balanced if i in quarter], "in the order of the balanced sample"


def test_a_natural_sample_has_the_frequencies_of_the_images_and_as_many_as_a_balanced_one():
    labels = [0] * 900 + [1] * 90 + [2] * 10
    sizes = {"natural": [], "natural-any": []}
    for name, seed in itertools.product(sizes, range(20)):
        drawn = draw_uneven(name, labels, [], range(3), 10, seed)
        assert len({*drawn}) == 30
        sizes[name].append(np.bincount([labels[i] for i in drawn], minlength=3))
    # Of 20 x 30 images 540, 54 and 6 are expected, with deviations of 7, 7 and 2.
    assert np.abs(np.sum(sizes["natural-any"], axis=0) - [540, 54, 6]).max() < 22
    assert np.min(sizes["natural"]) == 1 and np.min(sizes["natural-any"]) == 0


@pytest.fixture(scope="module")
def rare(tmp_path_factory) -> reader.PackedDataset:
    """Five classes; those of the base half have 1, 15 and 15 training images."""
    counts = {"train": 61, "val": 20, "test": 10}
    labels = [0] + [1] * 15 + [2] * 15 + [3] * 15 + [4] * 15

    def images(split):
        for i in range(counts[split]):
            number = labels[i] if split == "train" else i % 5
            yield source.ImageRecord(f"{split}/{i}.png", number, source.png(pixels(split, i)))

    root = tmp_path_factory.mktemp("rare")
    pack.pack_source(toy_source(images, counts=counts), root)
    return reader.open_dataset(root, "toy")


def test_samples_are_drawn_within_the_classes_of_a_run_with_no_more_validation_images(rare):
    for sampling in ("decay:0.25", "natural", "natural-any"):
        for seed in range(4):
            drawn = select_training_images(rare, 4, seed, "base", sampling)
            sizes, val = (np.bincount(images.labels, minlength=3) for images in (drawn.train, drawn.val))
            assert drawn.classnames == CLASSNAMES[:3] and (val <= np.minimum(sizes, 4)).all()
            assert sizes.sum() == 12 or sampling == "decay:0.25"
            assert sizes.min() >= (sampling != "natural-any")


@pytest.mark.parametrize(("shots", "sampling", "message"), [
    (15, "natural", "--sampling natural with --shots 15: 'toy' has 31 training images in 3 classes; give fewer"),
    (0, "decay:0.25", "--sampling decay:0.25 with --shots full: 'toy' has 31 training images in 3 classes; give fewer"),
])  # fmt: skip
def test_a_sample_that_the_images_do_not_allow_is_refused(rare, shots, sampling, message):
    with pytest.raises(UsageError, match=message):
        select_training_images(rare, shots, 1, "base", sampling)


def test_the_sampling_is_part_of_a_run_unless_it_is_balanced():
    def planned(sampling: str, method: str = "coop") -> RunConfig:
        return plan_run(method=method, dataset="digits", sampling=sampling)

    hashes = {sampling: planned(sampling).hash for sampling in ("decay:0.25", "decay:0.06", "natural", "natural-any")}
    plain = plan_run(method="coop", dataset="digits")
    assert len({plain.hash, *hashes.values()}) == 5 and "sampling" not in plain.identity()
    assert planned("natural", "zeroshot").hash == planned("balanced", "zeroshot").hash
    for wrong in ("decay", "decay:0", "decay:1", "decay:0.0", "decay:.06", "decay:0.060", "Natural", ""):
        with pytest.raises(UsageError, match=f"--sampling {wrong}: known are .*decay:RATIO"):
            planned(wrong)


def test_a_run_records_its_sample_and_the_command_lists_it(few_digits, tiny_checkpoint, tmp_path, capsys):
    place = {"dataset": "digits", "backbone": str(tiny_checkpoint), "data": few_digits}
    config = plan_run(method="ncm", shots=4, sampling="decay:0.25", **place)
    trained = train(config, make_runtime(few_digits, tmp_path))
    chosen = ("--shots", 4, "--sampling", "decay:0.25", "--classes", "base")
    code, text, _ = run(capsys, "data", "few-shot", "digits", "--data", few_digits, *chosen, "--json")
    listed = json.loads(text.splitlines()[-1])
    assert code == 0 and trained.fewshot.sampling == listed["sampling"] == "decay:0.25"
    assert trained.fewshot.digest == listed["train_digest"]
    assert trained.fewshot.samples == [image["path"] for image in listed["train"]]
    again = train(config, make_runtime(few_digits, tmp_path))
    assert again == trained


@pytest.mark.parametrize("method", ["ncm", "probe"])
def test_methods_that_need_an_image_of_each_class_name_the_one_without(rare, method, tiny_checkpoint, tmp_path):
    config = plan_run(method=method, dataset="toy", shots=2, sampling="natural-any", seed=1, data=rare.folder.parent,
                      backbone=str(tiny_checkpoint))  # fmt: skip
    with pytest.raises(UsageError, match=f"class 'red_ball' has 0 training images, but {method} learns from"):
        train(config, make_runtime(rare.folder.parent, tmp_path))
    assert not list(tmp_path.rglob("train.json"))


def test_the_suite_compares_harmonic_means_of_macro_accuracies(tmp_path):
    """Of classes with 90 and 10 images 90 and 5 are right: 95 % of the images, (100 + 50) / 2 = 75 % by class."""
    suite = load_suite("imbalance")
    options = suite.options(MINI, datasets=("tiles",), methods=("zeroshot", "maple"), seeds=(1,))
    halves = {"tiles:base:test": ([90, 5], [90, 10]), "tiles:novel:test": ([30, 30], [60, 40])}
    for planned in suite.plan(options):
        put_config(tmp_path, planned.spec.config)
        for target, (correct, total) in halves.items():
            put_score(tmp_path, planned.spec.config, target, sum(correct), sum(total), by_class=(correct, total))
    # Novel: (30 / 60 + 30 / 40) / 2 = 62.5 per class; HM = 2 x 75 x 62.5 / 137.5 = 68.18.
    table = table_of(SuiteResults.read(suite, options, tmp_path), "imbalance")
    assert [[round(cell.mean, 2) for cell in row.cells] for row in table.rows] == [[75.0, 62.5, 68.18]] * 5
    assert [row.labels[2] for row in table.rows] == ["-", "balanced", "decay:0.25", "decay:0.06", "natural"]
    assert {*load(tmp_path).sampling} == {"balanced", "decay:0.25", "decay:0.06", "natural"}
