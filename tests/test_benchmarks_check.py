"""`procap table SUITE`: tables of what was run, and whether it agrees with what is published."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_results import made, put_config, put_score, table_of

from benchmarks.cli import main
from benchmarks.results.metrics import Metric
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.published.tolerances import estimate_deviation, tolerance_of_means
from benchmarks.results.runtime import SCHEMA
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import load_suite
from benchmarks.tables.check import MISSING, OK, OUTSIDE, CheckedMetric, check_metrics, check_table, list_published
from procap.errors import UserError
from runner.results import harmonic_mean, write_json
from runner.run_collection import Collection, write_collection

WHOLE = 10_000
"""Test images: as many as printed figures with two decimals tell apart."""


def as_published(results, name, *, off=0.0, limited=False, **chosen):
    """Results that are the printed figures of Table 1 and of transfer, but for `off` points outside novel classes."""
    suite = load_suite(name)
    options = suite.options(PAPER, **chosen)
    transfer = {row.key: row for row in published.cross_dataset()}
    for entry in suite.plan(options):
        method, config = entry.variant.method, put_config(results, entry.spec.config)
        known, source = published.halves(method, entry.dataset), transfer.get(method)
        figures = {"base": known and known.base, "novel": known and known.novel, "all": source and source.source}
        for target in entry.spec.targets:
            classes = target.split(":")[1]
            right = round((figures[classes] + off * (classes != "novel")) / 100 * WHOLE)
            put_score(results, config, target, right, WHOLE, of=2 * WHOLE if limited else None)
    return SuiteResults.read(suite, options, results)


def check(results, *flags, suite="base-to-novel"):
    return main(["table", suite, "--results", str(results), "--check", *flags])


PROCAP_ON_EUROSAT = {("EuroSAT", "Base"): 98.21, ("EuroSAT", "Novel"): 84.74, ("EuroSAT", "HM"): 90.98}
DTD = ("--profile", "paper", "--datasets", "dtd", "--methods", "zeroshot,procap", "--seeds", "1,2,3")
CHOSEN: dict[str, Any] = {"datasets": ("dtd",), "methods": ("zeroshot", "procap")}


def test_the_files_of_a_check_mark_averages_and_have_no_column_twice(tmp_path, capsys):
    as_published(tmp_path, "base-to-novel", methods=("zeroshot",))
    flags = ("--profile", "paper", "--methods", "zeroshot", "--format", "csv")
    check(tmp_path, *flags)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["Where"] for row in rows if row["average"] == "true"} == {AVERAGE}
    assert [row["average"] for row in rows if row["Where"] == AVERAGE] == ["true"] * 3
    assert [name for name in rows[0] if name.startswith("Published")] == ["Published"]
    [food] = [row for row in rows if (row["Where"], row["Metric"]) == ("Food101", "Base")]
    known = published.halves("zeroshot", "food101")
    assert known is not None and (float(food["Published"]), food["Difference"]) == (known.base, "+0.00")


def test_results_that_are_the_published_ones_pass_and_others_exit_with_4_and_are_named_first(tmp_path, capsys):
    as_published(tmp_path, "base-to-novel", **CHOSEN)
    assert check(tmp_path, *DTD) == 0
    assert "6 of 6 published metrics agree" in capsys.readouterr().out
    as_published(tmp_path, "base-to-novel", off=4.0, **CHOSEN)
    assert check(tmp_path, *DTD) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| DTD")]
    assert "CLIP (zero-shot)" in lines[0] and "+4.00" in lines[0] and "OUTSIDE" in lines[0]


@pytest.mark.parametrize(("world", "chosen", "why"), [
    (MINI, {"datasets": ("tiles",), "methods": ("procap",)}, "generated data"),
    (PAPER, {**CHOSEN, "backbone": "ViT-B/32"}, "the backbone is ViT-B-32"),
    (PAPER, {**CHOSEN, "quick": True}, "--quick"),
    (PAPER, {**CHOSEN, "limited": True}, "limited"),
    (PAPER, {**CHOSEN, "empty": True}, "no result"),
])  # fmt: skip
def test_what_does_not_compare_exits_with_1_and_one_line(tmp_path, capsys, world, chosen, why):
    limited, empty = chosen.get("limited", False), chosen.get("empty", False)
    chosen = {name: value for name, value in chosen.items() if name not in ("limited", "empty")}
    options = load_suite("base-to-novel").options(world, **chosen)
    tmp_path.joinpath("collections").mkdir()
    if world is PAPER and not empty:
        as_published(tmp_path, "base-to-novel", limited=limited, **chosen)
    write_collection(tmp_path, Collection(kind="suite", name="base-to-novel", settings=options.to_json()))
    assert check(tmp_path) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and why in said.err


@pytest.mark.parametrize(("methods", "datasets"), [("procap", "dtd,eurosat"), ("maple", "imagenet")])
def test_a_curve_without_a_printed_point_is_answered_in_one_line(tmp_path, capsys, methods, datasets):
    """MaPLe's recipe for few-shot is not that of the transfer tables."""
    flags = ("--methods", methods, "--profile", "paper", "--datasets", datasets)
    assert check(tmp_path, *flags, suite="few-shot") == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "the paper prints no numbers of it, and no published number matches these data sets" in said.err


