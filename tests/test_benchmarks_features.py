"""Cached image features at the command line: on by default, off by a flag, and without a speed in tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_results import put_halves

from benchmarks.cli import main
from benchmarks.results import load
from benchmarks.tables.render import render, to_dict
from benchmarks.tables.runs import run_tables
from runner.config import Target
from runner.results import write_json
from runner.run_folders import RunFolder, find_runs


@pytest.fixture
def evaluate(tmp_path, monkeypatch, capsys, few_digits, short_checkpoint):
    """Zero-shot CLIP on the digits through `procap`; gives the entry of each target and the printed notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    selected = ["--methods", "zeroshot", "--datasets", "digits", "--backbone", str(short_checkpoint)]
    shared = [*selected, "--data", str(few_digits), "--tracking", "off", "--device", "cpu"]

    def run(templates: str, *more: str) -> tuple[list[dict], str]:
        flags = [*shared, "--option", f"templates={templates}"]
        assert main(["train", *flags]) == 0
        capsys.readouterr()
        assert main(["eval", *flags, "--json", *more]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1])["evaluated"], captured.err

    return run


def test_a_second_run_finds_the_features_of_the_first_and_shows_no_speed(evaluate, tmp_path):
    first, notes = evaluate("single")
    assert [entry["features"] for entry in first] == ["computed"] * 2 and "from the cache" not in notes
    second, notes = evaluate("ensemble")
    assert [entry["features"] for entry in second] == ["cached"] * 2
    assert {entry["images_per_second"] for entry in second} == {None} and "image features came from the cache" in notes
    assert [file.suffix for file in (tmp_path / "home" / "features").glob("digits-test-*")] == [".safetensors"]
    forced, notes = evaluate("ensemble", "--force")
    assert [entry["correct"] for entry in forced] == [entry["correct"] for entry in second]
    assert all(entry["images_per_second"] for entry in forced) and "from the cache" not in notes


def test_the_flag_neither_reads_nor_writes_features(evaluate, tmp_path):
    found, _ = evaluate("single", "--no-feature-cache")
    assert [entry["features"] for entry in found] == ["computed"] * 2
    assert not (tmp_path / "home" / "features").exists()


@pytest.mark.slow
def test_quick_suites_share_features_and_others_time_every_method(at_home, few_digits, short_checkpoint):
    found = []
    for number, more in enumerate((["--quick"], ["--quick"], [])):
        chosen = ["--profile", "mini", "--methods", "zeroshot", "--datasets", "digits", "--backbone", short_checkpoint]
        where = ["--data", few_digits, "--results", f"results-{number}", "--tracking", "off"]
        assert main(["bench", "base-to-novel", *map(str, [*chosen, *where]), *more]) == 0
        [run] = find_runs(Path(f"results-{number}"))
        found.append({one.features for one in run.evaluations()})
    assert found == [{"computed"}, {"cached"}, {"computed"}]


def mark_cached(results: Path, config, target: str) -> None:
    file = RunFolder(results / config.path).eval_file(Target.parse_unchecked(target))
    result = RunFolder(results / config.path).evaluation(Target.parse_unchecked(target))
    assert result
    unrated = {"features": "cached", "images_per_second": None, "images_per_second_model": None}
    write_json(file, result.model_copy(update=unrated))


def test_tables_leave_out_the_speed_of_cached_evaluations_and_note_it(tmp_path):
    put_halves(tmp_path, "maple", "shapes", (80, 100), (40, 100))
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    [table] = run_tables(load(tmp_path))
    assert "from the cache" not in render(table, "md")
    for half in ("base", "novel"):
        mark_cached(tmp_path, config, f"shapes:{half}")
    [table] = run_tables(load(tmp_path))
    places = [place for place, column in enumerate(table.columns) if column.title.startswith("FPS")]
    speeds = {row.labels[1]: [row.cells[place] for place in places] for row in table.rows}
    assert speeds["CoOp"] == [None, None] and all(speeds["MaPLe"])
    [note] = [note for note in table.notes if "from the cache" in note]
    assert "(CoOp)" in note and "procap eval --force" in note
    assert note in render(table, "md") and note in to_dict(table)["notes"]
    [line] = [line for line in render(table, "md").splitlines() if "| CoOp" in line]
    assert [cell.strip() for cell in line.split("|")][6] == "-"


def test_results_from_before_the_feature_cache_count_as_computed(tmp_path):
    config = put_halves(tmp_path, "coop", "shapes", (80, 100), (40, 100))
    file = RunFolder(tmp_path / config.path).eval_file(Target.parse_unchecked("shapes:base"))
    plain = json.loads(file.read_text())
    assert plain.pop("features") == "computed"
    file.write_text(json.dumps(plain))
    assert set(load(tmp_path).features) == {"computed"}
