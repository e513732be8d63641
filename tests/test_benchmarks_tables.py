"""Tables: every number follows from integer counts, and nothing is averaged that does not belong together."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from fractions import Fraction
from statistics import stdev
from typing import Any

import pytest
from command_line import run
from golden_results import write_results
from made_results import made, put_config, put_halves, put_run, put_score
from report_pages import begin, put_entry
from toy_shards import toy_source

from benchmarks.cli import main
from benchmarks.experiment.titles import title_method
from benchmarks.results import load
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.render import FORMATS, render, show_notes_once, to_dict
from benchmarks.tables.runs import run_tables
from benchmarks.tables.summary import describe_best
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.planning import plan_run
from runner.run_folders import RunFolder
from shards.pack import pack_source


@dataclass(frozen=True)
class Line:
    """A printed row with its cells by column."""

    labels: tuple[str, ...]
    cells: dict[str, Any]

    @property
    def halves(self) -> tuple[Metric | None, ...]:
        return tuple(self.cells[name] for name in ("Base", "Novel", "HM"))


def lines_of(results):
    found = []
    for table in run_tables(load(results)):
        titles = [column.title for column in table.columns]
        found += [Line(row.labels, dict(zip(titles, row.cells, strict=True))) for row in table.rows]
    return found


def line_of(results, method, dataset):
    title = title_method(method)
    return next(line for line in lines_of(results) if line.labels[0] == dataset and line.labels[1].startswith(title))


def runs_table(results):
    return run_tables(load(results))[0]


def notes_of(results):
    return [note for table in run_tables(load(results)) for note in table.notes]


def items_of(document: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """What a table's JSON has in each line, by labels, then by column."""
    titles = [column["title"] for column in document["columns"]]
    return {tuple(line["labels"]): dict(zip(titles, line["cells"], strict=True)) for line in document["rows"]}


def exact_hm(base: Fraction, novel: Fraction) -> Fraction:
    """The definition: the reciprocal of the mean of reciprocals."""
    return 1 / ((1 / base + 1 / novel) / 2)


def test_every_number_agrees_with_an_independent_recomputation_from_the_counts(tmp_path):
    """Three seeds, two methods, three data sets of different sizes, in exact fractions."""
    rng = random.Random(7)
    counts: dict = {}
    for dataset in ("shapes", "tiles", "digits"):
        for method in ("coop", "procap"):
            for seed in (1, 2, 3):
                base_total, novel_total = rng.randint(100, 400), rng.randint(100, 400)
                pair = ((rng.randint(30, base_total), base_total), (rng.randint(30, novel_total), novel_total))
                counts[dataset, method, seed] = pair
                put_halves(tmp_path, method, dataset, *pair, seed=seed, recipe="procap", overrides={"epochs": 2})
    found = items_of(to_dict(runs_table(tmp_path)))
    datasets = ("shapes", "tiles", "digits")

    def percent(dataset, method, seed, half):
        return Fraction(100 * counts[dataset, method, seed][half][0], counts[dataset, method, seed][half][1])

    def check(line, base, novel):
        """`base` and `novel` are values by seed; what is printed is what was computed."""
        for column, metric in zip(("Base", "Novel", "HM"), line.halves, strict=True):
            items = found[line.labels][column]
            assert (items["mean"], items["std"]) == (metric.mean, metric.std)
            assert items["seeds"] == dict(zip(("1", "2", "3"), metric.values, strict=True))
        mean_base, mean_novel = sum(base) / 3, sum(novel) / 3
        first, second, hm = line.halves
        assert (first.mean, second.mean) == pytest.approx((float(mean_base), float(mean_novel)))
        assert first.std == pytest.approx(stdev(map(float, base)))
        assert hm.mean == pytest.approx(float(exact_hm(mean_base, mean_novel)))
        assert hm.std == pytest.approx(stdev(float(exact_hm(b, n)) for b, n in zip(base, novel, strict=True)))

    for method in ("coop", "procap"):
        for dataset in datasets:
            halves = [[percent(dataset, method, seed, half) for seed in (1, 2, 3)] for half in (0, 1)]
            check(line_of(tmp_path, method, dataset), *halves)
        sums = [[sum(percent(one, method, seed, half) for one in datasets) for seed in (1, 2, 3)] for half in (0, 1)]
        averaged = [[each / 3 for each in half] for half in sums]
        average = line_of(tmp_path, method, "Average")
        check(average, *averaged)
    notes = notes_of(tmp_path)
    assert any("Seeds 1, 2, 3. " in note for note in notes)