@pytest.mark.parametrize(("suite", "chosen", "points"), [
    ("few-shot", {"datasets": ("imagenet", "dtd")}, {("ImageNet", "Accuracy"): 72.14}),
    ("prompt-length", {"datasets": ("eurosat",)}, PROCAP_ON_EUROSAT),
    ("sensitivity", {"datasets": ("eurosat",)}, PROCAP_ON_EUROSAT),
])  # fmt: skip
def test_points_of_curves_that_are_runs_of_the_papers_tables_are_checked(tmp_path, suite, chosen, points):
    done = made(tmp_path, suite, PAPER, methods=("procap",), **chosen)
    checks = check_metrics(done)
    assert {(one.where, one.metric): one.published for one in checks} == points
    assert all(one.ours is not None for one in checks)
    assert any("draws curves of this suite without numbers" in note for note in check_table(done, checks).notes)


def test_missing_numbers_are_counted_and_named_and_never_agree(tmp_path, capsys):
    done = as_published(tmp_path, "base-to-novel", **CHOSEN)
    gone = next(entry for entry in done.runs if entry.variant.method == "procap" and entry.seed == 2)
    (tmp_path / gone.path / "eval" / "dtd-novel-test.json").unlink()
    checks = check_metrics(SuiteResults.read(done.suite, done.options, tmp_path))
    verdicts = {(one.method, one.metric): one.verdict for one in checks}
    assert verdicts["ProCAP", "Base"] == OK
    assert verdicts["ProCAP", "Novel"] == verdicts["ProCAP", "HM"] == MISSING
    assert check(tmp_path, *DTD) == 4, "what was planned and is not there has not been reproduced"
    assert "missing: 2" in (said := capsys.readouterr().out) and "ProCAP Novel on DTD, ProCAP HM on DTD" in said
    assert check(tmp_path, *DTD[:-4], "--methods", "zeroshot", "--seeds", "1,2,3") == 0, "a part that was chosen"


def test_what_is_allowed_is_students_t_times_the_pooled_standard_error(tmp_path):
    """By hand, from the printed table: the column's mean square, DTD's deviation, none over our equal seeds."""
    checks = {(one.method, one.metric): one for one in check_metrics(as_published(tmp_path, "base-to-novel", **CHOSEN))}
    lines = [line for line in published.stability() if line.dataset != AVERAGE]
    prior = (2 * 0.53**2 + 4 * sum(line.base_std**2 for line in lines) / 11) / 6
    procap = checks["ProCAP", "Base"]
    assert procap.among == 3, "base, novel and HM of what is trained"
    # t of 8 degrees of freedom that 0.05 / 3 exceed on both sides, from a table.
    assert procap.tolerance.limit(3) == pytest.approx(3.0158 * math.sqrt(6 * prior / 8) * math.sqrt(2 / 3), abs=1e-3)
    assert checks["CLIP (zero-shot)", "Base"].tolerance.limit(3) == 0.3


