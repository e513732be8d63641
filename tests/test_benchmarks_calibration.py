"""The tables and the diagram of calibration show means of what evaluations recorded, and the classes that fail most."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from statistics import mean, stdev

import numpy as np
import pytest
from made_results import made, table_of
from report_pages import Page, tables

from benchmarks import results
from benchmarks.cli import main
from benchmarks.report.report import write_report
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.table import Metric
from runner.calibration import ImagePredictions, measure_calibration
from runner.image_answers import pack_bits
from runner.run_collection import Collection, write_collection

METHODS = ("zeroshot", "coop", "cocoop", "kgcoop", "maple", "procap")
NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> SuiteResults:
    """Base-to-novel of six methods, two data sets and two seeds, with drawn predictions for three classes."""
    done = made(
        tmp_path_factory.mktemp("made"), "base-to-novel", datasets=("shapes", "petals"), methods=METHODS, seeds=(1, 2)
    )
    for number, file in enumerate(sorted(done.results.rglob("eval/*.json"))):
        document, draws = json.loads(file.read_text()), np.random.default_rng(number)
        total = document["total"]
        confidence, labels = draws.uniform(0.3, 1, total), np.arange(total) % 3
        # A class with a lower share of correct images in one data set.
        right = draws.random(total) < np.where((labels == 1) & ("petals" in str(file)), 0.2, confidence)
        predicted = np.where(right, labels, (labels + 1) % 3)
        images = ImagePredictions(labels, predicted, confidence, nll=-np.log(confidence), brier=1 - confidence)
        document |= {
            "correct": int(right.sum()),
            "num_classes": 3,
            "correct_bits": pack_bits(right),
            "calibration": measure_calibration(images).model_dump(),
            "per_class": {
                "names": NAMES,
                "correct": np.bincount(labels[right], minlength=3).tolist(),
                "total": np.bincount(labels).tolist(),
            },
        }
        file.write_text(json.dumps(document))
    return SuiteResults.read(done.suite, done.options, done.results)


def test_rows_are_means_over_data_sets_with_the_deviation_over_seeds(done):
    table = table_of(done, "base-to-novel-calibration")
    assert [row.labels[1] for row in table.rows] == [one.name for one in done.variants] * 2
    assert {row.labels[0] for row in table.rows} == {
        f"{half} classes, 2 data sets (trained on base)" for half in ("base", "novel")
    }
    columns = ("accuracy", "macro_accuracy", "nll", "ece", "ece_mass", "brier")
    frame = done.frame[(done.frame.method == "maple") & (done.frame.target_classes == "novel")]
    row = next(row for row in table.rows if row.labels[0].startswith("novel") and row.labels[1] == "MaPLe")
    for cell, column in zip(row.cells, columns, strict=True):
        by_seed = [mean(frame[frame.seed == seed][column]) for seed in (1, 2)]
        assert isinstance(cell, Metric)
        assert (cell.mean, cell.std) == (pytest.approx(mean(by_seed)), pytest.approx(stdev(by_seed)))


def test_the_worst_classes_are_those_of_procap_beside_zero_shot_and_the_best_other_method(done):
    table = table_of(done, "base-to-novel-worst-classes")
    shares = {method: share_by_class(done, method) for method in METHODS}
    best = max(METHODS[1:-1], key=lambda method: done.frame[done.frame.method == method].correct.sum())
    titles = {one.method: one.name for one in done.variants}
    assert [column.title for column in table.columns[1:]] == [titles[name] for name in ("procap", "zeroshot", best)]
    assert len(table.rows) == 2 * 2 * 3 and {row.labels[::2] for row in table.rows[:2]} == {
        ("b", "base"),
        ("b", "novel"),
    }
    found = [row.cells[1].mean for row in table.rows if isinstance(row.cells[1], Metric)]
    assert found == sorted(found) and found == pytest.approx(sorted(shares["procap"].values()))
    for row in table.rows:
        label, dataset, half = row.labels
        wanted = [shares[name][dataset, half, label] for name in ("procap", "zeroshot", best)]
        assert [cell.mean for cell in row.cells[1:] if isinstance(cell, Metric)] == pytest.approx(wanted)


def share_by_class(done: SuiteResults, method: str) -> Mapping[tuple[str, str, str], float]:
    """Sum the counts of both seeds, in percent."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in done.frame[done.frame.method == method].itertuples():
        for name, correct, total in zip(NAMES, row.per_class.correct, row.per_class.total, strict=True):
            counts = found.setdefault((row.dataset, row.target_classes, name), [0, 0])
            counts[0], counts[1] = counts[0] + correct, counts[1] + total
    return {key: 100 * correct / total for key, (correct, total) in found.items()}


def test_of_many_methods_the_diagram_shows_five_with_the_accuracy_of_every_bin(done):
    figure = done.suite.plots(done)["reliability"]()
    headings = [axes.get_title(loc="left").split("\n") for axes in figure.axes]
    titles = [heading[0] for heading in headings[:5]]
    assert len(figure.axes) == 10 and {"CLIP (zero-shot)", "CoOp", "MaPLe", "ProCAP"} < set(titles)
    novel = figure.axes[5 + titles.index("ProCAP")]
    rows = done.frame[(done.frame.method == "procap") & (done.frame.target_classes == "novel")]
    count, correct = (
        sum(np.array(getattr(one.equal_width, name)) for one in rows.calibration) for name in ("count", "correct")
    )
    heights = {round(bar.get_x() * 15): bar.get_height() for bars in novel.containers[::2] for bar in bars}
    assert heights == pytest.approx({place: correct[place] / count[place] for place in np.flatnonzero(count)})
    shown = float(re.search(r"ECE ([\d.]+) %", novel.get_title(loc="left"))[1])
    assert shown == pytest.approx(rows.ece.mean(), abs=0.05)


def test_the_command_prints_all_runs_and_names_what_to_do_about_older_files(done, tmp_path, capsys):
    assert main(["table", "calibration", "--results", str(done.results), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [table["name"] for table in document["tables"]] == ["calibration", "worst-classes"]
    assert len(document["tables"][0]["rows"]) == 2 * len(METHODS)
    old = made(tmp_path, "base-to-novel", datasets=("shapes",), methods=("maple",), seeds=(1,))
    assert not [table for table in old.suite.tables(old) if "calibration" in table.name]
    assert old.suite.plots(old)["reliability"]() is None
    assert results.load(tmp_path).nll.isna().all()
    assert main(["table", "calibration", "--results", str(tmp_path)]) == 1
    assert "procap eval --force" in capsys.readouterr().err


def test_the_report_has_the_measures_the_worst_classes_and_the_diagram(done, tmp_path):
    runs, settings = tuple(done.paths), done.options.to_json()
    write_collection(done.results, Collection(kind="suite", name=done.name, runs=runs, settings=settings))
    page = write_report(done.results, tmp_path / "page", wanted=[done.name])
    assert {"Calibration", "Classes with the lowest accuracies of ProCAP"} <= {*tables(Page(page.read_text()).root)}
    assert (page.parent / "figures" / "reliability.png").is_file()
