"""Tables and the diagram of calibration: means over data sets and seeds, from the bins of every evaluation."""

import json
import re
import shutil
from statistics import mean, stdev

import numpy as np
import pytest
from command_line import run
from made_results import made, put_run, put_score, table_of
from report_pages import Page, tables

from benchmarks.plots.style import draw_styled
from benchmarks.report.report import ReportChoices, write_report
from benchmarks.results.suite_results import SuiteResults
from runner.calibration import ImagePredictions, measure_calibration
from runner.run_collection import Collection, write_collection

METHODS = ("zeroshot", "coop", "cocoop", "kgcoop", "maple", "procap")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> SuiteResults:
    """Base-to-novel of six methods, two data sets and two seeds, with drawn predictions for three classes."""
    folder = tmp_path_factory.mktemp("made")
    done = made(folder, "base-to-novel", datasets=("shapes", "petals"), methods=METHODS, seeds=(1, 2))
    for number, file in enumerate(sorted(done.results.rglob("eval/*.json"))):
        document, draws = json.loads(file.read_text()), np.random.default_rng(number)
        total = 300
        confidence, labels = draws.uniform(0.3, 1, total), np.arange(total) % 3
        # A class with a lower share of correct images in one data set.
        right = draws.random(total) < np.where((labels == 1) & ("petals" in str(file)), 0.2, confidence)
        predicted = np.where(right, labels, (labels + 1) % 3)
        images = ImagePredictions(labels, predicted, confidence, nll=-np.log(confidence), brier=1 - confidence)
        document |= {
            "correct": int(right.sum()),
            "total": total,
            "dataset_size": total,
            "num_classes": 3,
            "labels": labels.tolist(),
            "predicted": predicted.tolist(),
            "calibration": measure_calibration(images).model_dump(),
            "per_class": {
                "names": ["a", "b", "c_d"],
                "correct": np.bincount(labels[right], minlength=3).tolist(),
                "total": np.bincount(labels).tolist(),
            },
        }
        file.write_text(json.dumps(document))
    return SuiteResults.read(done.suite, done.options, done.results)


def test_rows_are_means_over_data_sets_with_the_deviation_over_seeds(done):
    table = table_of(done, "base-to-novel-calibration")
    assert [row.labels[1] for row in table.rows] == [one.name for one in done.variants] * 2
    halves = {f"{half} classes, 2 data sets (trained on base)" for half in ("base", "novel")}
    assert {row.labels[0] for row in table.rows} == halves
    columns = ("accuracy", "macro_accuracy", "nll", "ece", "brier")
    frame = done.frame[(done.frame.method == "maple") & (done.frame.target_classes == "novel")]
    row = next(row for row in table.rows if row.labels[0].startswith("novel") and row.labels[1] == "MaPLe")
    for cell, column in zip(row.cells, columns, strict=True):
        by_seed = [mean(frame[frame.seed == seed][column]) for seed in (1, 2)]
        assert (cell.mean, cell.std) == (pytest.approx(mean(by_seed)), pytest.approx(stdev(by_seed)))


def test_a_missing_seed_gives_dashes_in_every_table_of_a_suite(done, tmp_path):
    shutil.copytree(done.results, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("base/*/maple/*/*/seed2-*/eval/*-novel-test.json"):
        file.unlink()
    again = SuiteResults.read(done.suite, done.options, tmp_path)
    rows = {row.labels: row.cells for row in table_of(again, "base-to-novel-calibration").rows}
    empty = {labels for labels, cells in rows.items() if None in cells}
    assert empty == {("novel classes, 2 data sets (trained on base)", "MaPLe")}
    for folder in tmp_path.glob("base/*/kgcoop"):
        shutil.rmtree(folder)
    again = SuiteResults.read(done.suite, done.options, tmp_path)
    compared = {row.labels: row.cells for row in table_of(again, "base-to-novel-comparison").rows}
    assert compared.pop(("MaPLe", "0")) == compared.pop(("KgCoOp", "0")) == (None,) * 6
    assert {labels[1] for labels in compared} == {"2"} and all(cells[2].seeds == (1, 2) for cells in compared.values())
    titles = [axes.get_title(loc="left") for axes in draw_styled(done.suite.plots(again)["reliability"]).figure.axes]
    assert sum("ECE -" in title for title in titles) == 1


def test_calibration_names_a_single_data_set_and_ranks_no_different_trainings(done, tmp_path, capsys):
    shutil.copytree(done.results, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "base/petals/coop")
    [file, *_] = tmp_path.glob("base/shapes/coop/*/*/seed1-*/eval/shapes-base-test.json")
    for config, target in (
        (put_run(tmp_path, "coop", "shapes", classes="all"), "shapes:all"),
        (put_run(tmp_path, "maple", "shapes", seed=1, recipe="procap"), "shapes:all"),
        *((put_run(tmp_path, "tcp", name, recipe="procap"), f"{name}:base") for name in ("shapes", "tiles")),
    ):
        made_file = put_score(tmp_path, config, target, 1, 2)
        made_up = json.loads(file.read_text()) | {
            name: json.loads(made_file.read_text())[name] for name in ("config_hash", "target", "checkpoint_sha256")
        }
        made_file.write_text(json.dumps(made_up))
    code, out, _ = run(capsys, "table", "calibration", "--results", tmp_path, "--format", "json")
    [table] = json.loads(out)["tables"]
    groups = {row["labels"][0]: row["group"] for row in table["rows"]}
    assert code == 0 and len({*groups.values()}) == len(groups)
    pairs = {f"base classes, 2 data sets (trained on base): {pair}" for pair in ("petals, shapes", "shapes, tiles")}
    assert pairs <= {*groups} and "novel classes, 2 data sets (trained on base)" in groups
    assert "base classes, shapes (trained on base)" in groups
    assert {"all classes, shapes (trained on all)", "all classes, shapes (trained on base)"} <= {*groups}


def test_the_diagram_shows_the_accuracy_of_every_bin(done):
    figure = draw_styled(done.suite.plots(done)["reliability"])
    headings = [axes.get_title(loc="left").split("\n") for axes in figure.axes]
    titles = [heading[0] for heading in headings[:6]]
    assert len(figure.axes) == 12 and {"CLIP (zero-shot)", "CoOp", "MaPLe", "ProCAP"} < set(titles)
    novel = figure.axes[6 + titles.index("ProCAP")]
    rows = done.frame[(done.frame.method == "procap") & (done.frame.target_classes == "novel")]
    bins = [one.equal_width for one in rows.calibration]
    count, correct = (sum(np.array(getattr(one, name)) for one in bins) for name in ("count", "correct"))
    heights = {round(bar.get_x() * 15): bar.get_height() for bars in novel.containers[::2] for bar in bars}
    assert heights == pytest.approx({place: correct[place] / count[place] for place in np.flatnonzero(count)})
    shown = float(re.search(r"ECE ([\d.]+) %", novel.get_title(loc="left"))[1])
    assert shown == pytest.approx(rows.ece.mean(), abs=0.05)


@pytest.mark.usefixtures("blank_figures")
def test_the_report_has_the_measures_and_the_diagram(done, tmp_path):
    runs, settings = tuple(done.paths), done.options.to_json()
    write_collection(done.results, Collection(kind="suite", name=done.name, runs=runs, settings=settings))
    page = write_report(done.results, tmp_path / "page", ReportChoices([done.name]))
    assert {"Calibration"} <= {*tables(Page(page.read_text()).root)}
    assert (page.parent / "figures" / "reliability.png").is_file()
