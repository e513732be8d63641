"""What plain runs and sweeps cost, and the summary of a report: averages by hand, pictures, and the best row."""

import re

import pandas as pd
import pytest
from made_results import made, put_halves, put_run, put_score

from benchmarks.plots import style
from benchmarks.plots.runs import accuracy_against_cost, average_results
from benchmarks.report.report import write_report
from benchmarks.results import load
from benchmarks.suites.outputs import metrics_of
from benchmarks.tables.runs import run_tables
from benchmarks.tables.summary import describe_best


@pytest.fixture
def results(tmp_path):
    """CoOp has HM 48 and 50 on two data sets, ProCAP 60 and 40 over two seeds on one, and nothing is known of MaPLe."""
    put_halves(tmp_path, "coop", "digits", (40, 100), (60, 100))
    put_halves(tmp_path, "coop", "tiles", (50, 100), (50, 100))
    for seed, right in ((1, 50), (2, 70)):
        put_halves(tmp_path, "procap", "digits", (right, 100), (60, 100), seed=seed)
        put_halves(tmp_path, "procap", "tiles", (40, 100), (40, 100), seed=seed)
    put_halves(tmp_path, "maple", "digits", (90, 100), (90, 100))
    return tmp_path


def averages(results):
    return average_results(load(results).rename(columns={"variant": "title"}))


def test_accuracies_are_averaged_over_the_data_sets_that_all_have(results):
    means = averages(results)
    assert means.accuracy.to_dict() == pytest.approx({"ProCAP": 50.0, "CoOp": 49.0})
    assert set(means.train_seconds) == {12.5} and set(means.parameters) == {2048}


def test_costs_weigh_data_sets_alike_however_many_targets_and_seeds_they_have(results):
    put_score(results, put_run(results, "coop", "digits", seconds=30), "digits:all", 70, 200)
    put_halves(results, "coop", "digits", (40, 100), (60, 100), seed=2, seconds=30)
    assert averages(results).train_seconds.to_dict() == {"CoOp": (30 + 12.5) / 2, "ProCAP": 12.5}


def test_a_run_has_its_cost_under_each_setting_of_the_evaluation(results):
    """A title names the setting."""
    frame = load(results).rename(columns={"variant": "title"})
    squashed = frame.assign(title=frame.title + ", squash")
    means = average_results(pd.concat([frame, squashed]))
    assert {*means.index} == {"CoOp", "CoOp, squash", "ProCAP", "ProCAP, squash"}
    assert set(means.train_seconds) == {12.5}


def test_an_accuracy_of_base_classes_alone_is_not_ranked_against_harmonic_means(results):
    for dataset in ("digits", "tiles"):
        put_score(results, put_run(results, "probe", dataset), f"{dataset}:base", 99, 100)
    assert [*averages(results).index] == ["ProCAP", "CoOp"]


def test_halves_of_different_seeds_have_no_harmonic_mean(results):
    put_score(results, put_run(results, "coop", "tiles", seed=2), "tiles:base", 10, 100)
    assert [*averages(results).index] == ["ProCAP"]


def test_a_run_on_all_classes_counts_by_its_accuracy_on_all(tmp_path):
    for method, right in (("coop", {"all": 90, "base": 50, "novel": 50}), ("maple", {"all": 80})):
        config = put_run(tmp_path, method, "shapes", classes="all")
        for classes, correct in right.items():
            put_score(tmp_path, config, f"shapes:{classes}", correct, 100)
    assert averages(tmp_path).accuracy.to_dict() == {"CoOp": 90.0, "MaPLe": 80.0}


def test_halves_of_base_classes_count_by_their_harmonic_mean(tmp_path):
    for method, novel in (("coop", 30), ("maple", 50)):
        config = put_run(tmp_path, method, "shapes", classes="dev-base")
        put_score(tmp_path, config, "shapes:dev-base:val", round(140 - 1.8 * novel), 100)
        put_score(tmp_path, config, "shapes:dev-novel:val", novel, 100)
    assert averages(tmp_path).accuracy.to_dict() == pytest.approx({"MaPLe": 50.0, "CoOp": 2 * 86 * 30 / 116})


def test_the_report_of_plain_runs_begins_with_the_best_method_and_has_both_plots(results, tmp_path):
    put_halves(results, "maple", "tiles", (90, 100), (90, 100))
    for method, right in (("coop", 50), ("maple", 90)):
        for dataset in ("digits", "tiles"):
            put_halves(results, method, dataset, (right, 100), (right, 100), seed=2)
    page = write_report(results, tmp_path / "page").read_text()
    summary = "best (HM, average): MaPLe with 90.00\xa0%; ProCAP is number 2 of 3 with 50.00\xa0%"
    assert summary in page.split("<main")[0]
    names = {path.name for path in (tmp_path / "page" / "figures").iterdir()}
    assert {"accuracy-bars.svg", "cost.pdf"} <= names
    assert "of the harmonic mean of base and novel, against the cost of a training" in page


