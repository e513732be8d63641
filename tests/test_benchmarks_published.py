"""Published figures are read as printed, and stand only beside results that compare with them."""

import shlex
import shutil
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import made, put_score, table_of

from benchmarks.plots import base_novel as halves_plots
from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.published.tables import (
    AVERAGE,
    DATASETS,
    METHOD_KEYS,
    PUBLISHED,
    base_to_novel,
    cross_dataset,
    display_name,
    halves,
)
from benchmarks.results.published.tolerances import CHOSEN, PRINTED
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.studies.audit import audit, audit_table, by_method, check_average_hm, check_hm, check_mean
from benchmarks.suites.suite import Suite
from benchmarks.tables.base_novel import base_to_novel_tables
from benchmarks.tables.check import check_metrics, list_published
from benchmarks.tables.render import render
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UsageError
from procap.methods import METHODS
from shards.catalogue import CATALOGUE
from shards.catalogue import PUBLISHED as PUBLISHED_SETS

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "published"
FILES = sorted(file.name for file in PUBLISHED.glob("*.csv"))


# Table, place, what is printed, and what a separate computation gave in its place.
KNOWN = [
    ("base-to-novel", "SPTR, Average, base", 84.85, 84.861),
    ("base-to-novel", "SPTR, StanfordCars", 78.53, 78.509),
    ("base-to-novel", "SPTR, Flowers102", 86.86, 86.827),
    ("base-to-novel", "SPTR, Food101", 91.94, 91.918),
    ("base-to-novel", "SPTR, FGVCAircraft", 42.09, 42.121),
    ("base-to-novel", "SPTR, SUN397", 80.90, 80.876),
    ("base-to-novel", "SPTR, DTD", 71.50, 71.487),
    ("base-to-novel", "SPTR, UCF101", 84.47, 84.433),
    ("base-to-novel", "Sparse-KgCoOp, Average, base", 83.20, 83.345),
    ("base-to-novel", "Sparse-KgCoOp, Average, novel", 73.71, 73.696),
    ("base-to-novel", "Sparse-KgCoOp, OxfordPets", 96.90, 96.849),
    ("base-to-novel", "Sparse-KgCoOp, StanfordCars", 76.39, 76.401),
    ("base-to-novel", "Sparse-KgCoOp, FGVCAircraft", 37.24, 37.266),
    ("base-to-novel", "MMA, Average, novel", 76.80, 76.936),
    ("base-to-novel", "MPCLe, FGVCAircraft", 41.57, 39.950),
    ("stability", "ProCAP, Average, HM", 81.12, 81.33),
    ("domain-generalization", "DCPL*, ImageNet", 71.37, 70.63),
]


def harmonic(base: Fraction, novel: Fraction) -> Fraction:
    return 2 / (1 / base + 1 / novel)


@pytest.mark.parametrize("file", FILES)
def test_the_tables_are_the_papers_to_the_letter_and_are_installed(file):
    assert '"benchmarks.results.published" = ["*.csv"]' in (ROOT / "pyproject.toml").read_text()
    assert len(FILES) == 9
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here")
    assert (PUBLISHED / file).read_bytes() == (SHARED / file).read_bytes()


def test_names_of_data_sets_are_the_catalogues_and_lead_back():
    assert dict(DATASETS) == {dataset.name: dataset.title for dataset in PUBLISHED_SETS}
    for name, title in DATASETS.items():
        assert display_name(name) == title and name in CATALOGUE
    assert display_name(AVERAGE) == AVERAGE == "Average"
    for own in ("shapes", "caltech101-split7", "my-birds"):
        assert display_name(own) == own


def test_our_methods_have_their_published_rows_and_the_others_keep_their_names():
    methods = by_method(base_to_novel())
    assert len(methods) == 18 and len(base_to_novel()) == 17 * 12 + 1
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
    venues = {line.method: line.venue for line in cross_dataset()}
    assert (venues["MMRL"], venues["TCP"], venues["ProCAP"]) == ("CVPR'25", "CVPR'24", "Ours")


def test_a_number_is_found_by_our_names():
    line = halves("procap", "oxford-flowers")
    assert line and (line.base, line.novel, line.hm) == (98.39, 75.60, 85.50)
    assert halves("maple", AVERAGE).hm == 78.55
    assert halves("procap", "shapes") is None and halves("procap", "dtd-split7") is None


def test_the_audit_finds_what_disagrees_and_nothing_else():
    found = {(finding.table, finding.where): finding for finding in audit().findings}
    assert set(found) == {(table, where) for table, where, _, _ in KNOWN} and len(found) == len(KNOWN)
    for table, where, figure, recomputed in KNOWN:
        finding = found[table, where]
        assert finding.printed == figure and finding.recomputed == pytest.approx(recomputed, abs=6e-4)
        assert finding.low <= finding.recomputed <= finding.high
    aircraft = found["base-to-novel", "MPCLe, FGVCAircraft"]
    assert (round(aircraft.low, 3), round(aircraft.high, 3)) == (39.945, 39.955)
    # No accuracy is above 100.00: rounding has only one side there.
    pets = found["base-to-novel", "Sparse-KgCoOp, OxfordPets"]
    assert pets.high == pytest.approx(float(harmonic(Fraction("93.895"), Fraction(100))), abs=1e-9)