MEANS = {line.dataset: (line.base, line.novel) for line in published.stability() if line.dataset != AVERAGE}
DEVIATIONS = {one.dataset: (one.base_std, one.novel_std) for one in published.stability() if one.dataset != AVERAGE}


def three_figures(draw: np.random.Generator, times: float, seeds: int, off: float) -> dict[tuple[str, str], np.ndarray]:
    """Base, novel and HM of every data set and their averages, one value per seed, about what is printed."""
    shape = (len(MEANS), 2, seeds)
    drawn = np.array([*MEANS.values()])[..., None] - off
    drawn = drawn + times * np.array([*DEVIATIONS.values()])[..., None] * draw.standard_normal(shape)
    hm = np.vectorize(harmonic_mean)(drawn[:, 0], drawn[:, 1])
    rows = np.concatenate([drawn, hm[:, None]], axis=1)
    rows = np.concatenate([rows, rows.mean(axis=0, keepdims=True)])
    figures = ("base", "novel", "hm")
    return {(name, figure): rows[i, j] for i, name in enumerate([*MEANS, AVERAGE]) for j, figure in enumerate(figures)}


def outside(draw: np.random.Generator, *, times: float = 1.0, seeds: int = 3, off: float = 0.0, printed: bool) -> bool:
    """Whether a paper and a repetition of it, with other seeds, are called different somewhere."""
    theirs, ours = three_figures(draw, times, 3, 0.0), three_figures(draw, times, seeds, off)
    table: Sequence[Any] = published.stability()
    if printed:
        std = {place: float(values.std(ddof=1)) for place, values in theirs.items()}
        table = [
            SimpleNamespace(dataset=name, **{f"{figure}_std": std[name, figure] for figure in ("base", "novel", "hm")})
            for name in [*MEANS, AVERAGE]
        ]
    for place, values in ours.items():
        std_ours = float(values.std(ddof=1)) if seeds > 1 else None
        tolerance = tolerance_of_means(estimate_deviation(*place, table), seeds, std=std_ours, printed=printed)
        if not tolerance.allows(float(values.mean()), float(theirs[place].mean()), len(ours)):
            return True
    return False


@pytest.mark.parametrize(("times", "seeds"), [(1.0, 3), (1.5, 3), (3.0, 3), (1.0, 1), (1.0, 10)])
def test_a_correct_repetition_falls_outside_in_one_of_twenty_at_most(times, seeds):
    """The paper's deviations are those of its own three draws; the true ones are as printed, or larger everywhere."""
    draw = np.random.default_rng(7)
    alarms = sum(outside(draw, times=times, seeds=seeds, printed=True) for _ in range(300))
    # 26 of 300 are three standard errors above 5 %.
    assert alarms <= 26


@pytest.mark.parametrize("printed", [True, False])
def test_two_points_less_on_every_data_set_are_found(printed):
    draw = np.random.default_rng(9)
    found = sum(outside(draw, off=2.0, printed=printed) for _ in range(100))
    assert found >= 98


def test_another_recipe_of_a_method_is_not_what_is_published(tmp_path):
    done = as_published(tmp_path, "base-to-novel", datasets=("dtd",), methods=("maple", "procap"), recipe="procap")
    assert {one.method for one in check_metrics(done)} == {"ProCAP"}


POINTS = [("few-shot", "imagenet", 1), ("prompt-length", "ucf101", 3), ("sensitivity", "dtd", 3)]


