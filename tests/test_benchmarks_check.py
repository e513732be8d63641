"""`procap table SUITE`: tables of what was run, and whether it agrees with what is published."""

from typing import Any

import pytest
from made_results import put_config, put_score, table_of

from benchmarks.cli import main
from benchmarks.experiment import published
from benchmarks.experiment.profiles import MINI, PAPER
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from benchmarks.tables.agreement import check_table
from benchmarks.tables.speed import SCHEMA, choose_settings
from procap.errors import UserError
from runner.results import write_json
from runner.run_collection import Collection, write_collection

WHOLE = 10_000
"""Test images: as many as printed figures with two decimals tell apart."""


def as_published(results, name, profile=PAPER, *, off=0.0, limited=False, **chosen):
    """Results that are the printed figures of Table 1 and of transfer, but for `off` points outside novel classes."""
    suite = load_suite(name)
    options = suite.options(profile, **chosen)
    transfer = {row.key: row for row in published.load_rows("cross_dataset")}
    table1 = {(row.key, row.dataset): row for row in published.load_rows("base_to_novel")}
    for entry in suite.plan(options):
        method, config = entry.variant.method, put_config(results, entry.spec.config)
        known, source = table1.get((method, entry.dataset)), transfer.get(method)
        figures = {"base": known and known.base, "novel": known and known.novel, "all": source and source.source}
        for target in entry.spec.targets:
            classes = target.split(":")[1]
            right = round((figures[classes] + off * (classes != "novel")) / 100 * WHOLE)
            put_score(results, config, target, right, WHOLE, of=2 * WHOLE if limited else None)
    return SuiteResults.read(suite, options, results)


def check(results, *flags, suite="base-to-novel"):
    return main(["table", suite, "--results", str(results), "--check", *flags])


DTD = ("--profile", "paper", "--datasets", "dtd", "--methods", "zeroshot,procap", "--seeds", "1,2,3")
CHOSEN: dict[str, Any] = {"datasets": ("dtd",), "methods": ("zeroshot", "procap")}


def test_results_that_are_the_published_ones_pass_and_others_exit_with_4_and_are_named_first(tmp_path, capsys):
    as_published(tmp_path, "base-to-novel", **CHOSEN)
    assert check(tmp_path, *DTD) == 0
    assert "6 of 6 published numbers agree within 1 points" in capsys.readouterr().out
    as_published(tmp_path, "base-to-novel", off=4.0, **CHOSEN)
    assert check(tmp_path, *DTD) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| DTD")]
    assert "CLIP (zero-shot)" in lines[0] and "+4.00" in lines[0] and "OUTSIDE" in lines[0]
    assert check(tmp_path, *DTD, "--tolerance", "4") == 0
    assert check(tmp_path, *DTD[:-1], "3,2,1", "--tolerance", "4") == 0, "seeds have no order"


def test_missing_and_limited_results_never_agree(tmp_path, capsys):
    done = as_published(tmp_path, "base-to-novel", **CHOSEN)
    gone = next(entry for entry in done.runs if entry.variant.method == "procap" and entry.seed == 2)
    (tmp_path / gone.path / "eval" / "dtd-novel-test.json").unlink()
    assert check(tmp_path, *DTD) == 4, "what was planned and is not there has not been reproduced"
    said = capsys.readouterr().out
    assert "4 of 4 published numbers" in said and f"MISSING, not compared: {gone.path} on dtd:novel" in said
    assert check(tmp_path, *DTD[:-4], "--methods", "zeroshot", "--seeds", "1,2,3") == 0, "a part that was chosen"
    put_score(tmp_path, gone.spec.config, "dtd:novel", 70, 100, of=400)
    assert check(tmp_path, *DTD) == 4
    assert "limited to 100 images, other seeds are whole" in capsys.readouterr().err
    for entry in (entry for entry in done.runs if entry.variant.method == "procap"):
        put_score(tmp_path, entry.spec.config, "dtd:novel", 70, 100, of=400)
    assert check(tmp_path, *DTD) == 4 and f"{gone.path} (--limit)" in capsys.readouterr().out


