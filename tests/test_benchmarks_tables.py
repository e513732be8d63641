"""Tables: every number follows from integer counts, and nothing is averaged that does not belong together."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from golden_results import write_results
from made_results import put_halves, put_run, put_score
from toy_shards import toy_source

from benchmarks.cli import main
from benchmarks.results import load
from benchmarks.results.frame import title_variants
from benchmarks.results.metrics import Metric
from benchmarks.tables.render import FORMATS, render, to_dict
from benchmarks.tables.runs import run_tables
from benchmarks.tables.table import Table
from procap.errors import UserError
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


def lines_of(results: Path) -> list[Line]:
    """Every row that `procap table` prints."""
    found = []
    for table in run_tables(load(results)):
        titles = [column.title for column in table.columns]
        found += [Line(row.labels, dict(zip(titles, row.cells, strict=True))) for row in table.rows]
    return found


def line_of(results: Path, method: str, dataset: str) -> Line:
    lines = [line for line in lines_of(results) if (line.cells["Method name"], line.labels[0]) == (method, dataset)]
    return lines[0]


def titles_of(results: Path) -> list[str]:
    """Of the rows of the first table."""
    return list(dict.fromkeys(row.labels[-1] for row in run_tables(load(results))[0].rows))


def table_of(results: Path) -> Table:
    """The table of halves."""
    return run_tables(load(results))[0]


def text_of(results: Path, form: str) -> str:
    """All that is printed."""
    return "\n\n".join(render(table, form) for table in run_tables(load(results)))


def notes_of(results: Path) -> list[str]:
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
    found = items_of(to_dict(table_of(tmp_path)))
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
        averaged = [
            [sum(percent(dataset, method, seed, half) for dataset in datasets) / 3 for seed in (1, 2, 3)]
            for half in (0, 1)
        ]
        average = line_of(tmp_path, method, "Average")
        check(average, *averaged)
        hms = [line_of(tmp_path, method, dataset).cells["HM"].mean for dataset in datasets]
        assert average.cells["mean of HMs"].mean == pytest.approx(mean(hms))
    notes = notes_of(tmp_path)
    assert any("ddof = 1" in note for note in notes) and any("n = 3: seeds 1, 2, 3" in note for note in notes)


def test_unequal_seeds_have_no_hm_and_say_their_n(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100), seed=1)
    second = put_run(tmp_path, "coop", "shapes", seed=2)
    put_score(tmp_path, second, "shapes:base", 60, 100)
    assert config.hash != second.hash
    base, novel, hm = line_of(tmp_path, "coop", "shapes").halves
    assert base.mean == 70 and base.seeds == (1, 2) and novel.seeds == (1,) and hm is None
    for form, plus_minus in (("md", "±"), ("latex", r"$\pm$")):
        text = text_of(tmp_path, form)
        assert f"70.00 {plus_minus} 14.14 (n=2)" in text and "40.00 (n=1)" in text and "Seeds differ" in text
    assert any("no HM or average over different seeds" in note for note in notes_of(tmp_path))
    put_score(tmp_path, second, "shapes:novel", 60, 100)
    assert "(n=" not in text_of(tmp_path, "md") and "n = 2: seeds 1, 2." in notes_of(tmp_path)


def test_runs_that_differ_in_more_than_the_seed_get_rows_of_their_own(tmp_path):
    put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100), shots=16)
    put_halves(tmp_path, "maple", "shapes", (50, 100), (50, 100), shots=4)
    put_halves(tmp_path, "maple", "shapes", (90, 100), (90, 100), shots=16, recipe="procap")
    put_halves(tmp_path, "maple", "shapes", (20, 100), (20, 100), shots=16, options={"n_ctx": 3})
    assert sorted(line.cells["Base"].mean for line in lines_of(tmp_path)) == [20, 50, 80, 90]
    titles = titles_of(tmp_path)
    assert len(titles) == 4
    assert {"shots 4", "recipe procap", "n_ctx 3"} <= {part for t in titles for part in t[7:-1].split(", ")}


def test_speed_is_images_over_seconds_of_both_halves_together(tmp_path):
    config = put_run(tmp_path, "coop", "shapes")
    put_score(tmp_path, config, "shapes:base", 50, 100, rate=100.0)
    put_score(tmp_path, config, "shapes:novel", 50, 300, rate=50.0)
    cells = line_of(tmp_path, "coop", "shapes").cells
    speeds = [cells[column].mean for column in ("FPS", "FPS of the model", "training s")]
    fps = 400 / (100 / 100 + 300 / 50)
    assert speeds == pytest.approx([fps, 2 * fps, 12.5])
    table = table_of(tmp_path)
    printed = [render(table, form).splitlines() for form in ("md", "latex")]
    for lines in printed:
        [line] = [line for line in lines if "CoOp" in line and "50.00" in line]
        assert "57" in line and "12.5" in line and "114" not in line, "what is printed stays narrow"


def test_other_targets_stand_in_a_table_of_their_own(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_score(tmp_path, config, "shapes-sketch", 33, 100)
    [halves, targets] = run_tables(load(tmp_path))
    [other] = targets.rows
    assert other.labels[:2] == ("shapes:base", "shapes-sketch:all:test") and other.cells[0].mean == 33
    assert {row.labels[0] for row in halves.rows} == {"shapes"}
    for form in FORMATS:
        assert "33.0" in render(targets, form) and "33.0" not in render(halves, form)


def test_different_packings_of_a_target_are_called_out(tmp_path):
    put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_halves(tmp_path, "zeroshot", "shapes", (60, 90), (40, 100))
    [note] = [note for note in notes_of(tmp_path) if "do not compare" in note]
    assert note.startswith("shapes:base:test")


def test_sets_that_are_not_as_published_are_marked_in_csv_and_json(tmp_path):
    config = put_halves(tmp_path, "coop", "dtd", (80, 100), (40, 100))
    put_halves(tmp_path, "coop", "dtd-subset", (80, 100), (40, 100))
    file = put_score(tmp_path, config, "imagenet-a-64px", 33, 100)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"variant": "resized, as recorded"}))
    tables = run_tables(load(tmp_path))
    halves, others = (items_of(to_dict(table)) for table in tables)
    found = {labels[0]: items["Data set variant"] for labels, items in halves.items()}
    assert found == {"dtd": None, "dtd-subset": "dtd-subset: subset of the images", "Average": None}
    [other] = others.values()
    assert other["Data set variant"] == "imagenet-a-64px: resized, as recorded"
    first, second = (list(csv.DictReader(io.StringIO(render(table, "csv")))) for table in tables)
    assert {row["Data set"]: row["Data set variant"] or None for row in first} == found
    assert [row["Data set variant"] for row in second] == [other["Data set variant"]]
    assert ["dtd-subset" in " ".join(table.notes) for table in tables] == [True, False], "each says what it has"


def test_results_of_a_data_set_that_is_not_here_are_read_and_named(tmp_path, capsys):
    """A data set of one's own, whose shards lie on another machine."""
    pack_source(toy_source(name="my-birds"), tmp_path / "data")
    config = put_halves(tmp_path, "coop", "my-birds", (80, 100), (40, 100), data=tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    assert main(["table", "--results", str(tmp_path), "--datasets", "My-Birds", "--format", "json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    [(labels, items)] = items_of(table).items()
    assert (labels[0], items["Base"]["mean"], items["Data set variant"]) == ("my-birds", 80, None)
    assert main(["ls", "runs", "--results", str(tmp_path)]) == 0
    assert config.path in capsys.readouterr().out
    where = ["--results", str(tmp_path), "--data", str(tmp_path / "data")]
    assert main(["eval", str(tmp_path / config.path), "--dry-run", *where]) == 0
    assert "my-birds  missing" in capsys.readouterr().out
    assert main(["table", "--results", str(tmp_path), "--datasets", "my-brids"]) == 2
    assert "did you mean my-birds" in capsys.readouterr().err


def test_rows_are_in_the_order_of_their_numbers_and_name_what_is_unusual(tmp_path):
    """Settings that most runs share are in no label, and a note has what differs from the published recipe."""
    for shots in (16, 2, 0, 1):
        put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100), shots=shots)
    for changed in ({"depth": 3}, {"depth": 3, "n_ctx": 4}, {"depth": 3, "fp16_rounding": True}):
        put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100), options=changed)
    [table] = run_tables(load(tmp_path))
    titles = [row.labels[1] for row in table.rows]
    assert titles[:4] == [f"CoOp (shots {shots})" for shots in (1, 2, 16, "full")]
    assert len({*titles[4:]}) == 3
    put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100), overrides={"epochs": 2}, options={"depth": 3})
    [table] = run_tables(load(tmp_path))
    assert [note for note in table.notes if "epochs 2 instead of 5" in note and "recipe custom" in note]
    many = {"epochs": 2, "lr": 0.5, "batch_size": 2, "optimizer": "adamw"}
    put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100), overrides=many, options={"depth": 3})
    [table] = run_tables(load(tmp_path))
    assert max(len(row.labels[1]) for row in table.rows) < 60
    changes = [note for note in table.notes if note.startswith("Not the published recipe")]
    assert any("recipe 2)" in note for note in changes) and any("lr 0.5 instead of 0.0035" in note for note in changes)