@pytest.mark.parametrize(("name", "dataset", "points"), POINTS)
def test_points_of_curves_that_are_published_pass_and_others_exit_with_4(tmp_path, capsys, name, dataset, points):
    flags = ("--profile", "paper", "--methods", "procap", "--datasets", dataset)
    for off, code, verdict in ((0.0, 0, OK), (-6.0, 4, OUTSIDE)):
        as_published(tmp_path, name, off=off, methods=("procap",), datasets=(dataset,))
        assert check(tmp_path, *flags, suite=name) == code
        lines = [line for line in capsys.readouterr().out.splitlines() if "| ProCAP" in line]
        assert len(lines) == points and verdict in lines[0]


def test_the_accuracies_of_the_pictures_pass_or_exit_with_4(tmp_path):
    suite = load_suite("qualitative")
    for off, code in ((0.0, 0), (6.0, 4)):
        for run in suite.plan(suite.options(PAPER)):
            [target] = run.spec.targets
            figure = published.PROMPT_PICTURE["eurosat"][run.variant.method] - off
            put_score(tmp_path, put_config(tmp_path, run.spec.config), target, round(figure / 100 * WHOLE), WHOLE)
        assert check(tmp_path, "--profile", "paper", suite="qualitative") == code


def test_runtime_with_the_published_ratios_and_accuracies_passes_or_exits_with_4(tmp_path, capsys):
    same = {(row.dataset, row.key): row.accuracy for row in published.runtime()}
    for accuracies, code, agree in ((same, 0, 8), ({**same, ("ucf101", "procap"): 80.0}, 4, 7)):
        contest(tmp_path, accuracies=accuracies, fps=77.0)
        assert check(tmp_path, "--profile", "paper", suite="runtime") == code
        assert f"{agree} of 8 published metrics agree" in capsys.readouterr().out


ACCURACIES = {("oxford-flowers", "maple"): 95.0, ("oxford-flowers", "procap"): 97.0, ("ucf101", "maple"): 60.0}


def contest(
    results, *, whole=True, load=0.0, backbone="ViT-B-16", weights=None, classes="base", accuracies=ACCURACIES, fps=20.0
):
    """Runtime measured in both modes on the paper's data sets, on a CPU. The paper: 169.1 / 112.6 s, 278.8 / 415.9."""

    def row(dataset: str, method: str, mode: str, seconds: float, fps: float) -> dict[str, Any]:
        speed = {"median": fps, "lowest": fps, "highest": fps, "count": 1}
        unknown = {"train": None, "eval": None}
        return {"dataset": dataset, "method": method, "title": method, "mode": mode, "precision": "fp32",
                "train_seconds": seconds, "encoder_fps": speed, "end_to_end_fps": speed, "first_loss": None,
                "steps": 512, "steps_measured": 512 if whole else 3,
                "accuracy": None if weights else accuracies.get((dataset, method)), "accuracy_note": "",
                "extrapolated": not whole and method != "zeroshot", "test_images": 9, "test_images_all": 9,
                "start_seconds": {}, "step_seconds": None,
                "flops_per_second": unknown, "share_of_peak": unknown, "peak_bytes": unknown}  # fmt: skip

    suite = load_suite("runtime")
    options = suite.options(PAPER, backbone=backbone)
    rows = [row(name, "zeroshot", "reference", 1.0, 1.0) for name in options.datasets]
    for name, (seconds, rate) in (("oxford-flowers", (15.0, 67.0)), ("ucf101", (13.0, fps))):
        for mode in ("reference", "fast"):
            rows.append(row(name, "maple", mode, 10.0, 100.0))
        rows += [row(name, "procap", "reference", seconds, rate), row(name, "procap", "fast", 10.0, 100.0)]
    own = {"pretrained": weights, "classes": classes, "precisions": ["fp32"], "epochs": 10, "batch": 32,
           "test_batch": 100, "accelerations": {"graphs": False}}  # fmt: skip
    cpu = {"name": "some CPU", "threads": 2, "cores": 2}
    report = {"schema": SCHEMA, "backbone": {"name": backbone, "weights": None}, "settings": own,
              "environment": {"gpu": None, "cpu": cpu, "packages": {}}, "load_average": [load, load],
              "device": {"type": "cpu"}, "matmul_peak": {}, "scaling": [], "failed": {}, "rows": rows}  # fmt: skip
    write_json(results / "runtime" / "x" / "runtime.json", report)
    return SuiteResults.read(suite, options, results)


