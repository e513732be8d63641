"""Paired statistics: tests equal brute force, intervals equal plain resampling, and whatever is left out is noted."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import answer_fields, made, put_run, put_score

from benchmarks.cli import main
from benchmarks.experiment.titles import choose_reference
from benchmarks.results import load
from benchmarks.results.frame import read_frame
from benchmarks.results.metrics import harmonic, make_metric, metric_over_seeds
from benchmarks.results.statistics import Comparison, compare, holm, measure_of, sign_flip_p
from benchmarks.tables.comparison import comparison_table
from procap.errors import UserError
from runner.results import harmonic_mean

SIZES = {"base": 40, "novel": 31, "all": 50}
DIFFERENCES = st.lists(st.integers(-6, 6).map(lambda n: n / 3), min_size=1, max_size=9)


def random(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def brute_force(values: list[float]) -> float:
    """The share of all choices of signs whose sum is at least as far from 0."""
    signs = itertools.product((1, -1), repeat=len(values))
    sums = [abs(sum(s * v for s, v in zip(each, values, strict=True))) for each in signs]
    return float(np.mean([found >= abs(sum(values)) - 1e-9 for found in sums]))


@settings(deadline=None)
@given(DIFFERENCES)
def test_flipped_signs_are_all_counted(differences):
    assert sign_flip_p(differences) == pytest.approx(brute_force(differences))


def test_signs_of_many_data_sets_are_drawn():
    assert 0 < sign_flip_p([1.0] * 20) < 1e-4
    assert sign_flip_p([1.0, -1.0] * 9 + [0.5]) > 0.9


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=7), st.sampled_from([0.01, 0.05, 0.3]))
def test_holm_rejects_what_stepping_down_rejects(values, level):
    steps = enumerate(sorted(values))
    rejected = list(itertools.takewhile(lambda step: step[1] * (len(values) - step[0]) <= level, steps))
    corrected = holm(values)
    assert sum(p <= level for p in corrected) == len(rejected)
    assert all(p <= q <= 1 for p, q in zip(values, corrected, strict=True))


def test_accuracies_of_different_seeds_or_limits_have_no_harmonic_mean():
    base, novel = make_metric([80.0, 60.0], (1, 2)), make_metric([40.0, 60.0], (1, 2))
    assert harmonic(base, novel).values == (harmonic_mean(80.0, 40.0), 60.0)
    assert harmonic(base, replace(novel, seeds=(1, 3))) is None
    assert harmonic(base, replace(novel, limited=True)) is None


def test_limited_results_are_not_averaged_with_whole_ones(tmp_path):
    for seed, correct, of in ((1, 9, 40), (2, 20, None), (3, 40, None)):
        put_score(
            tmp_path, put_run(tmp_path, "coop", "digits", seed=seed), "digits:base", correct, (of and 10) or 40, of=of
        )
    metric = metric_over_seeds(load(tmp_path))
    assert (metric.mean, metric.seeds, metric.limited) == (75.0, (2, 3), False)


def answers(total: int, seeds: int, share: float, *seed: int) -> np.ndarray:
    """Which of `total` images each seed classified correctly [S, N]; some images are easy for all."""
    easy = random(*seed).random(total) * 0.8
    return random(*seed, 1).random((seeds, total)) < share * (0.6 + easy)


def frame_of(parts: dict[tuple[str, str], np.ndarray]):
    """The columns that a comparison reads, from answers [S, N] by data set and classes."""
    import pandas as pd

    return pd.DataFrame(
        {
            "method": "m", "dataset": dataset, "classes": "base", "seed": seed, "target": f"{dataset}:{half}:test",
            "target_dataset": dataset, "target_classes": half, "split": "test", "accuracy": 100 * right.mean(),
            "total": len(right), "images": len(right), "limited": False, "manifest": "d",
            "correct_images": right,
        }
        for (dataset, half), every in parts.items()
        for seed, right in enumerate(every, 1)
    )  # fmt: skip


def test_the_interval_is_that_of_drawing_images_one_by_one():
    """Base and novel images are drawn independently, the same ones for both methods and all seeds."""
    sides = [
        {("dtd", half): answers(SIZES[half], 3, share, n, 0) for n, half in enumerate(("base", "novel"))}
        for share in (0.8, 0.7)
    ]
    draws = 20_000
    found = compare(dict(zip("AB", map(frame_of, sides), strict=True)), "A", "B", draws=draws)
    generator = random(9)
    drawn = np.empty((2, 2, draws))
    for part, half in enumerate(("base", "novel")):
        images = generator.integers(0, SIZES[half], (draws, SIZES[half]))
        for side, parts in enumerate(sides):
            drawn[side, part] = 100 * parts["dtd", half].mean(0)[images].mean(1)
    hm = 2 * drawn[:, 0] * drawn[:, 1] / drawn.sum(1)
    difference = hm[0] - hm[1]
    error = 12 * difference.std() / draws**0.5
    assert found.interval == pytest.approx(np.quantile(difference, [0.025, 0.975]), abs=error)


SEEDS = (1, 2, 3)
METHODS = {"procap": 0.8, "maple": 0.75, "coop": 0.6}
DATASETS = ("dtd", "eurosat", "ucf101")


def split_variants(frame):
    return {str(variant): rows for variant, rows in frame.groupby("variant")}


def edit(file, **changed):
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def put(results, config, target, right):
    edit(put_score(results, config, target, int(right.sum()), len(right)), **answer_fields(right))


def right_of(method: str, target: str, seed: int) -> np.ndarray:
    size = SIZES[target.rpartition(":")[2]] + len(target)
    place = sum(map(ord, target))
    return answers(size, seed, METHODS[method], place, len(method))[seed - 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three methods with three seeds on three data sets; leave it as it is."""
    results = tmp_path_factory.mktemp("whole")
    for method, dataset, seed in itertools.product(METHODS, DATASETS, SEEDS):
        config = put_run(results, method, dataset, seed=seed)
        for half in ("base", "novel"):
            put(results, config, f"{dataset}:{half}", right_of(method, f"{dataset}:{half}", seed))
    return results


