"""Suites and sweeps with results at a URL: their records are uploaded even when they end early."""

from __future__ import annotations

import json

import pytest
from test_cluster_sweep import sweep_settings

from benchmarks.cli import bench as bench_command
from benchmarks.cli import execution, main
from benchmarks.cli.flags import EngineFlags, RuntimeFlags
from benchmarks.cli.sweep_settings import make_commands
from cluster.launcher import launch
from cluster.sweep import Sweep
from runner.stop_signals import Interrupted

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture
def there(tmp_path):
    return tmp_path / "remote"


@pytest.fixture
def at(few_digits, short_checkpoint, there) -> tuple[str, ...]:
    where = ("--data", few_digits, "--results", f"local://{there}", "--backbone", short_checkpoint)
    return tuple(map(str, (*where, "--datasets", "digits", "--max-concurrent", "1", "--tracking", "off")))


SUITE = ("--profile", "mini", "--methods", "zeroshot", "--seeds", "1")


def and_interrupted(work):
    def work_and_stop(*arguments):
        work(*arguments)
        raise Interrupted(15, "stopped; repeat to go on")

    return work_and_stop


def test_the_record_of_an_interrupted_suite_is_uploaded(at, there, monkeypatch, capsys):
    monkeypatch.setattr(execution, "launch", and_interrupted(launch))
    assert main(["bench", "base-to-novel", *SUITE, *at]) == 143
    collection = json.loads((there / "collections/suite/base-to-novel/collection.json").read_text())
    assert collection["status"] == "interrupted" and len(collection["runs"]) == 1


@pytest.mark.slow
def test_the_record_of_an_interrupted_sweep_is_uploaded(at, there, monkeypatch, capsys):
    monkeypatch.setattr(Sweep, "run", and_interrupted(Sweep.run))
    asked = ("--name", "s", "--methods", "zeroshot", "--param", "shots=1,2")
    assert main(["sweep", *asked, *at]) == 143
    collection = json.loads((there / "collections/sweep/s/collection.json").read_text())
    assert collection["status"] == "interrupted" and len(collection["runs"]) == 2


def test_the_report_of_all_suites_is_local_and_names_the_url(at, there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "PAPER_SUITES", ["base-to-novel"])
    assert main(["bench", "all", *SUITE, *at]) == 0
    page = tmp_path / "report/index.html"
    assert f"the result files in local://{there}" in page.read_text()
    page.write_text("<html>my thesis</html>")
    capsys.readouterr()
    assert main(["bench", "all", *SUITE, *at]) == 3
    said = capsys.readouterr()
    assert "1 done, 1 failed:\n  procap report: report is not empty and no report" in said.err and "CLIP" in said.out
    assert page.read_text() == "<html>my thesis</html>"


def test_the_commands_printed_by_a_sweep_hold_no_password():
    place = RuntimeFlags(
        data="https://data.example/shards?sig=hunter2",
        results="s3://bucket/results",
        tracking="postgresql+psycopg2://me:hunter2@db/mlflow",
    )
    for line in make_commands(sweep_settings(), {"recipe.lr": 0.1}, place, EngineFlags()):
        assert "hunter2" not in line and "--results s3://bucket/results" in line
        assert "--data https://data.example/shards" in line and "--tracking postgresql+psycopg2://db/mlflow" in line