def test_runtime_is_checked_by_ratio_and_accuracy_in_reference_mode(tmp_path):
    def name(one: CheckedMetric) -> str:
        return f"Accuracy of {one.method}" if one.metric == "Accuracy" else one.metric

    verdicts = {(one.where, name(one)): one.verdict for one in check_metrics(contest(tmp_path))}
    assert verdicts == {
        ("Flowers102", "training s"): OK, ("Flowers102", "FPS"): OK, ("UCF101", "training s"): OK,
        ("UCF101", "FPS"): OUTSIDE, ("Flowers102", "Accuracy of MaPLe-style"): OK,
        ("Flowers102", "Accuracy of ProCAP (Full)"): OK, ("UCF101", "Accuracy of MaPLe-style"): OUTSIDE,
        ("UCF101", "Accuracy of ProCAP (Full)"): MISSING,
    }  # fmt: skip
    rows = [row for row in table_of(contest(tmp_path), "runtime").rows if row.source == "ours"]
    beside = {(row.labels[0], cell.mean, cell.published) for row in rows for cell in row.cells
              if isinstance(cell, Metric) and cell.published}  # fmt: skip
    assert beside == {("Flowers102", 95.0, 95.25), ("Flowers102", 97.0, 97.39), ("UCF101", 60.0, 85.21)}


def test_accuracies_of_random_weights_are_missing_from_the_check_of_runtime(tmp_path):
    checks = check_metrics(contest(tmp_path, weights="random"))
    assert {one.verdict for one in checks if one.metric == "Accuracy"} == {MISSING}
    assert {one.verdict for one in checks if one.metric == "training s"} == {OK}


def test_runtime_of_all_classes_is_another_reading_and_not_compared(tmp_path):
    done = contest(tmp_path, classes="all")
    assert not done.suite.tables(done), "the suite is of base classes unless --classes says otherwise"
    every = replace(done, options=replace(done.options, classes="all"))
    [note] = [note for note in table_of(every, "runtime").notes if "published ones" in note]
    assert "all classes instead of base" in note
    with pytest.raises(UserError, match=r"runtime: nothing to check, .* all classes"):
        check_metrics(every)


def test_runtime_of_another_backbone_is_not_compared(tmp_path):
    done = contest(tmp_path, backbone="ViT-B-32")
    why = "the backbone is ViT-B-32, not ViT-B-16"
    with pytest.raises(UserError, match=f"runtime: nothing to check, .*: {why}"):
        check_metrics(done)
    [ratios] = [table for table in done.suite.tables(done) if table.name == "runtime-ratios"]
    assert not [item for line in ratios.rows for item in line.cells if isinstance(item, Metric) and item.published]
    assert any(why in note for note in ratios.notes)


def test_seconds_that_were_not_measured_to_the_end_are_missing_from_the_check_of_runtime(tmp_path):
    done = contest(tmp_path, whole=False)
    checks = check_metrics(done)
    assert [one.verdict for one in checks if one.metric == "training s"] == [MISSING] * 2
    assert [one.verdict for one in checks if one.metric == "FPS"] == [OK, OUTSIDE]
    assert any("EXTRAPOLATED" in note for note in check_table(done, checks).notes)
    [ratios] = [table for table in done.suite.tables(done) if table.name == "runtime-ratios"]
    place = [column.title for column in ratios.columns].index("≈ training s")
    assert [line.cells[place].published for line in ratios.rows if line.source == "ours"] == [None] * 4


