"""Better or luck: tests equal brute force, intervals equal plain resampling, and nothing is left out in silence."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import put_run, put_score
from scipy.stats import kstest, rankdata, wilcoxon

from benchmarks.results import load
from benchmarks.results.frame import split_variants
from benchmarks.results.statistics import (
    EXACT,
    Comparison,
    Pair,
    Task,
    compare,
    holm,
    resample,
    resample_accuracy,
    sign_flip_p,
    wilcoxon_p,
)
from benchmarks.tables.comparison import comparison_table
from benchmarks.tables.table import Table
from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.correctness import pack_bits
from runner.results import EvalResult, harmonic_mean, read_document

SIZES = {"base": 40, "novel": 31, "all": 50}
DIFFERENCES = st.lists(st.integers(-6, 6).map(lambda n: n / 3), min_size=1, max_size=9)


def random(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def brute_force(values: list[float]) -> float:
    """The share of all choices of signs whose sum is at least as far from 0."""
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    return float(np.mean([found >= abs(sum(values)) - 1e-9 for found in sums]))


@settings(deadline=None)
@given(DIFFERENCES)
def test_flipped_signs_are_all_counted(differences):
    assert sign_flip_p(differences, random(1)) == pytest.approx(brute_force(differences))


def test_many_flipped_signs_are_drawn_and_come_close():
    differences = random(3).normal(0.3, 1.0, EXACT + 2).tolist()
    sums = np.zeros(1)
    for value in differences:
        sums = np.concatenate([sums + value, sums - value])
    wanted = float(np.mean(np.abs(sums) >= abs(sum(differences)) - 1e-9))
    found = sign_flip_p(differences, random(4))
    assert abs(found - wanted) < 5 * (wanted * (1 - wanted) / 2**EXACT) ** 0.5
    assert found == sign_flip_p(differences, random(4)) != sign_flip_p(differences, random(5))


@settings(deadline=None)
@given(DIFFERENCES)
def test_wilcoxon_is_exact_with_ties_and_without_zeros(differences):
    there = [value for value in differences if value]
    ranks = (np.sign(there) * rankdata(np.abs(there))).tolist() if there else []
    assert wilcoxon_p(differences, random(1)) == pytest.approx(brute_force(ranks) if there else 1.0)


@pytest.mark.parametrize("n", [3, 11, 33, 110])
def test_wilcoxon_without_ties_is_that_of_scipy(n):
    differences = random(n).normal(0.2, 1.0, n)
    assert wilcoxon_p(differences, random(1)) == pytest.approx(wilcoxon(differences, method="exact").pvalue, rel=1e-9)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=7), st.sampled_from([0.01, 0.05, 0.3]))
def test_holm_rejects_what_stepping_down_rejects(values, level):
    there = sorted(value for value in values if value is not None)
    rejected = list(itertools.takewhile(lambda step: step[1] * (len(there) - step[0]) <= level, enumerate(there)))
    corrected = holm(values)
    assert [p is None for p in corrected] == [p is None for p in values]
    assert sum(p is not None and p <= level for p in corrected) == len(rejected)
    assert all(p is None or p <= q <= 1 for p, q in zip(values, corrected, strict=True))


def answers(total: int, seeds: int, share: float, *seed: int) -> np.ndarray:
    """Which of `total` images each seed has right [S, N]; some images are easy for all."""
    easy = random(*seed).random(total) * 0.8
    return random(*seed, 1).random((seeds, total)) < share * (0.6 + easy)


def result(right: np.ndarray, sample: EvalResult) -> EvalResult:
    return sample.model_copy(
        update={
            "correct": int(right.sum()),
            "total": len(right),
            "dataset_size": len(right),
            "correct_bits": pack_bits(right),
        }
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> EvalResult:
    """Some result, to be filled with answers."""
    results = tmp_path_factory.mktemp("sample")
    found = read_document(put_score(results, put_run(results, "maple", "dtd"), "dtd:base", 1, 2), EvalResult)
    assert found
    return found


def task(sample: EvalResult, *parts: tuple[np.ndarray, np.ndarray], name: str = "dtd") -> Task:
    """Of each part the answers of A and of B [S, N]."""
    pairs = [
        Pair(
            seed + 1,
            tuple(result(a[seed], sample) for a, _ in parts),
            tuple(result(b[seed], sample) for _, b in parts),
        )
        for seed in range(len(parts[0][0]))
    ]
    return Task((name, name), name, tuple(pairs))


def test_drawing_kinds_of_images_is_drawing_images(sample):
    parts = [
        (answers(SIZES[half], 3, 0.8, n, 0), answers(SIZES[half], 3, 0.7, n, 0, 7))
        for n, half in enumerate(("base", "novel"))
    ]
    draws = 20_000
    found = resample(task(sample, *parts), draws)
    generator = random(9)
    plain = np.empty((draws, 2, 2))
    for part, pair in enumerate(parts):
        images = generator.integers(0, pair[0].shape[1], (draws, pair[0].shape[1]))
        for side, right in enumerate(pair):
            plain[:, part, side] = 100 * right.mean(0)[images].mean(1)
    wanted = 2 * plain[:, 0] * plain[:, 1] / (plain[:, 0] + plain[:, 1])
    for one, other in ((found, wanted), (found[:, :1] - found[:, 1:], wanted[:, :1] - wanted[:, 1:])):
        error = other.std(0) / draws**0.5
        assert (np.abs(one.mean(0) - other.mean(0)) < 6 * error).all()
        assert one.std(0) == pytest.approx(other.std(0), rel=0.03)
        for quantile in (0.025, 0.25, 0.75, 0.975):
            assert (np.abs(np.quantile(one, quantile, 0) - np.quantile(other, quantile, 0)) < 12 * error).all()


@given(st.integers(1, 200), st.integers(1, 4), st.integers(0, 2**20))
@settings(max_examples=30, deadline=None)
def test_mean_and_variance_of_draws_are_those_of_theory(total, seeds, seed):
    a, b = answers(total, seeds, 0.8, seed, 1), answers(total, seeds, 0.6, seed, 2)
    draws = 4000
    found = resample_accuracy(a, b, draws, random(seed))
    shares = np.stack([a.mean(0), b.mean(0)]) * 100
    covariance = np.cov(shares, ddof=0) / total if total > 1 else np.zeros((2, 2))
    scale = np.sqrt(np.diag(covariance)) + 1e-9
    assert (np.abs(found.mean(0) - shares.mean(1)) <= 6 * scale / draws**0.5 + 1e-9).all()
    assert (np.abs(np.cov(found.T, ddof=0) - covariance) <= 0.2 * np.outer(scale, scale) + 1e-9).all()


def comparison(tasks: list[Task], draws: int = 1000) -> Comparison:
    drawn = np.mean([resample(task, draws) for task in tasks], axis=0)
    return Comparison("A", "B", "hm", tuple(tasks), tuple(np.quantile(drawn[:, 0] - drawn[:, 1], [0.025, 0.975])), ())


def test_a_method_against_itself_is_no_better(sample):
    right = answers(60, 3, 0.7, 1)
    equal = comparison([task(sample, (right, right), name=name) for name in ("dtd", "eurosat")])
    assert equal.interval == (0.0, 0.0) and equal.difference == 0.0 and equal.record == (0, 6, 0)
    assert set(equal.p_values) == {1.0}


def test_equally_good_methods_seldom_look_different(sample):
    """p is about uniform, and 95 % of the intervals have 0 in them."""
    found, covered = [], []
    for world in range(150):
        tasks = []
        for dataset in range(8):
            # Answers of both methods are drawn from the same chances: whatever differs is luck.
            chance = random(world, dataset).random(120)
            draw = random(world, dataset, 1).random((2, 1, 120)) < chance
            tasks.append(task(sample, (draw[0], draw[1]), name=f"set{dataset}"))
        each = comparison(tasks, draws=300)
        found.append(each.p_values.permutation)
        covered.append(each.interval[0] <= 0 <= each.interval[1])
    assert kstest(found, "uniform").pvalue > 0.001
    for level in (0.05, 0.2):
        assert np.mean(np.array(found) <= level) < level + 3 * (level * (1 - level) / len(found)) ** 0.5
    assert 0.88 <= np.mean(covered) <= 1.0


def test_seeds_that_go_together_mislead_a_test_over_pairs_but_not_one_over_data_sets():
    over_pairs, over_sets = [], []
    for world in range(200):
        # Data sets differ by luck, three seeds of one of them hardly do, and no method is better.
        differences = random(world).normal(0, 1, (11, 1)) + random(world, 1).normal(0, 0.5, (11, 3))
        over_pairs.append(wilcoxon_p(differences.ravel().tolist(), random(world)))
        over_sets.append(sign_flip_p(differences.mean(1).tolist(), random(world)))
    assert np.mean(np.array(over_sets) < 0.05) < 0.10 < 0.15 < np.mean(np.array(over_pairs) < 0.05)


SEEDS = (1, 2, 3)
METHODS = {"procap": 0.8, "maple": 0.75, "coop": 0.6}
DATASETS = ("dtd", "eurosat", "ucf101")


def edit(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def put(results: Path, config: RunConfig, target: str, right: np.ndarray) -> None:
    """An evaluation with its single images' answers."""
    edit(put_score(results, config, target, int(right.sum()), len(right)), correct_bits=pack_bits(right))