def test_shots_that_vary_are_named_in_every_title():
    found = [("4", "mini", "fp32"), ("4", "ViT-B/16", "fp32"), ("8", "mini", "bf16")]
    settings = [{"shots": shots, "backbone": name, "precision": precision} for shots, name, precision in found]
    titles = title_variants(SimpleNamespace(method=["coop"] * 3, settings=settings))
    assert titles == ["CoOp (shots 4)", "CoOp (shots 4, backbone ViT-B/16)", "CoOp (shots 8, precision bf16)"]


def test_an_unfinished_run_has_no_number(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    RunFolder(tmp_path / config.path).train_file.unlink()
    assert load(tmp_path).empty


def test_an_evaluation_of_other_weights_is_refused(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    put_score(tmp_path, config, "shapes:base", 99, 100, checkpoint="f" * 64)
    with pytest.raises(UserError, match=r"evaluated on shapes:base:test with other weights.*--force"):
        load(tmp_path)


def test_a_copy_of_a_run_elsewhere_is_not_counted(tmp_path):
    """A tracker keeps copies of result files below the same folder."""
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    copy = tmp_path / "artifacts" / "0"
    copy.mkdir(parents=True)
    for file in (tmp_path / config.path).glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    assert len(load(tmp_path)) == 2


def test_flags_choose_the_runs_of_the_table(tmp_path, capsys):
    put_halves(tmp_path, "coop", "shapes", (80, 100), (41, 100))
    put_halves(tmp_path, "coop", "tiles", (85, 100), (60, 100))
    put_halves(tmp_path, "zeroshot", "tiles", (85, 100), (60, 100), seed=2)
    for flags, expected in (
        (["--datasets", "TILES"], {("coop", "tiles"), ("zeroshot", "tiles")}),
        (["--methods", "coop"], {("coop", "shapes"), ("coop", "tiles")}),
        (["--seeds", "2"], {("zeroshot", "tiles")}),
    ):
        assert main(["table", "--results", str(tmp_path), "--format", "json", *flags]) == 0
        [table] = json.loads(capsys.readouterr().out)["tables"]
        found = {(items["Method name"], labels[0]) for labels, items in items_of(table).items()}
        assert found - {("coop", "Average")} == expected


def test_the_frame_has_the_documented_columns_and_the_runs_of_a_suite(frozen_results):
    every, suite = load(frozen_results), load(frozen_results, "ablation")
    assert set(every.columns) <= set(re.findall(r"[a-z_]+", load.__doc__ or ""))
    assert (every.accuracy == 100 * every.correct / every.total).all()
    assert set(suite.path) < set(every.path) and set(suite.method) == {"maple", "procap"}
    with pytest.raises(UserError, match="no suite nothing"):
        load(frozen_results, "nothing")


@pytest.fixture(scope="module")
def frozen_results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    write_results(folder)
    return folder
