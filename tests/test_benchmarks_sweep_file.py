"""A sweep's YAML file: what is written there is what is searched, and nothing of it is lost without a word."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.cli import main
from benchmarks.cli.flags import typed_names
from benchmarks.cli.sweep_flags import app
from benchmarks.sweeps.file import Asked, read_yaml, with_file


@pytest.fixture
def sheet(tmp_path: Path) -> Any:
    """Writes the file of a sweep."""
    file = tmp_path / "mine.yaml"

    def write(text: str) -> Path:
        file.write_text(f"methods: coop\ndatasets: digits\n{text}\n")
        return file

    return write


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What a dry run says of a sweep."""
    capsys.readouterr()
    code = main(["sweep", *map(str, words), "--dry-run", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out.splitlines()[-1])["sweep"]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["sweep", *map(str, words), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and not said.out
    return said.err


def test_numbers_are_decimal_and_dates_and_times_are_words(sheet):
    found = read_yaml(sheet("a: [010, 0o10, 0x10, 1:30, 1_000, -3, +4, 1e-5, .5]\nb: 2024-01-01\nc: {d: null}"))
    assert found["a"] == [10, 8, 16, "1:30", "1_000", -3, 4, 1e-5, 0.5]
    assert found["b"] == "2024-01-01" and found["c"] == {"d": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vary:\n  lr: [0.01, 0.1]\n  lr: [0.3]", "lr is there twice"),
        ("vary: {lr: [0.1], recipe.lr: [0.2]}", "recipe.lr is varied twice"),
        ("max-concurrent: 1\nmax_concurrent: 2", "max_concurrent is there twice"),
        ("lr: 0.5\nvary: {lr: [0.1, 0.2]}", "lr is varied and has one value as well"),
        ("shots: 4\nvary: {shots: [2, 8]}", "shots is varied and has one value as well"),
        ("option: {n_ctx: 4}\nvary: {n_ctx: [2, 8]}", "n_ctx is varied and has one value as well"),
        ("vary: {lr: {uniform: [-1, -0.1]}}\nhours: 1", "of 20 configurations that were drawn none can be run"),
        ("vary: {epochs: {uniform: [1, 4]}}\nhours: 1", "whole numbers are drawn by integers(1, 4)"),
        ("timeout: 0\nvary: {lr: [0.1]}", "mine.yaml: timeout: at least 1 is needed, not 0"),
        ("hours: 1e999\nvary: {lr: [0.1]}", "mine.yaml: hours: a number is needed, not inf"),
        ("vary: {betas: [[1e999, 0.9]]}", "recipe.betas: every number must be finite"),
    ],
)
def test_what_would_be_lost_or_never_run_is_refused(sheet, capsys, text, said):
    assert said in refused(capsys, sheet(text))


def test_one_field_is_not_varied_twice_on_the_command_line(capsys):
    words = ("--methods", "coop", "--datasets", "digits", "--vary", "lr=0.1,0.2")
    assert "varied twice" in refused(capsys, *words, "--vary", "recipe.lr=0.3")
    assert "has one value as well" in refused(capsys, *words, "--lr", "0.5")


def test_ranges_may_be_written_as_they_are_typed(sheet, capsys):
    plan = planned(capsys, sheet("vary: {lr: 'log(1e-5, 1e-2)', epochs: '2,4'}\ntrials: 3"))
    assert plan["space"] == {"recipe.lr": {"log": [1e-5, 1e-2]}, "recipe.epochs": [2, 4]}


def test_a_flag_that_was_typed_counts_even_with_its_default(sheet, tmp_path, capsys):
    file = sheet(f"results: {tmp_path / 'elsewhere'}\ntimeout: 7\nvary: {{lr: [0.1, 0.2]}}")
    words = ["sweep", "--results", "results", str(file)]
    context = typer.main.get_command(app).make_context("sweep", words[1:])
    asked = with_file(Asked.of(context.params), file, typed_names(context))
    assert (asked.place.results, asked.place.timeout) == ("results", 7)


def test_the_name_of_a_sweep_is_its_own_or_the_files(sheet, tmp_path, capsys):
    assert planned(capsys, sheet("name:\nvary: {lr: [0.1, 0.2]}"))["name"] == "mine"
    odd = sheet("vary: {lr: [0.1, 0.2]}").rename(tmp_path / "s 7.yaml")
    assert "'s 7' cannot name a sweep" in refused(capsys, odd)
    assert planned(capsys, "--name", "seven", odd)["name"] == "seven"


def test_help_says_which_flags_are_no_keys_and_which_classes_there_are(capsys):
    command = typer.main.get_command(app)
    parameters = {one.name: one for one in command.params}
    keys = {part.name for group in Asked.of(command.make_context("sweep", []).params).groups for part in fields(group)}
    assert "classes" in keys and set(parameters) - keys == {"file", "dry_run", "json", "verbose"}
    assert main(["sweep", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with the flags below as keys, but for --dry-run, --json and -v" in said
    assert "--classes base|all " in said and "ended [default: 1]" in said
