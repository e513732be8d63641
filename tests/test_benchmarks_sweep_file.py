"""A sweep's YAML file: its keys are flags, and nothing in it is lost silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main
from benchmarks.sweeps.file import read_yaml

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the file of a sweep."""
    file = tmp_path / "mine.yaml"

    def write_file(text: str) -> Path:
        file.write_text(f"methods: coop\ndatasets: digits\n{text}\n")
        return file

    return write_file


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The settings that a dry run prints."""
    capsys.readouterr()
    code = main(["sweep", *map(str, words), "--dry-run", "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out.splitlines()[-1])["sweep"]


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["sweep", *map(str, words), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    return captured.err


def test_numbers_with_an_exponent_are_numbers(write: Write) -> None:
    assert read_yaml(write("a: [-3, 1e-5, .5e1, 2E+3, 1.5]"))["a"] == [-3, 1e-5, 5.0, 2000.0, 1.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metods: coop", "mine.yaml: No such option: --metods"),
        ("param:\n  lr: [0.01, 0.1]\n  lr: [0.3]", "lr is given already, in line 4"),
        ("param: {lr: [0.1], recipe.lr: [0.2]}", "given twice"),
        ("lr: 0.5\nparam: {lr: [0.1, 0.2]}", "lr is varied and has one value as well"),
        ("option: {n_ctx: 4}\nparam: {n_ctx: [2, 8]}", "n_ctx is varied and has one value as well"),
        ("param: {epochs: {uniform: [1, 4]}}\nhours: 1", "epochs = 2.5"),
        ("timeout: 0\nparam: {lr: [0.1]}", "mine.yaml: Invalid value for '--timeout'"),
        ("trials: many\nparam: {lr: [0.1]}", "mine.yaml: Invalid value for '--trials'"),
        ("param: {betas: [[1e999, 0.9]]}", "two decay rates from 0 up to"),
        ("param: {lr: [1", "is no YAML in line"),
        ('results: "a\\nb"', "has a control character"),
        ("name: 2001-99-99", "is no YAML: month must be in 1..12"),
        ("param: " + 9999 * "[", "is no YAML: maximum recursion depth"),
    ],
)
def test_what_would_be_lost_or_never_run_is_refused(
    write: Write, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert message in refused(capsys, write(text))


def test_domains_are_written_as_mappings_or_as_on_the_command_line(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(
        capsys,
        write("param: {lr: 'loguniform(1e-5, 1e-2)', weight_decay: {uniform: [0, 1e-1]}, epochs: '2,4'}\ntrials: 3"),
    )
    assert plan["space"] == {
        "recipe.lr": {"loguniform": [1e-5, 1e-2]},
        "recipe.weight_decay": {"uniform": [0.0, 0.1]},
        "recipe.epochs": [2, 4],
    }


def test_flags_of_the_command_line_win_and_fields_are_merged(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("seeds: [1, 2]\nshots: 4\nparam: {lr: [0.1, 0.2], epochs: [2, 4]}")
    plan = planned(capsys, file, "--shots", "16", "--param", "lr=0.3", "--tracking", "off")
    assert (plan["seeds"], plan["shots"]) == ([1, 2], 16)
    assert plan["space"] == {"recipe.epochs": [2, 4], "recipe.lr": [0.3]}


def test_the_name_of_a_sweep_is_its_own_or_the_files(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys, write("name:\nparam: {lr: [0.1, 0.2]}"))["name"] == "mine"
    odd = write("param: {lr: [0.1, 0.2]}").rename(tmp_path / "s 7.yaml")
    assert "'s 7' cannot name a sweep" in refused(capsys, odd)
    assert planned(capsys, "--name", "seven", odd)["name"] == "seven"