def test_both_readings_of_an_average_harmonic_mean_are_named():
    readings = audit().readings
    assert readings["base-to-novel", "ProCAP, Average"] == ("HM of averages",)
    assert readings["stability", "ProCAP, Average"] == ("mean of HMs",)
    assert readings["duration", "ProCAP, 10 epochs"] == ("HM of averages",)
    neither = check_average_hm("t", "w", 85.43, 77.61, 81.25, [81.0, 81.2])
    assert not neither.agrees and "HM of averages" in neither.remark
    assert neither.recomputed == pytest.approx(81.332, abs=1e-3)
    # One reading is as good as the other where base and novel are alike everywhere.
    assert check_average_hm("t", "w", 80.00, 80.00, 80.00, [80.0, 80.0]).readings == ("HM of averages", "mean of HMs")


counts = st.tuples(st.integers(40, 30_000), st.floats(0.02, 1.0)).map(lambda draw: (round(draw[0] * draw[1]), draw[0]))


def percent(count: tuple[int, int]) -> Fraction:
    return Fraction(100 * max(count[0], 1), count[1])


@settings(max_examples=200, deadline=None)
@given(counts, counts)
def test_rounding_alone_is_never_reported(base, novel):
    """True accuracies from integer counts, printed with two decimals: the harmonic mean fits, whatever they are."""
    true = percent(base), percent(novel)
    figures = [float(f"{float(figure):.2f}") for figure in (*true, harmonic(*true))]
    assert check_hm("t", "w", *figures).agrees
    assert check_average_hm("t", "w", *figures).readings == ("HM of averages",)


@settings(max_examples=200, deadline=None)
@given(st.lists(counts, min_size=2, max_size=11), st.sampled_from([-0.03, 0.03, 0.5]))
def test_a_mean_is_reported_from_three_hundredths_on_and_never_for_rounding(parts, error):
    """Rounded parts move their mean by half a hundredth at most, and the mean itself is rounded once more."""
    true = [percent(part) for part in parts]
    figures = [round(float(figure), 2) for figure in true]
    centre = round(float(sum(true) / len(true)), 2)
    assert check_mean("t", "w", "average", figures, centre).agrees
    off = check_mean("t", "w", "average", figures, round(centre + error, 2))
    assert not off.agrees and off.high - off.low <= 0.0101


@pytest.mark.parametrize(("file", "line", "column", "figure", "places"), [
    ("base_to_novel.csv", "MaPLe,CVPR'23,UCF101", 5, "80.80", ["MaPLe, UCF101"]),
    ("base_to_novel.csv", "TCP,CVPR'24,Average", 4, "75.39", ["TCP, Average, novel", "TCP, Average"]),
    ("base_to_novel.csv", "DCPL,CAAI TIT'26,Average", 5, "80.85", ["DCPL, Average"]),
    ("seed_stability.csv", "DTD", 1, "85.18", ["ProCAP, DTD, base"]),
    ("training_duration.csv", "ProCAP,25", 4, "80.59", ["ProCAP, 25 epochs"]),
    ("cross_dataset.csv", "MMRL", 2, "67.22", ["MMRL, Average"]),
    ("domain_generalization.csv", "MMRL,CVPR'25", 2, "72.02", ["MMRL, ImageNet"]),
    ("domain_generalization.csv", "CLIP,ICML'21", 7, "57.21", ["CLIP, Average"]),
    ("ablation.csv", "w/o KL", 10, "84.43", ["w/o KL, Average"]),
    ("ablation.csv", "Full ProCAP", 8, "97.35", ["Full ProCAP, OxfordPets"]),
    ("datasets.csv", "DTD", 3, "1129", ["DTD, val"]),
    ("datasets.csv", "ImageNet,", 2, "1.29M", ["ImageNet, train"]),
])  # fmt: skip
def test_a_number_that_is_printed_wrongly_is_found_wherever_it_stands(tmp_path, file, line, column, figure, places):
    """One cell of a copy is changed: the audit finds it, with the figures that it no longer gives, and no other."""
    for name in FILES:
        shutil.copy(PUBLISHED / name, tmp_path / name)
    lines = (PUBLISHED / file).read_text().splitlines()
    (place,) = [number for number, text in enumerate(lines) if text.startswith(line)]
    cells = lines[place].split(",")
    assert cells[column] != figure
    cells[column] = figure
    lines[place] = ",".join(cells)
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    before = {finding.where for finding in audit().findings}
    assert [finding.where for finding in audit(tmp_path).findings if finding.where not in before] == places