def edit_training(results, config, **changes):
    file = RunFolder(results / config.path).train_file
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def source(digest):
    return {"package": "procap-bench", "version": "", "digest": digest * 16}


UNLIKE = {
    "epochs": ({"task": "few-shot"}, {}),
    "sentences ffffffff": ({}, {"files": {"sentences": "f" * 64}}),
    "code bbbbbbbb": ({}, {"method_source": source("b")}),
    "rotation 9": ({"overrides": {"rotation": 9}}, {}),
    "sampling natural": ({"sampling": "natural"}, {}),
    "precision bf16": ({"precision": "bf16"}, {}),
}
"""How the last of three seeds differs: what was planned and what its training recorded, by what its row is called."""


@pytest.mark.parametrize("word", UNLIKE)
def test_a_seed_that_differs_in_anything_else_has_a_row_that_is_named_by_it(word, tmp_path):
    plan, recorded = UNLIKE[word]
    for seed in (1, 2, 3):
        config = put_halves(tmp_path, "ivlp", "digits", (50, 100), (40, 100), seed=seed, **(plan if seed == 3 else {}))
        same = {"files": {"sentences": "e" * 64}, "method_source": source("a")}
        edit_training(tmp_path, config, **same | (recorded if seed == 3 else {}))
    frame = load(tmp_path)
    variants = frame.groupby("variant").seed.unique().map(list).to_dict()
    assert sorted(variants.values()) == [[1, 2], [3]] and frame.groupby("variant").group.nunique().eq(1).all()
    [unlike] = [title for title, seeds in variants.items() if seeds == [3]]
    assert word in unlike and word not in next(title for title in variants if title != unlike)
    assert {len(set(cells[0].seeds)) for cells in (row.cells for row in runs_table(tmp_path).rows)} == {1, 2}


def test_seeds_that_start_from_runs_of_one_recipe_are_averaged_and_others_are_not(tmp_path):
    for seed, rate in ((1, 0.1), (2, 0.1), (3, 1e-6)):
        start = put_run(tmp_path, "coop", "digits", seed=seed, overrides={"lr": rate})
        config = plan_run(method="kgcoop", dataset="digits", seed=seed)
        started = config.model_copy(update={"init": start.path, "init_digest": f"{start.hash:0<64}"})
        put_score(tmp_path, put_config(tmp_path, started), "digits:base", 50, 100)
    assert sorted(load(tmp_path).groupby("variant").seed.unique().map(list)) == [[1, 2], [3]]


def test_limits_of_different_size_are_not_averaged(tmp_path):
    for seed, limit in ((1, 10), (2, 10), (3, 200)):
        put_score(tmp_path, put_run(tmp_path, "coop", "digits", seed=seed), "digits:base", 5, limit, of=300)
    titles = load(tmp_path).groupby("variant").seed.unique().map(list).to_dict()
    assert titles == {"CoOp": [1, 2], "CoOp, limit 200": [3]}


def test_a_limited_seed_has_a_row_of_its_own_accuracies_and_costs(tmp_path):
    for seed, seconds in ((1, 10.0), (2, 10.0), (3, 50.0)):
        config = put_run(tmp_path, "coop", "digits", seed=seed, seconds=seconds)
        for half, right in (("base", 5), ("novel", 4)):
            limited = {"of": 100, "rate": 9.0} if seed == 3 else {}
            put_score(tmp_path, config, f"digits:{half}", right, 10 if limited else 100, **limited)
    lines = {line.labels[1]: line for line in lines_of(tmp_path)}
    seen = {
        title: (line.halves[0].mean, line.halves[2].seeds, line.halves[2].limited, line.cells["training s"].mean)
        for title, line in lines.items()
    }
    assert seen == {"CoOp": (5, (1, 2), False, 10), "CoOp, limit 10": (50, (3,), True, 50)}
    assert [line.cells["FPS"].mean for line in lines.values()] == pytest.approx([200, 9])
    # A run with a limited and a whole half: only the limited one stands apart.
    put_score(tmp_path, config, "digits:novel", 4, 100)
    frame = load(tmp_path)
    assert frame.groupby("variant").limited.nunique().eq(1).all()
    assert sorted(frame[(frame.variant == "CoOp") & (frame.target_classes == "novel")].seed) == [1, 2, 3]
    shutil.rmtree(tmp_path / put_run(tmp_path, "coop", "digits", seed=2).path)
    base = load(tmp_path).query("target_classes == 'base'").groupby("variant").seed.unique().map(list)
    assert base.to_dict() == {"CoOp, limit none": [1], "CoOp, limit 10": [3]}


