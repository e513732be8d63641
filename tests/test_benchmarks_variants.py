"""Suites of one's own: variants are told apart everywhere, and only what the paper did stands beside its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_results import made, put_score, table_of

from benchmarks.plots import base_novel as halves_plots
from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.published.tolerances import CHOSEN, PRINTED
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.suites.suite import Suite
from benchmarks.tables.base_novel import base_to_novel_tables
from benchmarks.tables.check import check_metrics, list_published
from benchmarks.tables.render import render
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UsageError

SETS = ("tiles", "petals", "digits")


def depths(options, method):
    return [Variant(method, key={"depth": depth}, options={"depth": depth}) for depth in (1, 9)]


DEPTHS = Suite("depths", "how deep", ("maple", "procap"), base_to_novel_tables, seeds=(1,), variants=depths)


def test_the_radar_has_a_row_for_every_variant_called_as_in_the_table(tmp_path):
    done = made(tmp_path, DEPTHS, datasets=SETS)
    axes = halves_plots.halves_plots(done)["hm-radar"]().axes[0]
    drawn = {line.get_label(): list(line.get_ydata())[:-1] for line in axes.lines}
    table = {row.labels: row.cells[2].mean for row in table_of(done, "depths").rows}
    assert set(drawn) == {f"{name} (depth {depth})" for name in ("MaPLe", "ProCAP") for depth in (1, 9)}
    for title, heights in drawn.items():
        assert heights == pytest.approx([table[name, title] for name in SETS])


def test_arms_that_nothing_tells_apart_are_refused_before_anything_runs():
    def variants(options, method):
        return [Variant(method, options={"depth": depth}) for depth in (1, 9)]

    suite = replace(DEPTHS, variants=variants)
    with pytest.raises(UsageError, match="two variants are called 'MaPLe'"):
        suite.plan(suite.options(MINI))


@pytest.mark.parametrize("change", [{"options": {"depth": 3}}, {"overrides": {"lr": 0.1}}, {"part": 0.5}, {"shots": 4}])
def test_a_changed_method_is_not_what_the_paper_prints(tmp_path, change):
    def variants(options, method):
        return [Variant(method), Variant(method, key={"changed": "yes"}, **change)]

    suite = replace(DEPTHS, name="base-to-novel", methods=("procap",), variants=variants, published="base_to_novel")
    done = made(tmp_path, suite, PAPER, datasets=("dtd",))
    lines = [row for row in table_of(done, "base-to-novel").rows if row.source == "ours"]
    assert [row.labels[1] for row in lines] == ["ProCAP, reproduced", "ProCAP (changed yes)"]
    assert [row.cells[0].published is None for row in lines] == [False, True]
    assert {check.method for check in check_metrics(done)} == {"ProCAP"} and len(check_metrics(done)) == 3


@pytest.mark.parametrize(
    ("name", "chosen", "said"),
    [
        ("base-to-novel", {"datasets": ("dtd", "eurosat")}, {"ProCAP, reproduced", "MaPLe, reproduced"}),
        ("ablation", {"datasets": ("dtd",), "methods": ("maple", "coop")}, set()),
        ("prompt-length", {"datasets": ("dtd",)}, set()),
        ("duration", {"datasets": ("dtd",)}, set()),
        ("cross-dataset", {"datasets": ("sun397",)}, set()),
        ("few-shot", {"datasets": ("dtd",), "shots": (16,)}, set()),
    ],
)
def test_reproduced_is_said_of_what_stands_beside_a_published_number_alone(tmp_path, name, chosen, said):
    done = made(tmp_path, name, PAPER, **{"methods": ("maple", "procap"), "seeds": (1,), **chosen})
    found = set()
    for row in (row for table in done.suite.tables(done) for row in table.rows):
        words = [label for label in row.labels if label.endswith(", reproduced")]
        known = any(isinstance(cell, Metric) and cell.published is not None for cell in row.cells)
        assert bool(words) == known, row
        found |= {*words}
    assert found == said


SUITES_WITH_TABLES = ("base-to-novel", "stability", "ablation", "duration", "cross-dataset", "domain-generalization")


@pytest.mark.parametrize("name", [*SUITES_WITH_TABLES, "qualitative"])
def test_results_of_another_backbone_stand_beside_published_ones_with_a_note_alone(tmp_path, name):
    chosen = {} if name.startswith(("cross", "domain")) else {"datasets": ("eurosat",)}
    done = made(tmp_path, name, PAPER, methods=("procap",), seeds=(1,), backbone="ViT-L/14", **chosen)
    tables = [table for table in done.suite.tables(done) if any(row.source == "published" for row in table.rows)]
    assert tables or name == "duration", "the paper prints averages of durations alone"
    for table in tables:
        [note] = [note for note in table.notes if note.startswith("These results do not compare with published ones")]
        assert "the backbone is ViT-L-14" in note
        groups = {source: {row.group for row in table.rows if row.source == source} for source in ("ours", "published")}
        assert not groups["ours"] & groups["published"], "each group has its own best"
        assert not any(metric.published for metric in table.metrics)


def test_a_mean_over_fewer_whole_seeds_is_none_and_says_so(tmp_path):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd",), methods=("procap",), seeds=(1, 2, 3))
    for entry in done.runs[1:]:
        for target in entry.spec.targets:
            put_score(tmp_path, entry.spec.config, target, 1, 100, of=400)
    done = SuiteResults.read(done.suite, done.options, tmp_path)
    table = table_of(done, "base-to-novel")
    [row] = [row for row in table.rows if row.source == "ours"]
    assert row.cells[:3] == (None, None, None)
    assert any(note.startswith("LIMITED beside whole: 4 evaluations") for note in table.notes)
    assert {check.verdict for check in check_metrics(done)} == {"missing"}


def test_fewer_epochs_have_no_printed_deviation(tmp_path):
    done = made(tmp_path, "duration", PAPER, seeds=(1,), methods=("procap",), low=900)
    reasons = {check.metric: check.tolerance.reason for check in list_published(done)}
    assert {name: reason for name, reason in reasons.items() if "50 epochs" in name} == dict.fromkeys(
        ("Base after 50 epochs", "Novel after 50 epochs", "HM after 50 epochs"), PRINTED
    )
    assert {reason for name, reason in reasons.items() if "50 epochs" not in name} == {CHOSEN}


def test_the_longest_training_of_procap_is_compared_with_the_others(tmp_path):
    done = made(tmp_path, "duration", PAPER, datasets=("dtd",), methods=("coop", "procap"), seeds=(1, 2))
    longest = max(variant.key["epochs"] for variant in done.variants if variant.method == "procap")
    assert longest < max(variant.key["epochs"] for variant in done.variants)
    assert f"ProCAP (epochs {longest}) compared" in table_of(done, "duration-comparison").title


def test_a_target_of_two_sources_is_counted_once_in_a_comparison(tmp_path):
    done = made(tmp_path, "cross-dataset", datasets=("tiles", "petals"), methods=("coop", "procap"), seeds=(1,))
    for entry in done.runs:
        for target in entry.spec.targets:
            put_score(tmp_path, entry.spec.config, target, 200 + entry.seed, 400)
    done = SuiteResults.read(done.suite, done.options, tmp_path)
    tables = {table.name: table for table in done.suite.tables(done)}
    found = [name for name in tables if "comparison" in name]
    assert found == ["cross-dataset-comparison-from-tiles", "cross-dataset-comparison-from-petals"]
    targets = {target.split(":")[0] for entry in done.runs for target in entry.spec.targets}
    for name in found:
        [row] = tables[name].rows
        assert row.labels[1] == f"{len(targets) - 1} ({len(targets) - 1})"
    assert len({table.title for table in tables.values()}) == len(tables)


def test_minus_is_a_minus_and_nothing_is_never_minus_nothing():
    lines = (
        Row(("a",), (Metric(-7.53), Metric(-0.001), "-1.20 to 3.40")),
        Row(("b-2",), (Metric(1e-5), Metric(2), "x-1")),
    )
    table = Table("t", "T", ("L",), (Column("A", ""), Column("B", ""), Column("C", "")), lines)
    text = render(table, "latex")
    assert r"a & $-$7.53 & 0.00 & $-$1.20 to 3.40" in text and "b-2 & 0.00 & 2.00 & x-1" in text
    assert "-0.00" not in render(table, "md")