def right_of(method: str, target: str, seed: int) -> np.ndarray:
    """Answers that anybody can draw again."""
    size = SIZES[target.rpartition(":")[2]] + len(target)
    place = sum(map(ord, target))
    return answers(size, seed, METHODS[method], place, len(method))[seed - 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Three methods with three seeds on three data sets; leave it as it is."""
    results = tmp_path_factory.mktemp("whole")
    for method, dataset, seed in itertools.product(METHODS, DATASETS, SEEDS):
        config = put_run(results, method, dataset, seed=seed)
        for half in ("base", "novel"):
            put(results, config, f"{dataset}:{half}", right_of(method, f"{dataset}:{half}", seed))
    return results


@pytest.fixture
def results(whole, tmp_path) -> Path:
    """The same, to be changed."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def sheet_of(results: Path, **how: Any) -> Table:
    return comparison_table(split_variants(load(results)), **{"draws": 500, **how})


def hm(method: str, dataset: str, seeds: tuple[int, ...]) -> float:
    """From answers alone: of mean base and mean novel accuracy."""
    means = [
        np.mean([right_of(method, f"{dataset}:{half}", seed).mean() for seed in seeds]) for half in ("base", "novel")
    ]
    return 100 * harmonic_mean(*means)


def test_the_sheet_says_what_the_answers_say(whole):
    sheet = sheet_of(whole)
    assert [line.labels for line in sheet.rows] == [("CoOp", "9 (3)"), ("MaPLe", "9 (3)")]
    for line, rival in zip(sheet.rows, ("coop", "maple"), strict=True):
        figures = [float(np.mean([hm(method, dataset, SEEDS) for dataset in DATASETS])) for method in ("procap", rival)]
        singles = [[hm("procap", d, (seed,)) - hm(rival, d, (seed,)) for d in DATASETS] for seed in SEEDS]
        means = [hm("procap", dataset, SEEDS) - hm(rival, dataset, SEEDS) for dataset in DATASETS]
        ours, theirs, difference, interval, record, wilcoxon_text, flips_text, over_sets = line.cells
        assert (ours.mean, theirs.mean) == pytest.approx(figures)
        assert difference.mean == pytest.approx(figures[0] - figures[1]) and difference.seeds == SEEDS
        assert difference.std == pytest.approx(np.std(np.mean(singles, axis=1), ddof=1))
        pairs = list(itertools.chain(*singles))
        assert record == f"{sum(d > 0 for d in pairs)} / 0 / {sum(d < 0 for d in pairs)}"
        for said, p in (
            (wilcoxon_text, wilcoxon(pairs, method="exact").pvalue),
            (flips_text, brute_force(pairs)),
            (over_sets, brute_force(means)),
        ):
            assert said.split()[0] == f"{p:.2g}"
        low, high = map(float, interval.split(" to "))
        assert low < difference.mean < high
    said = " ".join(sheet.notes)
    for what in ("ddof = 1", "500 draws", "Holm's correction over the 2 comparisons", "Seeds 1, 2, 3.", "mean of HMs"):
        assert what in said
    total = sum(SIZES[half] + len(f"{dataset}:{half}") for dataset in DATASETS for half in ("base", "novel"))
    assert f"{total} of them" in said and "left out" not in said


def test_a_sheet_does_not_depend_on_the_order_of_results_or_on_chance(whole):
    frame = load(whole)
    one, other = (comparison_table(split_variants(order), draws=200) for order in (frame, frame[::-1]))
    assert one == other


def test_any_line_may_be_the_one_that_the_others_are_compared_with(whole):
    sheet = sheet_of(whole, reference="MaPLe")
    assert [line.labels[0] for line in sheet.rows] == ["CoOp", "ProCAP"]
    mirrored = sheet_of(whole).metric(1, 2).mean
    assert sheet.metric(1, 2).mean == pytest.approx(-mirrored)
    with pytest.raises(UsageError, match="MaPLe"):
        sheet_of(whole, reference="MaPLE")
    frame = load(whole)
    without = frame[frame.method != "procap"]
    best = comparison_table(split_variants(without), draws=10)
    assert [line.labels[0] for line in best.rows] == ["CoOp"] and "MaPLe was chosen after the fact" in " ".join(
        best.notes
    )
    with pytest.raises(UserError, match="two methods"):
        comparison_table(split_variants(without[without.method == "coop"]))


def file_of(results: Path, method: str, dataset: str, seed: int, half: str) -> Path:
    [folder] = (results / "base" / dataset / method).glob(f"*/*/seed{seed}-*")
    return folder / "eval" / f"{dataset}-{half}-test.json"


def left_out(results: Path, what: str) -> tuple[Comparison, str]:
    """MaPLe against ProCAP, and the one sentence about `what`."""
    found = compare(split_variants(load(results)), "ProCAP", "MaPLe", draws=50)
    [sentence] = [said for said in found.left_out if what in said]
    assert sentence in sheet_of(results, draws=50).notes
    return found, sentence


def test_results_without_answers_are_named_and_have_tests_but_no_interval(results):
    whole = compare(split_variants(load(results)), "ProCAP", "MaPLe", draws=50)
    edit(file_of(results, "maple", "eurosat", 2, "novel"), correct_bits=None)
    found, sentence = left_out(results, "without the answers to single images")
    assert (
        "MaPLe has counts" in sentence and sentence.endswith("eurosat (seed 2).") and "procap eval --force" in sentence
    )
    assert found.interval is None and whole.interval is not None
    assert (found.difference, found.p_values, found.record) == (whole.difference, whole.p_values, whole.record)


def test_a_missing_half_seed_or_data_set_leaves_the_rest(results):
    file_of(results, "maple", "eurosat", 2, "novel").unlink()
    for half, seed in itertools.product(("base", "novel"), SEEDS):
        file_of(results, "procap", "ucf101", seed, half).unlink()
    found, sentence = left_out(results, "one half alone")
    assert "MaPLe" in sentence and "eurosat (seed 2)" in sentence
    assert [(task.name, task.seeds) for task in found.tasks] == [("dtd", (1, 2, 3)), ("eurosat", (1, 3))]
    assert found.difference == pytest.approx(
        np.mean([hm("procap", d, s) - hm("maple", d, s) for d, s in (("dtd", SEEDS), ("eurosat", (1, 3)))])
    )
    assert found.std is None and found.seeds == ()
    assert any("ProCAP lacks" in said and "ucf101 (seeds 1, 2, 3)" in said for said in found.left_out)
    assert any("MaPLe lacks" in said and "eurosat (seed 2)" in said for said in found.left_out)
    assert any("seeds 1, 3 of eurosat" in said for said in sheet_of(results).notes)


@pytest.mark.parametrize("both", [False, True], ids=["one of both", "both"])
def test_other_images_are_never_compared(results, both):
    for method in ("maple", "procap")[: 1 + both]:
        edit(file_of(results, method, "dtd", 3, "base"), manifest_digest="e" * 16)
    found, sentence = left_out(results, "other images" if both else "different images")
    assert sentence.endswith("dtd (seed 3).")
    assert [task.seeds for task in found.tasks] == [(1, 2), (1, 2, 3), (1, 2, 3)]


def test_limited_results_are_left_out_beside_whole_ones_and_marked_alone(results):
    for dataset in DATASETS:
        for method, seed, half in itertools.product(("procap", "maple"), SEEDS, ("base", "novel")):
            size = len(right_of(method, f"{dataset}:{half}", seed))
            edit(file_of(results, method, dataset, seed, half), limit=size, dataset_size=1000)
        limited = {DATASETS[i] for i in range(DATASETS.index(dataset) + 1)}
        found = compare(split_variants(load(results)), "ProCAP", "MaPLe", draws=50)
        if limited < set(DATASETS):
            _, sentence = left_out(results, "limited to the first images")
            assert all(name in sentence for name in limited)
            assert {task.name for task in found.tasks} == set(DATASETS) - limited and not found.limited
    assert len(found.tasks) == 3 and found.limited and found.interval
    sheet = sheet_of(results)
    assert sheet.metric(1, 2).limited and any("† limited" in note for note in sheet.notes)
    assert sheet.rows[0].cells == (None,) * 8 and any("CoOp shares no data set" in note for note in sheet.notes)


def test_on_other_data_sets_the_one_trained_on_is_no_target_and_accuracies_are_compared(tmp_path):
    for method, seed in itertools.product(("procap", "maple"), (1, 2)):
        config = put_run(tmp_path, method, "imagenet", classes="all", seed=seed)
        for target in ("imagenet:all", "dtd:all", "eurosat:all"):
            put(tmp_path, config, target, right_of(method, target, seed))
        put(tmp_path, config, "dtd:all:val", right_of(method, "dtd:all", seed))
    found, sentence = left_out(tmp_path, "The data set trained on is no target")
    assert "imagenet" in sentence and found.measure == "accuracy"
    assert [task.name for task in found.tasks] == ["dtd", "eurosat"]
    means = [
        100 * np.mean([right_of("procap", t, s).mean() - right_of("maple", t, s).mean() for s in (1, 2)])
        for t in ("dtd:all", "eurosat:all")
    ]
    assert [a - b for a, b in (task.values for task in found.tasks)] == pytest.approx(
        means
    ) and found.difference == pytest.approx(np.mean(means))
    assert any("no test images" in said and "dtd:all:val (seeds 1, 2)" in said for said in found.left_out)
    source = {title: rows[rows.target_dataset == "imagenet"] for title, rows in split_variants(load(tmp_path)).items()}
    assert [task.name for task in compare(source, "ProCAP", "MaPLe", draws=50).tasks] == ["imagenet"]
