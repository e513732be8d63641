"""Runs trained on base classes among the names of all: measures, table, plot, and methods with two rules."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_results import made, put_config, put_score, table_of
from small_runs import perturb, pictures, seeded

from benchmarks.plots.style import draw_styled
from benchmarks.results import load
from benchmarks.results.detection import MEASURES, detect, openworld_auc
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from procap.methods import build_method
from runner.results import EvalResult, write_json

BASE = np.array([True, True, True, False, False, False])
SCORES = np.array([0.9, 0.6, 0.8, 0.7, 0.2, 0.1])
"""Highest probabilities of a base class: three base images, then three novel ones."""


def test_equal_scores_count_one_half_in_auroc():
    # Of four pairs 0.9 > 0.5, 0.9 > 0.1 and 0.5 > 0.1 are in order, and 0.5 = 0.5 counts one half. All positive images
    # reach 0.5, and so does one of two others.
    positive, scores = np.array([True, True, False, False]), np.array([0.9, 0.5, 0.5, 0.1])
    assert detect(positive, scores) == (87.5, 50.0)


def test_fpr95_is_that_of_the_highest_score_that_19_of_20_positive_images_reach():
    positive = np.arange(24) < 20
    scores = np.concatenate([[0.9] * 18, [0.5, 0.1], [0.95, 0.6, 0.5, 0.4]])
    assert detect(positive, scores)[1] == 75.0


def test_openworld_auc_counts_pairs_in_order_of_which_both_are_right():
    # Base images of 0.9 and 0.6 and novel ones of 0.7 and 0.2 are right: 0.9 > 0.7, 0.9 > 0.2 and 0.6 > 0.2 of 9 pairs.
    right = np.array([True, True, False, True, True, False])
    assert openworld_auc(BASE, SCORES, right) == pytest.approx(100 * 3 / 9)
    assert openworld_auc(BASE, SCORES, right & ~BASE) == 0
    assert openworld_auc(BASE, SCORES, np.zeros(6, bool)) == 0


def change(file, labels, predicted, classes, **more):
    """Give the images of a result their labels and predictions."""
    true, right = np.array(labels), np.equal(labels, predicted)
    counts = [np.bincount(part, minlength=classes).tolist() for part in (true[right], true)]
    document = json.loads(file.read_text()) | {"labels": labels, "predicted": predicted, "num_classes": classes}
    document |= {"per_class": dict(zip(("correct", "total"), counts, strict=True)), **more}
    write_json(file, EvalResult.model_validate(document))


@pytest.fixture
def done(tmp_path) -> SuiteResults:
    """The suite with one run on four classes, of which 0 and 1 are base, and six test images."""
    suite = load_suite("open-world")
    done = made(tmp_path, suite, methods=("maple",), datasets=("tiles",), seeds=(1,), skip=lambda *_: True)
    [run] = done.runs
    put = put_config(tmp_path, run.spec.config)
    change(put_score(tmp_path, put, "tiles:base", 2, 3), [0, 1, 1], [0, 1, 0], 2)
    change(put_score(tmp_path, put, "tiles:novel", 2, 3), [0, 1, 1], [0, 1, 0], 2)
    more = {"confidence": [0.95] * 6, "base_confidence": SCORES.tolist()}
    change(put_score(tmp_path, put, "tiles:all", 3, 6), [0, 1, 1, 2, 3, 3], [0, 2, 1, 2, 0, 0], 4, **more)
    return SuiteResults.read(suite, done.options, tmp_path)


def test_the_table_has_the_measures_of_six_images(done, tmp_path):
    [row] = table_of(done, "open-world").rows
    # Two of three images of each half are right. Among all names two base images are, and one novel one.
    base, novel = 100 * 2 / 3, 100 / 3
    of_all = [base, novel, 2 * base * novel / (base + novel)]
    # AUROC: 0.9 and 0.8 precede three novel images, 0.6 two. FPR95: 0.7 is the only novel score above 0.6.
    expected = [base, base, base, *of_all, 100 * 8 / 9, 100 / 3, 100 * 3 / 9]
    assert [cell.mean for cell in row.cells] == pytest.approx(expected)
    frame = load(tmp_path, evaluation=None).set_index("target_classes")
    assert frame.loc["all", [*MEASURES]].tolist() == pytest.approx([*of_all[:2], *expected[6:]])
    assert frame.loc[["base", "novel"], [*MEASURES]].isna().all(axis=None)
    for name, hm in {"open-world": of_all[2], "hm-bars": base}.items():
        [panel] = draw_styled(done.suite.plots(done)[name]).axes
        assert [bar.get_height() for bar in panel.patches] == pytest.approx([hm])


def test_a_result_without_probabilities_has_no_detection(done, tmp_path):
    [file] = tmp_path.rglob("*-all-test.json")
    old = {"confidence": None, "base_confidence": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | old))
    table = table_of(SuiteResults.read(done.suite, done.options, tmp_path), "open-world")
    assert [cell is None for cell in table.rows[0].cells] == [False] * 3 + [True] * 6


def test_the_first_images_of_all_are_not_compared_with_those_of_a_half(done, tmp_path):
    [file] = tmp_path.rglob("*-all-test.json")
    for count, has_both in ((4, True), (3, False)):
        changes = {"limit": count, "total": count, "correct": count - 1, "confidence": [0.95] * count}
        changes |= {"base_confidence": SCORES[:count].tolist()}
        change(file, [0, 1, 1, 2][:count], [0, 2, 1, 2][:count], 4, **changes)
        measures = load(tmp_path).set_index("target_classes").loc["all", [*MEASURES]]
        assert measures.notna().tolist() == [has_both] * 4 + [False]


ALIKE, AS_NEW, BY_CLASS = "one rule", "training classes are treated as new ones", "training classes keep theirs"
RULES = {"maple": ALIKE, "dept": AS_NEW, "dpc": AS_NEW, "mmrl": AS_NEW, "2sfs": BY_CLASS, "taskres": BY_CLASS}


@pytest.mark.parametrize("method", RULES)
def test_methods_with_a_rule_for_new_classes_do_as_documented_where_both_are_present(method, tiny_clip, tiny_space):
    """Compare the logits of two training and three new names together with those of each by themselves."""
    trained, new = (replace(tiny_space, classnames=tiny_space.classnames[part]) for part in (slice(2), slice(2, None)))
    built = perturb(build_method(method, tiny_clip, trained, {}, seeded()))
    together, base, novel = (built.classifier(space)(pictures()) for space in (tiny_space, trained, new))
    torch.testing.assert_close(together[:, 2:], novel, rtol=1e-4, atol=1e-4)
    assert torch.allclose(together[:, :2], base, rtol=1e-4, atol=1e-4) == (RULES[method] != AS_NEW)