@pytest.mark.parametrize(("world", "chosen", "why"), [
    (MINI, {"datasets": ("tiles",), "methods": ("procap",)}, "generated data"),
    (PAPER, {**CHOSEN, "backbone": "ViT-B/32"}, "the backbone is ViT-B-32"),
    (PAPER, {**CHOSEN, "quick": True}, "--quick"),
    (PAPER, {**CHOSEN, "seeds": (7,)}, "the seeds are 7, not 1, 2, 3"),
    (PAPER, {**CHOSEN, "precision": "fp32"}, "precision fp32 instead of bf16"),
    (PAPER, {**CHOSEN, "precision": "fp16"}, "precision fp16 instead of bf16"),
    (MINI, {**CHOSEN, "backbone": "ViT-B/16", "precision": "bf16"}, "the profile mini"),
    (PAPER, {**CHOSEN, "evaluation": {"resize": "squash"}}, "evaluation with squash"),
    (PAPER, {**CHOSEN, "evaluation": {"precision": "fp16"}}, "evaluation with fp16"),
    (PAPER, {**CHOSEN, "limited": True}, "no result here has"),
    (PAPER, {**CHOSEN, "empty": True}, "no result here"),
])  # fmt: skip
def test_what_does_not_compare_exits_with_1_and_one_line(tmp_path, capsys, world, chosen, why):
    limited, empty = chosen.get("limited", False), chosen.get("empty", False)
    chosen = {name: value for name, value in chosen.items() if name not in ("limited", "empty")}
    options = load_suite("base-to-novel").options(world, **chosen)
    tmp_path.joinpath("collections").mkdir()
    if "tiles" not in options.datasets and not empty:
        as_published(tmp_path, "base-to-novel", world, limited=limited, **chosen)
    write_collection(tmp_path, Collection(kind="suite", name="base-to-novel", settings=options.to_json()))
    assert check(tmp_path) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and why in said.err


def test_the_accuracies_of_the_pictures_pass_or_exit_with_4(tmp_path):
    suite = load_suite("qualitative")
    for off, code in ((0.0, 0), (6.0, 4)):
        for run in suite.plan(suite.options(PAPER)):
            [target] = run.spec.targets
            figure = published.PROMPT_PICTURE["eurosat"][run.variant.method] - off
            put_score(tmp_path, put_config(tmp_path, run.spec.config), target, round(figure / 100 * WHOLE), WHOLE)
        assert check(tmp_path, "--profile", "paper", suite="qualitative") == code


def contest(results, **chosen):
    """Runtime measured on the paper's data sets, on a CPU."""

    def row(dataset: str, method: str) -> dict[str, Any]:
        return {"dataset": dataset, "method": method, "title": method, "mode": "fast", "precision": "fp32",
                "train_seconds": 10.0, "encoder_fps": {"median": 100.0}, "end_to_end_fps": {"median": 100.0},
                "accuracy": 95.0, "accuracy_note": "", "peak_bytes": {"train": None, "eval": None}}  # fmt: skip

    suite = load_suite("runtime")
    options = suite.options(PAPER, **chosen)
    settings = choose_settings(SuiteResults.read(suite, options, results))
    report = {
        "schema": SCHEMA, "written": "2026-01-31T12:00:00Z",
        "backbone": {"name": settings["backbone"], "weights": None},
        "settings": settings | {"batch": 32, "test_batch": 100},
        "environment": {"gpu": None, "cpu": {"name": "some CPU", "threads": 2, "cores": 2}}, "load_average": [0, 0],
        "rows": [row(name, method) for name in options.datasets for method in options.methods],
    }  # fmt: skip
    write_json(results / "runtime" / "x" / "runtime.json", report)
    return SuiteResults.read(suite, options, results)


@pytest.mark.parametrize(("chosen", "why"), [
    ({"backbone": "ViT-B/32"}, "the backbone is ViT-B-32, not ViT-B-16"),
    ({"shots": (4,)}, "shots 4 instead of 16"),
])  # fmt: skip
def test_runtime_in_another_setting_is_not_compared(tmp_path, chosen, why):
    done = contest(tmp_path, **chosen)
    with pytest.raises(UserError, match="runtime: nothing to check"):
        check_table(done, 1.0)
    table = table_of(done, "runtime")
    assert not [metric for metric in table.metrics if metric.published] and any(why in note for note in table.notes)


@pytest.mark.parametrize(("words", "said"), [
    (["--check"], "all runs takes no --check"),
    (["--recipe", "procap"], "all runs takes no --recipe procap"),
    (["stability", "--recipe", "mine"], "unknown recipe 'mine'"),
    (["--profile", "mini"], "all runs takes no --profile mini"),
    (["base-to-novell"], "did you mean base-to-novel"),
    (["stability", "--tolerance", "2"], "stability without --check takes no --tolerance 2"),
    (["stability", "--classes", "all"], "takes no --classes all"),
    (["imbalance", "--sampling", "natural"], "takes no --sampling natural"),
    (["stability", "--shots", "4,8"], "stability takes one number"),
    (["stability", "--format", "xml"], "'xml' is not one of"),
])  # fmt: skip
def test_wrong_usage_is_one_row_and_2(tmp_path, capsys, words, said):
    assert main(["table", *words, "--results", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