def test_rows_with_different_seeds_have_no_summary(results):
    assert describe_best(run_tables(load(results))[0]) == ""


def test_the_summary_of_a_suite_leaves_out_what_its_table_does_not_rank(tmp_path):
    """GDA lacks a seed on one half, and weights of Tip-Adapter-F are chosen by test accuracy: both lead in the rest."""
    done = made(
        tmp_path,
        "base-to-novel",
        datasets=("digits", "tiles"),
        methods=("zeroshot", "coop", "tda", "gda", "tipadapterf"),
        seeds=(1, 2),
        options={"tipadapterf": {"selection": "test"}},
        skip=lambda entry, target: (entry.variant.method, entry.seed, target) == ("gda", 2, "tiles:novel:test"),
    )
    average = done.make_tables()[0]
    means = {row.labels[0]: row.cells[-1].mean for row in average.rows if row.labels[0] in ("CLIP (zero-shot)", "CoOp")}
    best = max(means, key=means.get)
    assert describe_best(average) == f"best (mean of HMs): {best} with {means[best]:.2f} %"


def test_the_summary_names_all_that_share_the_best_number_and_takes_target_means(tmp_path):
    done = made(tmp_path, "cross-dataset", methods=("zeroshot", "coop", "procap"), seeds=(1,))
    for path in (*tmp_path.glob("**/coop/**/eval/*.json"), *tmp_path.glob("**/procap/**/eval/*.json")):
        path.unlink()
    for entry in done.runs:
        for target in entry.spec.targets:
            is_source = target.startswith(entry.dataset)
            counts = {"zeroshot": (60, 60), "coop": (99, 50), "procap": (70, 60)}[entry.variant.method]
            put_score(tmp_path, entry.spec.config, target, counts[not is_source], 100)
    [table, *_] = type(done).read(done.suite, done.options, tmp_path).make_tables()
    assert describe_best(table) == "best (Target mean): CLIP (zero-shot) and ProCAP with 60.00 %"
    expected = {"accuracy/zeroshot": 60.0, "accuracy/coop": 50.0, "accuracy/procap": 60.0}
    assert metrics_of(type(done).read(done.suite, done.options, tmp_path), [table]) == expected


def test_a_suite_has_the_accuracy_of_most_shots_and_none_of_variants_that_differ_in_more(tmp_path):
    shots = made(tmp_path / "shots", "few-shot", datasets=("tiles",), methods=("zeroshot", "coop"), seeds=(1,))
    tables = shots.make_tables()
    [of_coop] = [row.cells[-1].mean for row in tables[0].rows if row.labels[-1] == "CoOp"]
    assert metrics_of(shots, tables)["accuracy/coop"] == round(of_coop, 2)
    ablation = made(tmp_path / "ablation", "prompt-length", datasets=("tiles",), seeds=(1,))
    assert metrics_of(ablation, ablation.make_tables()) == {}


def test_a_suite_has_the_harmonic_mean_of_its_table(tmp_path):
    done = made(tmp_path, "stability", datasets=("tiles", "petals"))
    [*_, average] = done.make_tables()[0].rows
    assert metrics_of(done, done.make_tables()) == {"hm/procap": average.cells[2].mean}
    assert average.cells[2].mean != done.halves(done.variants[0], "Average")[2].mean


def test_the_summary_names_what_varies_between_the_rows_of_a_method(tmp_path):
    table = made(tmp_path, "prompt-length", datasets=("tiles",)).make_tables()[0]
    assert re.fullmatch(r"best \(HM\): ProCAP, tokens \d+ with \d\d\.\d\d %", describe_best(table))


@pytest.mark.parametrize("costs", [(0.9, 1.1), (3, 30), (10, 1e6), (2048, 4.8e6)])
def test_every_range_of_costs_has_ticks_to_read_it_by(costs):
    means = pd.DataFrame(
        {"method": ["coop", "maple"], "accuracy": [70.0, 80.0], "measure": "accuracy"}
        | dict.fromkeys(("train_seconds", "parameters"), costs),
        index=["CoOp", "MaPLe"],
    )
    figure = style.draw_styled(lambda: accuracy_against_cost(means))
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2