def test_the_table_says_what_was_checked_and_what_could_not_be():
    table, done = audit_table(), audit()
    assert len(table.rows) == len(done.findings) and {line.source for line in table.rows} == {"published"}
    assert table.rows[0].labels == ("base-to-novel", "MPCLe, FGVCAircraft, HM") and not table.marks()
    first = [table.metric(0, column) for column in range(5)]
    assert [f"{value.mean:.3f}" for value in first if value] == ["41.570", "39.950", "39.945", "39.955", "1.620"]
    notes = "\n".join(table.notes)
    assert f"{len(done.checks)} checks" in notes and f"{len(done.findings)} find" in notes and "±0.005" in notes
    assert "HM of averages in 18 of 18" in notes and "mean of HMs in 1 of 1" in notes
    assert "Not checked" in notes and "standard deviations" in notes


def test_every_other_row_says_what_our_procap_is_ahead_by(tmp_path):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd", "eurosat"), methods=("maple", "procap"), seeds=(1,))
    table = table_of(done, "base-to-novel")
    assert [column.title for column in table.columns] == ["Base", "Novel", "HM", "Δ vs ProCAP"]
    hm = {row.labels: row.cells[2].mean for row in table.rows}
    seen = 0
    for row in table.rows:
        if row.average or row.labels[1] == "ProCAP, reproduced":
            assert row.cells[3] is None, "of this average nothing is published"
        else:
            seen += 1
            own = hm[row.labels[0], "ProCAP, reproduced"]
            assert row.cells[3].mean == pytest.approx(own - hm[row.labels], abs=1e-9)
    assert seen == 2 * (17 + 1)
    alone = made(tmp_path / "alone", "base-to-novel", PAPER, datasets=("dtd",), methods=("maple",), seeds=(1,))
    assert [column.title for column in table_of(alone, "base-to-novel").columns] == ["Base", "Novel", "HM"]


def test_a_method_in_procaps_recipe_is_called_so_and_not_ranked_among_published_ones(tmp_path):
    chosen: dict[str, Any] = {"datasets": ("dtd",), "methods": ("maple", "procap"), "seeds": (1,), "recipe": "procap"}
    done = made(tmp_path, "base-to-novel", PAPER, **chosen)
    table = table_of(done, "base-to-novel")
    groups = [{row.group for row in table.rows if row.source == source} for source in ("ours", "published")]
    assert not groups[0] & groups[1] and len(groups[0]) == 1, "all of ours have one recipe"
    lines = {row.labels[1]: row for row in table.rows if row.source == "ours"}
    assert set(lines) == {"MaPLe (ProCAP's recipe)", "ProCAP, reproduced"}
    assert [row.cells[0].published is None for row in lines.values()] == [True, False]
    speed = table_of(done, "base-to-novel-speed")
    assert any("MaPLe (ProCAP's recipe)" in row.labels for row in speed.rows)
    assert not speed.marks(), "runs side by side, or on several machines, are no race"
    generated = made(tmp_path / "mini", "base-to-novel", **{**chosen, "datasets": ("shapes",)})
    names = {row.labels[1] for row in table_of(generated, "base-to-novel").rows}
    assert names == {"MaPLe", "ProCAP"}, "there it is everybody's recipe"


def test_a_missing_result_names_the_command_that_makes_it(tmp_path):
    chosen: dict[str, Any] = {"datasets": ("shapes", "tiles"), "seeds": (1, 2), "quick": True}
    done = made(tmp_path, "stability", skip=lambda entry, _: entry.dataset == "tiles", **chosen)
    [note] = [note for note in table_of(done, "stability").notes if note.startswith("MISSING")]
    words = shlex.split(note.split("`")[1])
    assert words[:3] == ["procap", "bench", "stability"] and "--quick" in words
    said = dict(pairwise(words))
    assert said["--results"] == str(tmp_path) and said["--profile"] == "mini"
    assert said["--datasets"] == "shapes,tiles" and said["--seeds"] == "1,2"


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
    alike = [{"depth": depth} for depth in (1, 9)]
    suite = replace(DEPTHS, variants=lambda options, method: [Variant(method, options=one) for one in alike])
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


@pytest.mark.parametrize(("name", "chosen", "said"), [
    ("base-to-novel", {"datasets": ("dtd", "eurosat")}, {"ProCAP, reproduced", "MaPLe, reproduced"}),
    ("ablation", {"datasets": ("dtd",), "methods": ("maple", "coop")}, set()),
    ("prompt-length", {"datasets": ("dtd",)}, set()),
    ("duration", {"datasets": ("dtd",)}, set()),
    ("cross-dataset", {"datasets": ("sun397",)}, set()),
    ("few-shot", {"datasets": ("dtd",), "shots": (16,)}, set()),
])  # fmt: skip
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
    assert any("never averaged with whole results" in note for note in table.notes)
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