def test_a_suite_leaves_out_a_seed_that_differs_in_more_than_the_seed(tmp_path):
    chosen = {"methods": ("coop",), "datasets": ("shapes",), "seeds": (1, 2, 3)}
    done = made(tmp_path, "base-to-novel", **chosen)
    assert done.halves(done.variants[0], "shapes")[2] is not None
    edit_training(tmp_path, done.runs[1].spec.config, files={"sentences": "f" * 64})
    edit_training(tmp_path, done.runs[0].spec.config, files={"sentences": "e" * 64})
    edit_training(tmp_path, done.runs[2].spec.config, files={"sentences": "e" * 64})
    again = SuiteResults.read(done.suite, done.options, tmp_path)
    [(path, why)] = again.unreadable.items()
    assert path == done.runs[1].path and "its file.sentences is ffffffff, that of other seeds eeeeeeee" in why
    assert again.halves(again.variants[0], "shapes")[2] is None


def test_runs_that_are_unfinished_or_deeper_in_the_folder_are_named(tmp_path):
    put_halves(tmp_path, "coop", "digits", (50, 100), (40, 100))
    unfinished = put_run(tmp_path, "coop", "digits", seed=2)
    RunFolder(tmp_path / unfinished.path).train_file.unlink()
    put_run(tmp_path / "old", "coop", "digits", seed=3)
    with pytest.warns(UserWarning) as caught:
        load(tmp_path)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2 and all(line.startswith("1 run left out, such as ") for line in said)
    assert "seed2-" in said[0] and "is not finished" in said[0] and "old/base" in said[1] and "is deeper" in said[1]
    assert {warning.filename for warning in caught} == {__file__}


def test_seeds_that_were_imported_from_one_checkpoint_are_named(tmp_path):
    for seed in (1, 2, 3):
        config = put_halves(tmp_path, "coop", "digits", (50, 100), (40, 100), seed=seed)
        edit_training(tmp_path, config, imported={"name": "m.pth", "sha256": "a" * 64, "epoch": 1})
    assert any("IMPORTED: 3 runs of CoOp from 1 checkpoint." in note for note in notes_of(tmp_path))


def test_runs_that_differ_in_more_than_the_seed_get_rows_of_their_own(tmp_path):
    put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100), shots=16)
    put_halves(tmp_path, "maple", "shapes", (50, 100), (50, 100), shots=4)
    put_halves(tmp_path, "maple", "shapes", (90, 100), (90, 100), shots=16, recipe="procap")
    put_halves(tmp_path, "maple", "shapes", (20, 100), (20, 100), shots=16, options={"n_ctx": 3})
    assert sorted(line.cells["Base"].mean for line in lines_of(tmp_path)) == [20, 50, 80, 90]
    titles = {row.labels[-1] for row in runs_table(tmp_path).rows}
    assert len(titles) == 4
    assert {"shots 4", "recipe procap", "n_ctx 3"} <= {part for title in titles for part in title.split(", ")}
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_halves(tmp_path, "coop", "shapes", (30, 100), (30, 100), overrides={"lr": 0.01})
    titles = {row.labels[-1] for row in runs_table(tmp_path).rows if row.labels[-1].startswith("CoOp")}
    assert titles == {f"CoOp, shots 16, lr {lr}" for lr in (config.recipe.lr, 0.01)}


def test_speed_is_images_over_seconds_of_both_halves_together(tmp_path):
    config = put_run(tmp_path, "coop", "shapes")
    put_score(tmp_path, config, "shapes:base", 50, 100, rate=100.0)
    put_score(tmp_path, config, "shapes:novel", 50, 300, rate=50.0)
    cells = line_of(tmp_path, "coop", "shapes").cells
    speeds = [cells[column].mean for column in ("FPS", "training s")]
    assert speeds == pytest.approx([400 / (100 / 100 + 300 / 50), 12.5])
    table = runs_table(tmp_path)
    printed = [render(table, form).splitlines() for form in ("md", "latex")]
    for lines in printed:
        [line] = [line for line in lines if "CoOp" in line and "50.00" in line]
        assert "57" in line and "12.5" in line