PUBLISHED_FIGURES = {"stability": 12 * 3, "ablation": 7 * 5, "duration": 3 * 3, "mmlop-ladder": 5 * 3}


@pytest.mark.parametrize("name", [*PUBLISHED_FIGURES, "cross-dataset", "domain-generalization"])
def test_every_suite_with_a_published_table_finds_all_its_figures(tmp_path, name):
    """In transfer these are ImageNet, targets and their mean of each method."""
    suite = load_suite(name)
    methods = {"cross-dataset": 4 * 12, "domain-generalization": 5 * 6}
    wanted = {**PUBLISHED_FIGURES, **methods}[name]
    done = SuiteResults.read(suite, suite.options(PAPER), tmp_path / "none")
    assert [check.verdict for check in list_published(done)] == [MISSING] * wanted


def test_the_command_prints_what_was_chosen_when_the_suite_was_run(tmp_path, capsys):
    suite = load_suite("stability")
    options = suite.options(MINI, datasets=("tiles",), seeds=(4,), overrides={"epochs": 3})
    for entry in suite.plan(options):
        config = put_config(tmp_path, entry.spec.config)
        for half, right in (("base", 80), ("novel", 60)):
            put_score(tmp_path, config, f"tiles:{half}", right, 100)
    write_collection(tmp_path, Collection(kind="suite", name="stability", settings=options.to_json()))
    assert main(["table", "stability", "--results", str(tmp_path), "--format", "csv"]) == 0
    said = capsys.readouterr()
    assert "tiles,ProCAP,ours,false,80.0,1,false" in said.out and "68.571429" in said.out and "n = 1" in said.err
    assert main(["table", "stability", "--results", str(tmp_path), "--format", "json"]) == 0
    assert [table["name"] for table in json.loads(capsys.readouterr().out)["tables"]] == ["stability"]
    assert main(["table", "stability", "--results", str(tmp_path), "--seeds", "4,5"]) == 0
    assert "MISSING: 2 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["--check"], "all runs takes no --check"),
    (["--recipe", "procap"], "all runs takes no --recipe procap"),
    (["published", "--paper-rounding"], "published takes no --paper-rounding"),
    (["published", "--methods", "procap"], "published takes no --methods procap"),
    (["published", "--check"], "published takes no --check"),
    (["stability", "--recipe", "mine"], "unknown recipe 'mine'"),
    (["--profile", "mini"], "all runs takes no --profile mini"),
    (["base-to-novell"], "did you mean base-to-novel"),
    (["stability", "--classes", "all"], "stability has its own classes to train on, base alone"),
    (["stability", "--shots", "4,8"], "stability takes one number"),
    (["stability", "--format", "xml"], "unknown format"),
])  # fmt: skip
def test_wrong_usage_is_one_row_and_2(tmp_path, capsys, words, said):
    assert main(["table", *words, "--results", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_the_runs_of_either_recipe_are_printed_whichever_was_done_last(tmp_path, capsys):
    suite = load_suite("base-to-novel")
    for recipe, right in (("published", 70), ("procap", 80)):
        options = suite.options(PAPER, datasets=("dtd",), methods=("maple", "procap"), seeds=(1,), recipe=recipe)
        for entry in suite.plan(options):
            config = put_config(tmp_path, entry.spec.config)
            for half in ("base", "novel"):
                put_score(tmp_path, config, f"dtd:{half}", right, 100)
        write_collection(tmp_path, Collection(kind="suite", name=suite.name, settings=options.to_json()))

    def maple(*flags: str) -> str:
        assert main(["table", suite.name, "--results", str(tmp_path), "--format", "csv", *flags]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("DTD,MaPLe", 'DTD,"MaPLe'))]
        return next(line for line in lines if ",ours," in line)

    assert maple().startswith("DTD,MaPLe (ProCAP's recipe),ours,false,80.0")
    assert maple("--recipe", "published").startswith('DTD,"MaPLe, reproduced",ours,false,70.0')
    assert maple("--recipe", "procap") == maple()
