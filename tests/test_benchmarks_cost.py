"""What plain runs and sweeps cost: averages by hand, and the pictures and the summary of the report."""

import pytest
from made_results import put_halves, put_score

from benchmarks.plots.runs import average_results, describe_best
from benchmarks.report.report import write_report
from benchmarks.results import load


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


def test_accuracies_are_averaged_over_the_data_sets_that_all_have(results):
    means = average_results(load(results).rename(columns={"variant": "title"}))
    assert means.accuracy.to_dict() == pytest.approx({"ProCAP": 50.0, "CoOp": 49.0})
    assert set(means.train_seconds) == {12.5} and set(means.parameters) == {2048}
    assert describe_best(means) == "best by mean of HMs is ProCAP with 50.00 %"


def test_the_summary_of_results_with_joint_scores_says_which_harmonic_mean_it_takes(results):
    config = put_halves(results, "maple", "tiles", (90, 100), (90, 100))
    put_score(results, config, "tiles:all", 70, 200)
    joint = average_results(load(results).rename(columns={"variant": "title"}))
    assert describe_best(joint).startswith("best by mean of HMs in each half is MaPLe with 90.00 %")


def test_the_report_of_plain_runs_begins_with_the_best_method_and_has_both_plots(results, tmp_path):
    put_halves(results, "maple", "tiles", (90, 100), (90, 100))
    page = write_report(results, tmp_path / "page").read_text()
    assert (
        "best by mean of HMs is MaPLe with 90.00\xa0%; ProCAP is number 2 of 3 with 50.00\xa0%"
        in page.split("<main")[0]
    )
    names = {path.name for path in (tmp_path / "page" / "figures").iterdir()}
    assert {"accuracy-bars.svg", "cost.pdf"} <= names
