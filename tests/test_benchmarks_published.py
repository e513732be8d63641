"""Published figures are read as printed, and stand only beside results that compare with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_results import made, table_of

from benchmarks.experiment.profiles import MINI, PAPER
from benchmarks.experiment.published import (
    AVERAGE,
    DATASETS,
    METHOD_KEYS,
    PUBLISHED,
    display_name,
    load_rows,
)
from benchmarks.experiment.suite import Suite, Variant
from benchmarks.plots import halves as halves_plots
from benchmarks.results.metrics import Metric
from benchmarks.tables.agreement import check_table
from benchmarks.tables.base_novel import base_to_novel_tables
from benchmarks.tables.render import render
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UsageError
from procap.methods import METHODS
from shards.catalogue import CATALOGUE
from shards.catalogue import PUBLISHED as PUBLISHED_SETS
from shards.files import file_sha256

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "ablation": "df949d4441dd7ccc", "base_to_novel": "1698719628061177", "cross_dataset": "0658f0b7dd111a52",
    "datasets": "93c053ed24cd0c7d", "domain_generalization": "1a4f896824d8db0c", "runtime": "923465050e920c1f",
    "seed_stability": "3487b1720525209d", "templates": "6f6154e09f998504", "training_duration": "31b7cdced9ba5285",
}  # fmt: skip
"""The first 16 hex digits of the SHA-256 of each table as it was copied from the paper."""


def test_the_tables_are_the_papers_to_the_letter_and_are_installed():
    assert '"benchmarks.experiment.published" = ["*.csv"]' in (ROOT / "pyproject.toml").read_text()
    assert {file.stem: file_sha256(file)[:16] for file in PUBLISHED.glob("*.csv")} == FILES


def test_names_of_data_sets_are_the_catalogues_and_lead_back():
    assert dict(DATASETS) == {dataset.name: dataset.title for dataset in PUBLISHED_SETS}
    for name, title in DATASETS.items():
        assert display_name(name) == title and name in CATALOGUE
    assert display_name(AVERAGE) == AVERAGE == "Average"
    for own in ("shapes", "caltech101-split7", "my-birds"):
        assert display_name(own) == own


def test_our_methods_have_their_published_rows_and_the_others_keep_their_names():
    methods: dict = {}
    for line in load_rows("base_to_novel"):
        methods.setdefault(line.method, []).append(line)
    assert len(methods) == 18 and len(load_rows("base_to_novel")) == 17 * 12 + 1
    assert set(METHOD_KEYS.values()) == set(METHODS)
    ours = {method: METHOD_KEYS[method] for method in methods if method in METHOD_KEYS}
    assert ours == {
        "CLIP": "zeroshot", "CoOp": "coop", "CoCoOp": "cocoop", "MaPLe": "maple", "KgCoOp": "kgcoop",
        "PromptSRC": "promptsrc", "CoPrompt": "coprompt", "TCP": "tcp", "MMA": "mma", "SkipT": "skipt",
        "2SFS": "2sfs", "MMLoP": "mmlop", "ProCAP": "procap",
    }  # fmt: skip
    for method, lines in methods.items():
        sets = {line.dataset for line in lines}
        assert sets == ({AVERAGE} if method == "DCPL" else {AVERAGE, *list(DATASETS)[:11]})
        assert {line.key for line in lines} == {ours.get(method)} and len({line.venue for line in lines}) == 1
    venues = {line.method: line.venue for line in load_rows("cross_dataset")}
    assert (venues["MMRL"], venues["TCP"], venues["ProCAP"]) == ("CVPR'25", "CVPR'24", "Ours")


def test_a_number_is_found_by_our_names():
    lines = {(line.key, line.dataset): line for line in load_rows("base_to_novel")}
    line = lines["procap", "oxford-flowers"]
    assert (line.base, line.novel, line.hm) == (98.39, 75.60, 85.50)
    assert lines["maple", AVERAGE].hm == 78.55


def test_a_method_in_procaps_recipe_is_not_compared_with_published_numbers(tmp_path):
    chosen: dict[str, Any] = {"datasets": ("dtd",), "methods": ("maple", "procap"), "seeds": (1,), "recipe": "procap"}
    done = made(tmp_path, "base-to-novel", PAPER, **chosen)
    table = table_of(done, "base-to-novel")
    groups = [{row.group for row in table.rows if row.source == source} for source in ("ours", "published")]
    assert not groups[0] & groups[1] and len(groups[0]) == 1, "all of ours have one recipe"
    assert any("each method in ProCAP's recipe" in note for note in table.notes)
    assert not any(metric.published for metric in table.metrics)
    assert not table_of(done, "base-to-novel-speed").ranks(), "runs on several machines are no race"


SETS = ("tiles", "petals", "digits")


def depths(options, method):
    return [Variant(method, key={"depth": depth}, options={"depth": depth}) for depth in (1, 9)]


DEPTHS = Suite("depths", "how deep", ("maple", "procap"), base_to_novel_tables, seeds=(1,), variants=depths)


def test_the_radar_has_a_row_for_every_variant_called_as_in_the_table(tmp_path):
    done = made(tmp_path, DEPTHS, datasets=SETS)
    axes = halves_plots.halves_plots(done)["hm-radar"]().axes[0]
    drawn = {line.get_label(): list(line.get_ydata())[:-1] for line in axes.lines}
    table = {row.labels: row.cells[2].mean for row in table_of(done, "depths").rows}
    assert set(drawn) == {f"{name}, depth {depth}" for name in ("MaPLe", "ProCAP") for depth in (1, 9)}
    for title, heights in drawn.items():
        assert heights == pytest.approx([table[name, title] for name in SETS])


def test_arms_that_nothing_tells_apart_are_refused_before_anything_runs():
    alike = [{"depth": depth} for depth in (1, 9)]
    suite = replace(DEPTHS, variants=lambda options, method: [Variant(method, options=one) for one in alike])
    with pytest.raises(UsageError, match="two variants are called 'MaPLe'"):
        suite.plan(suite.options(MINI))


@pytest.mark.parametrize("change", [{"options": {"depth": 3}}, {"overrides": {"lr": 0.1}}, {"part": 0.5}, {"shots": 4}])
def test_a_changed_method_is_not_what_the_paper_prints(tmp_path, change):
    def variants(options, method):
        return [Variant(method), Variant(method, key={"changed": "yes"}, **change)]

    suite = replace(DEPTHS, name="base-to-novel", methods=("procap",), variants=variants)
    done = made(tmp_path, suite, PAPER, datasets=("dtd",))
    lines = [row for row in table_of(done, "base-to-novel").rows if row.source == "ours"]
    assert [row.labels[1] for row in lines] == ["ProCAP", "ProCAP, changed yes"]
    assert [row.cells[0].published is None for row in lines] == [False, True]
    assert [row.labels[0] for row in check_table(done, 1.0)[0].rows] == ["DTD, ProCAP"] * 3


def test_the_longest_training_of_procap_is_compared_with_the_others(tmp_path):
    done = made(tmp_path, "duration", PAPER, datasets=("dtd",), methods=("coop", "procap"), seeds=(1, 2))
    longest = max(variant.key["epochs"] for variant in done.variants if variant.method == "procap")
    assert longest < max(variant.key["epochs"] for variant in done.variants)
    assert f"ProCAP, epochs {longest} compared" in table_of(done, "duration-comparison").title


def test_over_two_sources_there_is_no_comparison_that_would_count_a_target_twice(tmp_path):
    done = made(tmp_path, "cross-dataset", datasets=("tiles", "petals"), methods=("coop", "procap"), seeds=(1,))
    assert [table.name for table in done.suite.tables(done)] == ["cross-dataset", "cross-dataset-from-petals"]


def test_minus_is_a_minus_and_nothing_is_never_minus_nothing():
    values = {"a": (Metric(-7.53), Metric(-0.001), "-1.20 to 3.40"), "b-2": (Metric(1e-5), Metric(2), "x-1")}
    lines = tuple(Row((name,), cells) for name, cells in values.items())
    table = Table("t", "T", ("L",), (Column("A", ""), Column("B", ""), Column("C", "")), lines)
    text = render(table, "latex")
    assert r"a & $-$7.53 & 0.00 & $-$1.20 to 3.40" in text and "b-2 & 0.00 & 2.00 & x-1" in text
    assert "-0.00" not in render(table, "md")
