"""`procap sweep` as people type it, one run at a time in this process; on real Ray nodes in test_cluster_sweep_slow."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from statistics import fmean, stdev

import pytest
from test_cluster_space import sweep_settings

from benchmarks.cli import main
from benchmarks.commands_sweep import _wants
from cluster.configuration import configure
from cluster.fleet import Room
from cluster.places import Places
from cluster.site import Share
from cluster.sweep import Sweep, carry_out
from cluster.sweep_record import SweepFolder
from runner.config import Target, Workplace, plan_run
from runner.results import RunFolder, find_runs

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--epochs", "1"]
GRID = ["--name", "grid", "--vary", "lr=0.002,0.1", "--vary", "class_position=end,front"]


@pytest.fixture(scope="module")
def where(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--at-once", "1", "--tracking", "off"]


@pytest.fixture(scope="module")
def searched(where, tmp_path_factory) -> Path:
    """Results with a finished grid of 2 x 2 configurations and 2 seeds; leave them as they are."""
    results = tmp_path_factory.mktemp("results")
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(results)]) == 0
    return results


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def summary(results: Path, name: str = "grid") -> dict:
    return json.loads((results / "sweeps" / name / "summary.json").read_text())


def test_its_runs_are_those_of_procap_train(searched, few_digits, tiny_checkpoint) -> None:
    wanted = {
        plan_run(method="coop", dataset="digits", seed=seed, shots=2, backbone=str(tiny_checkpoint),
                 overrides={"epochs": 1, "lr": lr}, options={"class_position": position}).path
        for lr in (0.002, 0.1) for position in ("end", "front") for seed in (1, 2)
    }  # fmt: skip
    assert {run.path.relative_to(searched).as_posix() for run in find_runs(searched)} == wanted
    assert all(run.train() for run in find_runs(searched))


def test_its_figures_are_the_counts_of_validation_images(searched) -> None:
    rows = summary(searched)["configurations"]
    assert len(rows) == 4
    for row in rows:
        results = [RunFolder(searched / run).evaluation(Target("digits", "base", "val")) for run in row["runs"]]
        accuracies = [100 * result.correct / result.total for result in results if result]
        assert row["figure"] == pytest.approx(fmean(accuracies)) and len(accuracies) == 2
        assert row["std"] == pytest.approx(stdev(accuracies))
    figures = [row["figure"] for row in rows]
    assert figures == sorted(figures, reverse=True) and summary(searched)["best"] == rows[0]


def test_no_run_has_seen_a_test_image(searched) -> None:
    targets = {result.target for run in find_runs(searched) for result in run.evaluations()}
    assert targets == {"digits:base:val"}


def test_typed_again_it_repeats_nothing_and_says_the_same(searched, where, capsys) -> None:
    files = {file: file.stat().st_mtime_ns for run in find_runs(searched) for file in run.path.rglob("*.json")}
    before = summary(searched)
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched), "--json"]) == 0
    out, err = said(capsys)
    assert json.loads(out.splitlines()[-1]) == before == summary(searched)
    assert "4 done already" in err
    assert files == {file: file.stat().st_mtime_ns for file in files}


def test_the_commands_at_its_end_train_the_best_and_test_it(searched, where, capsys, tmp_path) -> None:
    document = summary(searched)
    train, evaluate = (shlex.split(line)[1:] for line in document["commands"])
    assert main([*train, "--tracking", "off", "--json"]) == 0
    trained = json.loads(said(capsys)[0].splitlines()[-1])["trained"]
    assert {run["run"] for run in trained} == set(document["best"]["runs"])
    assert main([*evaluate, "--dry-run", "--json"]) == 0
    planned = json.loads(said(capsys)[0].splitlines()[-1])["runs"]
    assert {run["run"] for run in planned} == set(document["best"]["runs"])
    assert {target["target"] for run in planned for target in run["targets"]} == {
        "digits:base:test",
        "digits:novel:test",
    }


def test_commands_say_every_field_that_was_varied(few_digits, tiny_checkpoint, capsys, tmp_path) -> None:
    asked = ["--methods", "coop,maple", "--datasets", "digits", "--shots", "2", "--epochs", "0", "--batch-size", "8",
             "--vary", "weight_decay=0.1", "--vary", "shots=3", "--vary", "betas=[0.8,0.9]", "--vary", "ctx_init=a b",
             "--vary", "n_ctx=2", "--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--at-once", "1",
             "--recipe-field", "optimizer=adamw", "--results", str(tmp_path), "--tracking", "off"]  # fmt: skip
    assert main(["sweep", "--name", "fields", *asked, "--json"]) == 0
    document = json.loads(said(capsys)[0].splitlines()[-1])
    train, _ = (shlex.split(line)[1:] for line in document["commands"])
    assert main([*train, "--json"]) == 0
    trained = json.loads(said(capsys)[0].splitlines()[-1])["trained"]
    assert {run["run"] for run in trained} == set(document["best"]["runs"])
    assert set(document["best_by_method"]) == {"coop", "maple"}


def test_the_same_name_for_another_search_is_refused_and_more_of_the_same_is_not(searched, where, capsys) -> None:
    place = [*where, "--results", str(searched), "--dry-run"]
    assert (
        main(
            ["sweep", *ASKED, "--name", "grid", "--vary", "lr=0.002,0.2", "--vary", "class_position=end,front", *place]
        )
        == 2
    )
    err = said(capsys)[1]
    assert "searched for something else: space was" in err and "another --name" in err and len(err.splitlines()) == 1
    assert main(["sweep", *ASKED, *GRID, "--trials", "3", "--hours", "2", *place]) == 0


def test_a_file_says_what_flags_say(searched, few_digits, tiny_checkpoint, tmp_path, capsys) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        f"methods: [coop]\ndatasets: digits\nseeds: [1, 2]\nshots: 2\nepochs: 1\nbackbone: {tiny_checkpoint}\n"
        f"vary:\n  lr: [2e-3, 0.1]\n  class_position: [end, front]\ndata: {few_digits}\n"
        "at-once: 1\ntracking: off\non: local\n"
    )
    assert main(["sweep", str(file), "--results", str(searched), "--json"]) == 0
    assert json.loads(said(capsys)[0].splitlines()[-1])["counts"]["finished"] == 4
    file.write_text("metods: coop\n")
    assert main(["sweep", str(file)]) == 2
    assert "did you mean methods" in said(capsys)[1]


def test_two_of_the_same_name_at_once_are_one(searched, where, capsys) -> None:
    with SweepFolder.of(searched, "grid").locked():
        assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched)]) == 1
    err = said(capsys)[1]
    assert "being carried out by another process (pid " in err and len(err.splitlines()) == 1


def test_tpe_goes_on_and_keeps_to_its_budget(where, tmp_path, capsys) -> None:
    results = ["--results", str(tmp_path), "--json", "--search", "tpe", "--name", "t", "--vary", "lr=log(1e-4,1)"]
    folder = SweepFolder.of(tmp_path, "t")
    assert main(["sweep", *ASKED, *results, *where, "--trials", "2"]) == 0
    first = json.loads(said(capsys)[0].splitlines()[-1])
    assert first["counts"]["finished"] == len(find_runs(tmp_path)) / 2 == 2
    # As a driver that was killed leaves it: chosen, and not ended.
    digest, record = next(iter(folder.trials().items()))
    folder.write_trial(digest, record.model_copy(update={"state": "running", "figure": None, "figures": {}}))
    assert main(["sweep", *ASKED, *results, *where, "--trials", "3"]) == 0
    second = json.loads(said(capsys)[0].splitlines()[-1])
    assert second["counts"] == {"finished": 3, "stopped": 0, "running": 0, "failed": 0}
    assert {row["configuration"] for row in first["configurations"]} < {
        row["configuration"] for row in second["configurations"]
    }
    assert len(find_runs(tmp_path)) == 6


def test_a_configuration_that_fails_leaves_the_others_alone(where, tmp_path, capsys) -> None:
    asked = [*ASKED, "--name", "f", "--vary", "lr=0.002,1e30", "--recipe-field", "warmup=none", *where]
    assert main(["sweep", *asked, "--results", str(tmp_path), "--json"]) == 3
    out, err = said(capsys)
    document = json.loads(out.splitlines()[-1])
    assert document["counts"] == {"finished": 1, "stopped": 0, "running": 0, "failed": 1}
    assert document["best"]["values"] == {"recipe.lr": 0.002}
    [failed] = [row for row in document["configurations"] if row["state"] == "failed"]
    assert "not finite" in failed["why"] and "lr 1e+30: failed" in err


class Nobody:
    """Listens to a sweep and says nothing."""

    def begun(self, record, configuration) -> None: ...

    def heard(self, record, job, report) -> None: ...

    def over(self, record, job, report) -> None: ...

    def settled(self, record) -> None: ...


def test_configurations_that_are_one_run_are_trained_once(few_digits, tiny_checkpoint, tmp_path) -> None:
    """AdamW does not read momentum: both values are the same training."""
    same = sweep_settings(
        space={"recipe.momentum": [0.8, 0.9]}, shots=2, backbone=str(tiny_checkpoint),
        overrides={"optimizer": "adamw", "epochs": 1},
    )  # fmt: skip
    at = Workplace(data=few_digits, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(same, at, SweepFolder.of(tmp_path, "s"), Nobody())
    task = sweep.next_task()
    assert task is not None and sweep.next_task() is None and sweep.begun == 2
    carry_out(sweep, task, Places(str(few_digits), str(tmp_path), at), Room(Share(), 1, ray=False))
    assert [record.state for record in sweep.records.values()] == ["finished", "finished"]
    assert len({record.figure for record in sweep.records.values()}) == len(find_runs(tmp_path)) == 1


def test_held_out_classes_are_of_the_base_half_and_the_figure_is_their_harmonic_mean(where, tmp_path, capsys) -> None:
    asked = ["--methods", "zeroshot,coop", *ASKED[2:], "--metric", "held-out", "--name", "h", *where]
    assert main(["sweep", *asked, "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(said(capsys)[0].splitlines()[-1])
    for row in document["configurations"]:
        for run, figure in row["figures"].items():
            folder = RunFolder(tmp_path / run)
            base, novel = (
                folder.evaluation(Target("digits", half, "val"))
                for half in ("dev-base", "dev-novel")  # type: ignore[arg-type]
            )
            assert figure == pytest.approx(2 * base.accuracy * novel.accuracy / (base.accuracy + novel.accuracy))
            assert run.startswith("dev-base/")
    assert all("dev-" not in command and "--metric" not in command for command in document["commands"])


def test_a_plan_writes_nothing_and_lists_what_would_be_done(where, tmp_path, capsys) -> None:
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    out, _ = said(capsys)
    document = json.loads(out.splitlines()[-1])
    assert "8 runs to do, about" in out and document["total"] == 4
    assert [one["state"] for one in document["configurations"]] == ["new"] * 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (["--vary", "seed=1,2"], "never searched over"),
        (["--vary", "lr=1e-3,fast"], "lr = 'fast'"),
        (["--vary", "shots=3,-1"], "shots = -1"),
        (["--vary", "lr=log(1e-4,1)", "--search", "grid"], "--search random or tpe"),
        (["--vary", "lr=log(1e-4,1)"], "--trials or --hours"),
        (["--vary", "lr=1e-3", "--metric", "test"], "never chooses by test images"),
        (["--vary", "lr=1e-3", "--classes", "novel"], "novel ones stay unseen"),
        (["--vary", "lr=1e-3", "--grace", "2"], "add --stop asha"),
        (["--vary", "lr=1e-3", "--search", "tpee"], "did you mean tpe"),
        (["--vary", "epochs=1,2", "--stop", "asha"], "cannot be varied"),
        (["--vary", "lr=1", "--vary", "lr=2"], "given twice"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line_and_starts_nothing(words, said_of_it, where, tmp_path, capsys):
    assert main(["sweep", *ASKED, *words, *where, "--results", str(tmp_path)]) == 2
    err = said(capsys)[1]
    assert said_of_it in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_data_set_without_validation_images_is_refused(tmp_path, capsys) -> None:
    assert main(["sweep", "--methods", "coop", "--datasets", "imagenet", "--data", str(tmp_path)]) == 2
    assert "imagenet has no validation images" in said(capsys)[1]


def test_several_data_sets_are_averaged_over(few_digits, tiny_checkpoint) -> None:
    both = sweep_settings(datasets=("digits", "shapes"), seeds=(1, 2), backbone=str(tiny_checkpoint))
    configuration = configure(both, {"recipe.lr": 0.1}, few_digits)
    assert [(piece.config.dataset, piece.config.seed, piece.targets) for piece in configuration.pieces] == [
        (name, seed, (f"{name}:base:val",)) for name in ("digits", "shapes") for seed in (1, 2)
    ]


def test_nodes_are_asked_for_the_weights_that_runs_read_and_not_for_a_name_with_a_slash(
    tiny_checkpoint, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tiny_checkpoint.parent)
    varied = sweep_settings(space={"backbone": ["ViT-B/16", tiny_checkpoint.name]})
    places = Places("", str(tmp_path), Workplace(data=tmp_path, results=tmp_path))
    assert _wants(varied, places).plain()["files"] == [str(tiny_checkpoint)]
