"""The paper's claims, and its readings that differ: each has a verdict from results."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from benchmarks.tables.claims import BEST, TESTS, claims_table, load_claims
from made_results import put_config, put_score, table_of
from plug_ins import METHOD, install
from report_pages import Page, begin, put_entry, tables, words_of

from benchmarks.cli import main
from benchmarks.report.report import write_report
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.runtime import SCHEMA
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import load_suite
from procap.methods.options import ProCAPOptions
from runner.results import write_json

TITLES = ("verdict", "text", "result", "interval", "test", "section", "estimate", "low", "high", "p")
SETS = ("shapes", "petals", "tiles", "textures")


def put_suite(results, name, accuracy, **chosen):
    """A finished suite with a chosen accuracy of each run and target, of 1,000 images each."""
    suite = load_suite(name)
    options = suite.options(MINI, **{"datasets": SETS, **chosen})
    for entry in suite.plan(options):
        put_config(results, entry.spec.config)
        for target in entry.spec.targets:
            put_score(results, entry.spec.config, target, round(10 * accuracy(entry, target)), 1000)
    return SuiteResults.read(suite, options, results)


def judge_all(*suites: SuiteResults) -> dict[str, dict[str, str]]:
    """The cells of every claim of these suites by name."""
    commands = {one.name: f"procap bench {one.name}" for one in suites}
    table = claims_table({one.name: one for one in suites}, commands, {name: "with more data" for name in commands})
    return {row.labels[1]: dict(zip(TITLES, row.cells, strict=True)) for row in table.rows}


def jitter(entry):
    """A small difference between data sets and seeds, the same for all methods but not for their differences."""
    return SETS.index(entry.dataset) * (1.0 if entry.variant.method == "procap" else 0.8) + 0.3 * entry.seed


def test_a_claim_holds_fails_or_is_undecided_by_its_interval(tmp_path, monkeypatch):
    """ProCAP is far better on base classes and worse on novel ones; an own method, in no claim, is better on both."""
    install(tmp_path / "lib", {"claimed_method": METHOD}, {"theirs": "claimed_method:Theirs"})
    monkeypatch.syspath_prepend(tmp_path / "lib")

    def accuracy(entry, target):
        gain = {"procap": (10, -5), "maple": (0, 0), "coop": ((-10, 10, -10, 10)[SETS.index(entry.dataset)], -20)}
        gain["theirs"] = 30, 30
        return 60 + gain.get(entry.variant.method, (-40, -40))[":novel" in target] + jitter(entry)

    methods = ("zeroshot", "coop", "cocoop", "maple", "theirs", "procap")
    found = judge_all(done := put_suite(tmp_path, "base-to-novel", accuracy, methods=methods))
    assert found["novel"]["verdict"] == "does not hold" and float(found["novel"]["high"]) < 0
    assert re.search(r"n = 4 data sets: p = .*; 0 of 12 pairs", found["novel"]["test"])
    assert found["base-kept"]["verdict"] == "undecided"
    low, estimate, high = (float(found["base-kept"][name]) for name in ("low", "estimate", "high"))
    assert low < -1 < estimate < high and f"{low:+.2f} to {high:+.2f} (CoOp)" == found["base-kept"]["interval"]
    assert found["maple"]["verdict"] == "holds" and float(found["maple"]["low"]) > 0
    assert found["best-base"]["verdict"] == "holds" and "on 4 of 4 data sets, to be 2" in found["best-base"]["result"]
    next(tmp_path.glob("base/tiles/cocoop/*/*/*/eval/*base*")).unlink()
    lacking = judge_all(SuiteResults.read(done.suite, done.options, tmp_path))
    assert lacking["best-base"]["verdict"] == "undecided" and "; missing: CoCoOp" in lacking["best-base"]["result"]
    assert lacking["maple"]["verdict"] == "holds"


def test_intervals_are_students_over_data_sets(tmp_path):
    from scipy.stats import ttest_1samp

    gains = {("procap", name): gain for name, gain in zip(SETS, (2.0, 3.0, 5.0, 9.0), strict=True)}
    chosen = {"methods": ("maple", "procap"), "seeds": (1, 2)}
    made = put_suite(
        tmp_path, "base-to-novel", lambda run, _: 50 + gains.get((run.variant.method, run.dataset), 0), **chosen
    )
    cells = judge_all(made)["novel"]
    expected = ttest_1samp([*gains.values()], 0.0)
    low, high = expected.confidence_interval()
    numbers = [float(cells[name]) for name in ("estimate", "low", "high", "p")]
    assert numbers == pytest.approx([4.75, low, high, expected.pvalue], rel=1e-5)


@pytest.mark.parametrize(("sets", "cells"), [
    (SETS[:2], ("undecided", "0 to 2 of 2 data sets")),
    (SETS, ("undecided", "0 to 3 of 4 data sets")),
    ((*SETS, "glyphs", "digits", "coloured-shapes"), ("does not hold", "0 to 4 of 7 data sets")),
])  # fmt: skip
def test_a_number_of_data_sets_is_refuted_by_its_interval_alone(tmp_path, sets, cells):
    def accuracy(entry, target):
        return 50 + 9 * ((entry.variant.method == "procap") == (entry.dataset == SETS[0]))

    chosen = {"methods": ("coop", "cocoop", "maple", "procap"), "datasets": sets, "seeds": (1,)}
    made = put_suite(tmp_path, "base-to-novel", accuracy, **chosen)
    found = judge_all(made)["balance" if len(sets) < 7 else "nearly-all"]
    assert (found["verdict"], found["interval"]) == cells


def test_a_claim_without_its_results_is_not_tested_and_names_the_command(tmp_path):
    made = put_suite(tmp_path, "base-to-novel", lambda entry, target: 60 + jitter(entry), methods=("maple", "procap"))
    assert judge_all(made)["balance"]["result"] == "CoOp was not run, or not to the end: procap bench base-to-novel"
    tied = put_suite(tmp_path, "base-to-novel", lambda *_: 50.0, methods=("maple", "procap"), datasets=("tiles",))
    found = {name: cells["result"] for name, cells in judge_all(tied).items()}
    assert "on 1 of 1 data sets" in found["best-hm"] and "; missing: CLIP (zero-shot), Co" in found["best-hm"]
    assert "on 0 of 1 data sets" in found["nearly-all"]
    assert found["fine-grained"] == "none of oxford-pets (petals), caltech101 (shapes) was run: with more data"
    assert "no other data set was run" in found["texture-shift"]
    stable = put_suite(tmp_path, "stability", lambda *_: 50.0, datasets=("tiles",))
    assert "the deviation on one data set gives no" in judge_all(stable)["stable"]["result"]
    one = put_suite(tmp_path, "few-shot", lambda *_: 50.0, methods=("procap",), datasets=("tiles",), seeds=(1,))
    assert judge_all(one)["monotonic"]["result"].startswith("one data set with one seed")
    assert judge_all(one)["monotonic"]["result"].endswith(" --seeds 1,2,3")
    assert "no other trained method" in judge_all(one)["low-shot"]["result"]


def test_few_shot_claims(tmp_path):
    """Accuracy rises with shots, and the advantage of ProCAP with it, against the paper."""

    def accuracy(entry, target):
        shots = entry.variant.key["shots"]
        return 40 + shots * (2.0 if entry.variant.method == "procap" else 1.0) + jitter(entry)

    found = judge_all(put_suite(tmp_path, "few-shot", accuracy, seeds=(1, 2)))
    assert {name: found[name]["verdict"] for name in ("monotonic", "low-shot", "narrows", "top")} == {
        "monotonic": "holds", "low-shot": "does not hold", "narrows": "does not hold", "top": "holds",
    }  # fmt: skip
    assert "4 to 8 +8.00" in found["monotonic"]["result"] and "over CoOp -" in found["low-shot"]["result"]


def test_a_component_that_changes_nothing_does_not_help(tmp_path):
    drops = {"w/o Cross-Attn": 6.0, "w/o Gaussian": 9.0, "w/o KL": 0.0, "w/o InfoNCE": 7.5}

    def accuracy(entry, target):
        return 80 - drops.get(entry.variant.name, 3.0) * (entry.variant.name != "Full ProCAP")

    found = judge_all(put_suite(tmp_path, "ablation", accuracy))
    assert found["kl"]["verdict"] == "does not hold" and found["kl"]["interval"] == "+0.00 to +0.00"
    assert {found[name]["verdict"] for name in ("gaussian", "infonce", "cross-attention", "largest-drop")} == {"holds"}
    assert "one seed" in found["steadier"]["result"]


def test_speed_is_judged_by_repeated_measurements(tmp_path):
    """Training is slower in every measurement, inference on one data set only, and accuracy is of 400 images."""

    def row(dataset: str, method: str, step: float, fps: float, correct: int) -> dict[str, object]:
        spreads = [{"median": one, "lowest": 0.95 * one, "highest": 1.05 * one, "count": 5} for one in (step, fps)]
        measured = dict(zip(("step_seconds", "end_to_end_fps"), spreads, strict=True))
        own = {"dataset": dataset, "method": method, "mode": "reference", "precision": "fp32"}
        return {**own, **measured, "correct": correct, "test_images": 400, "accuracy": correct / 4}

    suite = load_suite("runtime")
    options = suite.options(MINI)
    rows = [row(name, "zeroshot", 1.0, 1.0, 1) for name in options.datasets]
    for name, fps in zip(options.datasets, (300.0, 500.0), strict=True):
        rows += [row(name, "maple", 1.0, 400.0, 300), row(name, "procap", 1.5, fps, 310)]
    settings = {"classes": suite.trained_classes(options)}
    report = {"schema": SCHEMA, "backbone": {"name": MINI.backbone}, "settings": settings, "rows": rows}
    write_json(tmp_path / "runtime" / "x" / "runtime.json", report)
    found = judge_all(SuiteResults.read(suite, options, tmp_path))
    slower = found["slower-training"]
    assert slower["verdict"] == "holds" and "digits +50.00; tiles +50.00 %" in slower["result"]
    assert found["slower-inference"]["verdict"] == "does not hold"
    assert found["accuracy-gain"]["verdict"] == "undecided" and "digits +2.50" in found["accuracy-gain"]["result"]


def test_every_claim_has_a_test_and_the_shares_are_those_of_the_papers_table(tmp_path):
    assert [claim.name for claim in load_claims() if claim.text and claim.section] == [*TESTS]
    names = list(dict.fromkeys(claim.suite for claim in load_claims()))
    suites = [SuiteResults.read(load_suite(name), load_suite(name).options(PAPER), tmp_path) for name in names]
    assert {cells["verdict"] for cells in judge_all(*suites).values()} == {"not tested"}
    rows = [row for row in published.base_to_novel() if row.dataset != AVERAGE]
    for half, share in BEST.items():
        sets = {row.dataset: max(getattr(one, half) for one in rows if one.dataset == row.dataset) for row in rows}
        best = [row.dataset for row in rows if row.key == "procap" and getattr(row, half) == sets[row.dataset]]
        assert share == len(best) / 11


@pytest.fixture
def results(tmp_path: Path) -> Path:
    root = tmp_path / "results"
    _, entries = begin(root, "ablation")
    for number, entry in enumerate(entries):
        put_entry(root, entry, 0.8 - 0.01 * (number % 7))
    return root


def test_the_command_prints_the_claims(results, capsys):
    assert main(["table", "claims", "--results", str(results), "--format", "json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert "do not apply to the paper's data: they use generated data sets" in table["title"]
    assert table["notes"][0].startswith(f"{len(TESTS)} claims: ")
    rows = {row["labels"][1]: row["cells"] for row in table["rows"]}
    assert "procap bench few-shot --profile mini --quick" in rows["monotonic"][2]
    assert main(["table", "claims", "--results", str(results), "--seeds", "1"]) == 2
    assert "no --seeds" in capsys.readouterr().err


def test_the_report_has_a_section_of_claims(results, tmp_path):
    for wanted, count in (((), len(TESTS)), (("ablation",), 9)):
        page = write_report(results, tmp_path / "page", wanted=wanted, shown="results")
        [section] = [one for one in Page(page.read_text()).root.all("section") if one.attributes["id"] == "claims"]
        assert f"{count} claims: " in words_of(section)
        [table] = tables(section).values()
        assert len([row for row in table.all("tr") if row.all("td")]) == count


pytestmark = pytest.mark.usefixtures("at_home")
PAGE = Path(__file__).parents[1] / "docs" / "paper.md"


@pytest.mark.parametrize("profile", [MINI, PAPER], ids=lambda profile: profile.name)
@pytest.mark.parametrize("name, count", [("readings", (19, 21)), ("readings-training", (11, 13))])
def test_every_reading_changes_one_thing_and_is_validated_on_classes_held_out(name, count, profile):
    suite = load_suite(name)
    assert len(suite.variants(suite.options(profile), "procap")) == count[profile is PAPER]
    runs = suite.plan(suite.options(profile))
    assert {run.spec.config.classes for run in runs} == {"base", "dev-base"}
    [default, *others] = {run.variant.name: run.spec.config for run in runs}.values()
    for other in others:
        options = {name for name, value in other.options.items() if value != default.options[name]}
        fields = {name for name, value in other.recipe if value != getattr(default.recipe, name)}
        assert len(options) + len(fields) + (other.precision != default.precision) == 1, other
    for run in runs:
        name = run.dataset
        held_out = (f"{name}:dev-base:val", f"{name}:dev-novel:val")
        own = (f"{name}:base:val", f"{name}:base:test", f"{name}:novel:test")
        assert run.spec.targets == (held_out if run.spec.config.classes == "dev-base" else own)


def test_an_option_of_the_user_moves_the_default_and_leaves_out_what_it_excludes():
    suite = load_suite("readings")
    options = suite.options(MINI, options={"procap": {"deep_tokens": "independent"}})
    names = {run.variant.name for run in suite.plan(options)}
    assert "deep_tokens=refined" in names and not names & {"deep_tokens=independent", "inject=final"}


# Correct images of 100 of the default, by target; a reading has more of some of them.
COUNTS = {"base:val": 60, "dev-base:val": 50, "dev-novel:val": 50, "base:test": 70, "novel:test": 70}


def write_results(results: Path, gains: dict[str, dict[str, tuple[int, ...]]], without: str = "") -> SuiteResults:
    """gains: more correct images by reading and target, one for each pair of data set and seed in order."""
    suite = load_suite("readings")
    options = suite.options(MINI, datasets=("digits", "petals"), seeds=(1, 2))
    pairs = list(product(options.datasets, options.seeds))
    for run in suite.plan(options):
        put_config(results, run.spec.config)
        for target in run.spec.targets:
            kind = target.partition(":")[2]
            more = gains.get(run.variant.name, {}).get(kind, (0, 0, 0, 0))[pairs.index((run.dataset, run.seed))]
            if run.variant.name != without or kind != "dev-novel:val":
                put_score(results, run.spec.config, target, COUNTS[kind] + more, 100)
    return SuiteResults.read(suite, options, results)


def test_a_reading_is_a_difference_to_the_default_with_the_interval_of_its_pairs(tmp_path):
    gains = {"zero_output=false": {"base:val": (1, 2, 3, 4), "dev-novel:val": (-5, -5, -5, -5)}}
    table = table_of(write_results(tmp_path, gains, without="norm=none"), "readings")
    rows = {row.labels[0]: row.cells for row in table.rows}
    assert [cell.mean for cell in rows["default"]] == [60, 50, 70, 70, 70]
    # The mean of 1 to 4 is 2.5, its standard error 0.6455, and the 97.5 % quantile of t with 3 degrees 3.1824.
    assert rows["zero_output=false"][0] == "+2.50 (0.45 to 4.55)"
    # The harmonic mean of 50 and 45 instead of 50 and 50, in every pair.
    assert rows["zero_output=false"][1] == "-2.63 (-2.63 to -2.63)"
    assert rows["zero_output=false"][2:] == ("+0.00 (0.00 to 0.00)",) * 3
    assert rows["norm=none"][1] is None and rows["norm=none"][0] is not None, "a missing result is no difference"


def test_bench_lists_the_suite_and_all_leaves_it_out(capsys):
    assert main(["bench", "--help"]) == 0 and "readings of the paper" in capsys.readouterr().out
    words = ["--profile", "mini", "--quick", "--dry-run"]
    assert main(["bench", "all", *words]) == 0 and "/dev-base/" not in capsys.readouterr().out
    assert main(["bench", "readings", *words]) == 0 and "dev-base/" in capsys.readouterr().out


def test_the_page_names_every_option_of_procap():
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", PAGE.read_text()))
    assert set(ProCAPOptions.model_fields) <= named, set(ProCAPOptions.model_fields) - named




def test_the_command_for_an_untested_claim_keeps_the_shots_and_adds_seeds(tmp_path, capsys):
    begin(tmp_path, "base-to-novel", methods=("procap",), datasets=("tiles",), seeds=(1,), shots=(2,))
    assert main(["table", "claims", "--results", str(tmp_path), "--format", "json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    rows = {row["labels"][1]: row["cells"] for row in table["rows"]}
    command = rows["average"][2].partition("procap bench base-to-novel ")[2]
    assert "--datasets tiles" in command and "--shots 2" in command and "--seeds" not in command