@pytest.fixture
def results(whole, tmp_path):
    """The same, to be changed."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def table_of(results, reference="ProCAP", draws=500):
    return comparison_table(split_variants(load(results)), reference, draws=draws)


def hm(method: str, dataset: str, seeds: tuple[int, ...]) -> float:
    means = [np.mean([right_of(method, f"{dataset}:{half}", s).mean() for s in seeds]) for half in ("base", "novel")]
    return 100 * harmonic_mean(*means)


def test_the_table_follows_from_the_answers(whole):

    table = table_of(whole)
    assert [row.labels for row in table.rows] == [("CoOp", "3"), ("MaPLe", "3")]
    for row, rival in zip(table.rows, ("coop", "maple"), strict=True):
        figures = [float(np.mean([hm(method, dataset, SEEDS) for dataset in DATASETS])) for method in ("procap", rival)]
        singles = [[hm("procap", d, (seed,)) - hm(rival, d, (seed,)) for d in DATASETS] for seed in SEEDS]
        ours, theirs, difference, interval, *p = row.cells
        assert (ours.mean, theirs.mean) == pytest.approx(figures)
        assert difference.mean == pytest.approx(figures[0] - figures[1]) and difference.seeds == SEEDS
        assert difference.std == pytest.approx(np.std(np.mean(singles, axis=1), ddof=1))
        # Of three data sets p is 0.25 or more.
        assert p == [None, None]
        low, high = map(float, interval.split(" to "))
        assert low < difference.mean < high
    [sentence] = table.notes
    assert "500 draws" in sentence and "- below 6 data sets, with which no p is under 0.05." in sentence


def test_a_table_does_not_depend_on_the_order_of_results_or_on_chance(whole):
    frame = load(whole)
    first, second = (comparison_table(split_variants(order), "ProCAP", draws=200) for order in (frame, frame[::-1]))
    assert first == second


@pytest.mark.parametrize(("words", "reference"), [((), "ProCAP"), (("--reference", "coop"), "CoOp")])
def test_the_chosen_reference_is_the_last_row_and_marked(tmp_path, capsys, words, reference):
    results = ("--results", tmp_path)
    made(tmp_path, "base-to-novel", methods=("coop", "maple", "procap"), datasets=("shapes",), seeds=(1,))
    chosen = ("--methods", "coop,maple,procap", "--datasets", "shapes", "--seeds", "1", "--profile", "mini")
    for command in (["table", "base-to-novel", *chosen], ["table", "--methods", "coop,maple,procap"]):
        assert main([*map(str, (*command, *words, *results, "--format", "json"))]) == 0
        tables = {table["name"]: table for table in json.loads(capsys.readouterr().out)["tables"]}
        if "base-to-novel-comparison" in tables:
            compared = tables["base-to-novel-comparison"]
            assert compared["title"].startswith(f"{reference} compared with") and len(compared["rows"]) == 2
            assert "- below 6 data sets" in compared["notes"][0]
        table = tables.get("base-to-novel") or tables["table"]
        assert table["rows"][-1]["labels"][-1] == reference
        assert main([*map(str, (*command, *words, *results))]) == 0
        out = capsys.readouterr().out
        # Where a comparison uses it.
        assert f"**{reference}**" not in out and (f"{reference} (reference)" in out) == ("base-to-novel" in command)
    assert main(["table", "base-to-novel", *chosen, "--reference", "tcp", *map(str, results)]) == 2
    assert "unknown method 'tcp'" in capsys.readouterr().err


def test_the_only_plug_in_is_the_default_reference():
    assert choose_reference(["coop", "theirs", "procap"]) == "theirs"
    assert choose_reference(["coop", "theirs", "procap", "others"]) == "procap"
    assert choose_reference(["coop", "theirs", "procap"], "coop") == "coop"


def file_of(results, method, dataset, seed, half):
    [folder] = (results / "base" / dataset / method).glob(f"*/*/seed{seed}-*")
    return folder / "eval" / f"{dataset}-{half}-test.json"


def tasks_of(found: Comparison) -> list[str]:
    return list(found.tasks.index.get_level_values("task"))


def procap_and_maple(results) -> Comparison:
    return compare(split_variants(load(results)), "ProCAP", "MaPLe", draws=50)


def test_results_without_answers_have_a_test_but_no_interval(results):
    whole = procap_and_maple(results)
    edit(file_of(results, "maple", "eurosat", 2, "novel"), labels=None, predicted=None)
    found = procap_and_maple(results)
    assert found.interval is None and whole.interval is not None
    assert (found.difference, found.p) == (whole.difference, whole.p)


def test_a_missing_half_seed_or_data_set_leaves_the_rest(results):
    file_of(results, "maple", "eurosat", 2, "novel").unlink()
    for half, seed in itertools.product(("base", "novel"), SEEDS):
        file_of(results, "procap", "ucf101", seed, half).unlink()
    found = procap_and_maple(results)
    assert list(zip(tasks_of(found), found.tasks.seeds, strict=True)) == [("dtd", (1, 2, 3)), ("eurosat", (1, 3))]
    assert found.difference == pytest.approx(
        np.mean([hm("procap", d, s) - hm("maple", d, s) for d, s in (("dtd", SEEDS), ("eurosat", (1, 3)))])
    )
    assert found.std is None and found.seeds == ()


def test_different_images_are_never_compared(results):
    edit(file_of(results, "maple", "dtd", 3, "base"), manifest_digest="e" * 16)
    frame = read_frame(results, dict().__setitem__, lambda *_: True)
    compared = compare(split_variants(frame), "ProCAP", "MaPLe", draws=50)
    assert list(compared.tasks.seeds) == [(1, 2), (1, 2, 3), (1, 2, 3)]
    with pytest.raises(UserError, match="results on different contents of dtd do not compare"):
        load(results)


def test_limited_results_are_not_compared(results):
    for method, seed, half in itertools.product(("procap", "maple"), SEEDS, ("base", "novel")):
        size = len(right_of(method, f"dtd:{half}", seed))
        edit(file_of(results, method, "dtd", seed, half), limit=size, dataset_size=1000)
    assert set(tasks_of(procap_and_maple(results))) == set(DATASETS) - {"dtd"}


def test_on_other_data_sets_the_one_trained_on_is_no_target_and_accuracies_are_compared(tmp_path):
    for method, seed in itertools.product(("procap", "maple"), (1, 2)):
        config = put_run(tmp_path, method, "imagenet", classes="all", seed=seed)
        for target in ("imagenet:all", "dtd:all", "eurosat:all"):
            put(tmp_path, config, target, right_of(method, target, seed))
        put(tmp_path, config, "dtd:all:val", right_of(method, "dtd:all", seed))
    found = compare(split_variants(load(tmp_path)), "ProCAP", "MaPLe", draws=50)
    assert measure_of(split_variants(load(tmp_path))) == "accuracy"
    assert tasks_of(found) == ["dtd", "eurosat"]
    means = [
        100 * np.mean([right_of("procap", t, s).mean() - right_of("maple", t, s).mean() for s in (1, 2)])
        for t in ("dtd:all", "eurosat:all")
    ]
    assert list(found.tasks.a - found.tasks.b) == pytest.approx(means)
    assert found.difference == pytest.approx(np.mean(means))
    source = {title: rows[rows.target_dataset == "imagenet"] for title, rows in split_variants(load(tmp_path)).items()}
    assert tasks_of(compare(source, "ProCAP", "MaPLe", draws=50)) == ["imagenet"]