def test_notes_are_printed_once_below_markdown_and_tex_is_latex(tmp_path, capsys):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_score(tmp_path, config, "shapes-sketch", 33, 100)
    outputs = {form: run(capsys, "table", "--results", tmp_path, "--format", form) for form in ("md", "latex", "tex")}
    assert outputs["md"][0] == 0 and "Setting: mini" in outputs["md"][1]
    assert outputs["latex"] == outputs["tex"] and "Setting: mini" not in outputs["tex"][1]
    [table, *_] = run_tables(load(tmp_path))
    first, again = show_notes_once([table, table])
    assert first == table and not again.notes
    assert "--format md|csv|latex|json " in run(capsys, "table", "--help")[1]


def test_other_targets_stand_in_a_table_of_their_own(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_score(tmp_path, config, "shapes-sketch", 33, 100)
    [halves, targets] = run_tables(load(tmp_path))
    [other] = targets.rows
    assert other.labels[:2] == ("shapes:base", "shapes-sketch:all:test") and other.cells[0].mean == 33
    assert {row.labels[0] for row in halves.rows} == {"shapes"}
    for table in (halves, targets):
        assert [column.title for column in table.columns][-2:] == ["FPS", "training s"]
    for form in FORMATS:
        assert "33.0" in render(targets, form) and "33.0" not in render(halves, form)


def test_runs_on_all_classes_of_several_data_sets_have_averages(tmp_path):
    for method, dataset, right in (("coop", "shapes", 80), ("coop", "tiles", 40), ("maple", "shapes", 70),
                                   ("maple", "tiles", 60), ("tcp", "tiles", 99)):  # fmt: skip
        config = put_run(tmp_path, method, dataset, classes="all")
        for target, correct in ((f"{dataset}:all", right), ("shapes-sketch", 5)):
            put_score(tmp_path, config, target, correct, 100)
    [table] = run_tables(load(tmp_path))
    averages = {row.labels[2]: row.cells[0].mean for row in table.rows if row.average}
    assert averages == {"CoOp": 60.0, "MaPLe": 65.0} and not any(row.average for row in table.rows[:-2])
    assert describe_best(table) == "best (Accuracy, average): MaPLe with 65.00 %"


def test_different_contents_of_a_data_set_are_an_error_that_names_both(tmp_path, capsys):
    older = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_halves(tmp_path, "maple", "shapes", (60, 100), (40, 100), seed=2)
    assert main(["table", "--results", str(tmp_path)]) == 0
    for file in (tmp_path / older.path).rglob("eval/*"):
        file.write_text(file.read_text().replace("d" * 16, "e" * 16))
    for times in ((1, 1), (2**31, 2**31)):
        for file in (tmp_path / older.path).rglob("eval/*"):
            os.utime(file, times)
        assert main(["table", "--results", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert "different contents of shapes" in said and older.path in said
        assert "d" * 16 in said and "e" * 16 in said
    with pytest.raises(UserError, match="results on different contents of shapes do not compare"):
        load(tmp_path)
    assert main(["table", "--results", str(tmp_path), "--methods", "maple"]) == 0


def test_results_of_different_weights_are_an_error_that_names_both(tmp_path, capsys):
    put_halves(tmp_path, "maple", "shapes", (60, 100), (40, 100))
    other = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    for file in (tmp_path / other.path).rglob("*.json"):
        file.write_text(file.read_text().replace("b" * 16, "c" * 16))
    assert main(["table", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "the weights of mini" in said and f"{'c' * 16} (such as {other.path})" in said and "b" * 16 in said
    with pytest.raises(UserError, match="results on different contents of the weights of mini"):
        load(tmp_path)


def test_reading_results_does_not_import_torch(tmp_path):
    put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_halves(tmp_path, "zeroshot", "shapes", (60, 100), (40, 100))
    _, entries = begin(tmp_path, "base-to-novel", datasets=("tiles",), methods=("maple", "procap"), seeds=(1,))
    for entry in entries:
        put_entry(tmp_path, entry)
    words = [["table"], ["table", "base-to-novel"], ["ls", "runs"], ["report"]]
    code = (
        "import sys; from benchmarks.cli import main\n"
        f"for words in {words}: assert main([*words, '--results', {str(tmp_path)!r}]) == 0, words\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_in_markdown_are_no_links_pictures_or_code(tmp_path):
    name = "![x](http://tracker/x.png) `code`"
    table = Table("t", name, ("Class",), (Column("A", ""),), (Row((name,), (name,)),), (name,))
    text = render(table, "md")
    assert text.count(r"\!\[x\](http://tracker/x.png) \`code\`") == 4
    assert [line.split("|")[2] for line in text.splitlines() if line.startswith("| ---")] == [" " + "-" * 38 + " "]


def test_results_of_a_data_set_that_is_not_here_are_read_and_named(tmp_path, capsys):
    pack_source(toy_source(name="my-birds"), tmp_path / "data")
    config = put_halves(tmp_path, "coop", "my-birds", (80, 100), (40, 100), data=tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    assert main(["table", "--results", str(tmp_path), "--datasets", "My-Birds", "--format", "json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    [(labels, items)] = items_of(table).items()
    assert (labels[0], items["Base"]["mean"]) == ("my-birds", 80)
    assert main(["ls", "runs", "--results", str(tmp_path)]) == 0 and config.path in capsys.readouterr().out
    assert main(["table", "base-to-novel", "--results", str(tmp_path)]) == 1
    assert "no result of base-to-novel" in capsys.readouterr().err


def test_an_unfinished_run_has_no_number(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    RunFolder(tmp_path / config.path).train_file.unlink()
    assert load(tmp_path).empty


def test_flags_choose_the_runs_of_the_table(tmp_path, capsys):
    put_halves(tmp_path, "coop", "shapes", (80, 100), (41, 100))
    put_halves(tmp_path, "coop", "tiles", (85, 100), (60, 100))
    put_halves(tmp_path, "zeroshot", "tiles", (85, 100), (60, 100), seed=2)
    put_halves(tmp_path, "zeroshot", "tiles", (85, 100), (60, 100), seed=2, shots=2)
    assert len(load(tmp_path)) == 3 * 2, "shots change nothing without training"
    for flags, expected in (
        (["--datasets", "TILES"], {("CoOp", "tiles"), ("CLIP (zero-shot)", "tiles")}),
        (["--methods", "coop"], {("CoOp", "shapes"), ("CoOp", "tiles"), ("CoOp", "Average")}),
        (["--seeds", "2", "--shots", "4"], {("CLIP (zero-shot)", "tiles")}),
    ):
        assert main(["table", "--results", str(tmp_path), "--format", "json", *flags]) == 0
        [table] = json.loads(capsys.readouterr().out)["tables"]
        assert {(title, dataset) for dataset, title in items_of(table)} == expected


def test_the_one_evaluation_of_zero_shot_clip_counts_for_every_seed(tmp_path):
    for dataset, seed in (("shapes", 3), ("tiles", 3), ("tiles", 4)):
        put_halves(tmp_path, "coop", dataset, (80, 100), (41, 100), seed=seed)
    for dataset in ("shapes", "tiles"):
        put_halves(tmp_path, "zeroshot", dataset, (70, 100), (60, 100))
    found = [line_of(tmp_path, "zeroshot", dataset).halves for dataset in ("shapes", "tiles")]
    assert [{metric.seeds for metric in halves} for halves in found] == [{(3,)}, {(3, 4)}]
    shutil.rmtree(tmp_path / put_halves(tmp_path, "coop", "tiles", (1, 1), (1, 1), seed=4).path)
    assert [metric.mean for metric in line_of(tmp_path, "zeroshot", "Average").halves[:2]] == [70, 60]


def test_the_frame_has_the_documented_columns_and_the_runs_of_a_suite(tmp_path):
    write_results(tmp_path)
    every, suite = load(tmp_path), load(tmp_path, "ablation")
    assert set(every.columns) <= set(re.findall(r"[a-z_\d]+", load.__doc__ or ""))
    assert (every.accuracy == 100 * every.correct / every.total).all()
    assert set(suite.path) < set(every.path) and set(suite.method) == {"maple", "procap"}
    with pytest.raises(UserError, match="no suite nothing"):
        load(tmp_path, "nothing")
    (tmp_path / min({*every.path} - {*suite.path}) / "config.json").write_text("{")
    with warnings.catch_warnings(action="error"):
        assert len(load(tmp_path, "ablation")) == len(suite), "a broken run outside the suite is no news"
