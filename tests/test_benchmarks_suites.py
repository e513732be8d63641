"""Suites by name: what they consist of, that they are done once, and what a failing run costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.commands_suite import choose, is_done
from benchmarks.flags import Place, Suited
from benchmarks.suites import MINI, PAPER, SUITES, Choice
from cluster.fleet import Fleet
from cluster.job import Job
from cluster.ledger import Ledger
from procap.errors import UsageError
from runner.collection import read_collections
from runner.config import Workplace
from shards.catalogue import CATALOGUE


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """Every test works in a folder of its own, with no settings of the person who runs it."""
    monkeypatch.chdir(tmp_path)
    for name in ("PROCAP_DATA", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    assert main(["data", "pack", "digits", "--data", str(root)]) == 0
    return root


SMALL = ("bench", "base-to-novel", "--world", "mini", "--datasets", "digits", "--epochs", "1", "--at-once", "1")


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_base_to_novel_is_the_papers_table_one():
    """Eleven data sets, five methods, three seeds; 16 shots of base classes; tested on both halves."""
    suite = SUITES["base-to-novel"]
    pieces = suite.pieces(Choice(PAPER, PAPER.datasets, suite.methods, suite.seeds))
    assert len(pieces) == len({piece.config for piece in pieces}) == 11 * 5 * 3
    assert {(piece.config.classes, piece.config.shots) for piece in pieces} == {("base", 16)}
    assert {piece.config.backbone for piece in pieces} == {"ViT-B-16"}
    for piece in pieces:
        name = piece.config.dataset
        assert piece.targets == (f"{name}:base:test", f"{name}:novel:test")
    trained = [name for name, dataset in CATALOGUE.items() if dataset.source == "folder" and not dataset.test_only]
    assert sorted(PAPER.datasets) == sorted(trained)


def test_without_data_the_generated_world_is_used(tmp_path):
    suite = SUITES["base-to-novel"]
    assert choose(suite, Suited(), Place(), tmp_path).datasets == MINI.datasets
    assert choose(suite, Suited(), Place(data="/somewhere"), tmp_path).datasets == PAPER.datasets
    assert choose(suite, Suited(world="mini", seeds="4"), Place(data="/somewhere"), tmp_path).seeds == (4,)
    with pytest.raises(UsageError, match="mini"):
        choose(suite, Suited(world="mimi"), Place(), tmp_path)


def test_a_suite_is_done_once_and_its_table_is_printed_and_kept(shards, tmp_path, capsys):
    words = (*SMALL, "--methods", "zeroshot,coop", "--seeds", "1", "--data", shards, "--tracking", "off", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    assert len(said["done"]) == 2 and not said["failed"]
    assert "| digits   | CLIP (zero-shot) |" in out
    kept = tmp_path / "results/collections/suite/base-to-novel"
    assert (kept / "table.md").read_text().splitlines()[0] == out.splitlines()[0]
    [collection] = read_collections(tmp_path / "results")
    assert collection.status == "finished" and set(collection.runs) == set(said["done"])
    assert collection.figures["runs_finished"] == 2 and "hm/coop" in collection.figures
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results/base").rglob("*")}
    code, out, err = run(capsys, *words)
    assert code == 0 and "2 done already" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results/base").rglob("*")} == before


def test_force_repeats_what_is_there(shards, tmp_path, capsys):
    words = (*SMALL, "--methods", "coop", "--seeds", "1", "--data", shards, "--tracking", "off")
    assert run(capsys, *words)[0] == 0
    [file] = (tmp_path / "results/base").rglob("train.json")
    before, prompts = file.stat().st_mtime_ns, (file.parent / "checkpoint.safetensors").read_bytes()
    code, out, err = run(capsys, *words, "--force")
    assert code == 0 and "0 done already" in err and "CoOp" in out
    assert file.stat().st_mtime_ns > before and (file.parent / "checkpoint.safetensors").read_bytes() == prompts
    assert not json.loads(file.read_text())["resumed"]


def test_a_run_that_fails_is_named_and_the_others_are_done(shards, tmp_path, capsys):
    words = (*SMALL, "--seeds", "1", "--data", shards, "--tracking", "off")
    blocked = tmp_path / "results/base/digits/coop"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    code, out, err = run(capsys, *words, "--methods", "zeroshot,coop")
    assert code == 3
    assert "1 done, 1 failed" in err and "base/digits/coop" in err.splitlines()[-1] and "Traceback" not in err
    assert "CLIP (zero-shot)" in out and "CoOp" not in out
    blocked.unlink()
    code, out, err = run(capsys, *words, "--methods", "zeroshot,coop")
    assert code == 0 and "CoOp" in out


def test_a_plan_says_how_long_clusters_would_take_and_writes_nothing(tmp_path, capsys):
    code, out, err = run(capsys, *SMALL, "--methods", "coop,procap", "--seeds", "1,2", "--dry-run")
    assert code == 0, err
    assert "1 machine:" in out and "4 machines:" in out and "simulated" in out
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--on cloud", "unknown place 'cloud'"),
        ("--address host:1", "add --on ray"),
        ("--autoscale", "add --on ray"),
        ("--gpus 1.5", "a part of one, or a whole number"),
        ("--at-once 0", "at least 1 is needed"),
        ("--world mars", "unknown world 'mars'"),
        ("--on ray --address http://127.0.0.1:8265", "is a dashboard"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words, said, capsys):
    code, out, err = run(capsys, "bench", "base-to-novel", *words.split())
    assert code == 2 and said in err and err.count("\n") == 1 and not out


def test_a_cluster_that_is_not_there_is_named(shards, capsys):
    words = (
        *SMALL,
        "--methods",
        "coop",
        "--data",
        shards,
        "--on",
        "ray",
        "--address",
        "127.0.0.1:1",
        "--tracking",
        "off",
    )
    code, _, err = run(capsys, *words)
    assert code == 1
    last = err.splitlines()[-1]
    assert "127.0.0.1:1" in last and "ray start --head" in last and "Traceback" not in err


class Guess:
    """A forecast of ten seconds a job that remembers what it was taught."""

    def __init__(self) -> None:
        self.learned: list[float] = []

    def seconds(self, job: Job) -> float:
        return 10.0

    def learn(self, job: Job, taken: float) -> None:
        self.learned.append(taken)

    def remaining(self, left, at_once: int) -> float:
        return sum(left) / at_once


def test_the_end_of_every_run_corrects_the_forecast(shards, tmp_path):
    from cluster.job import Report

    pieces = SUITES["base-to-novel"].pieces(Choice(MINI, ("digits",), ("coop",), (1, 2, 3)))
    jobs = [Job(pieces=(piece,)) for piece in pieces]
    guess = Guess()
    with Ledger(jobs, guess, 2, quiet=True) as ledger:
        for number, report in enumerate(
            [Report(state="done", seconds=4.0), Report(state="failed", why="no"), Report()]
        ):
            ledger.started(f"{number}", {"number": number})
            ledger.ended(f"{number}", {"number": number}, report)
    assert guess.learned == [4.0]
    assert ledger.outcome.done == [0] and ledger.outcome.failed == {1: "no"}
    assert not is_done(pieces[0], Workplace(data=shards, results=tmp_path))


def test_a_fleet_asks_for_whole_or_parted_gpus():
    assert Fleet(on="ray", gpus=0.25).gpus == 0.25 and Fleet(on="ray", gpus=2).gpus == 2
