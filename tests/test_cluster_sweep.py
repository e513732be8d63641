"""`procap sweep` as people type it, one run at a time in this process; on real Ray nodes in test_cluster_sweep_slow."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest
from ray_nodes import REPOSITORY, without_settings
from test_cluster_space import ended, sweep_settings

from benchmarks.cli import main
from benchmarks.cli.sweep import _title, _wants
from benchmarks.sweeps.progress import SweepProgress, failed_runs
from benchmarks.sweeps.table import summary as summarised
from benchmarks.sweeps.table import table
from cluster.configuration import configure
from cluster.job import Job, Report
from cluster.launcher import Capacity
from cluster.paths import StoragePaths
from cluster.ray_cluster import Resources
from cluster.sweep import MOST_REFUSED, Sweep, carry_out
from cluster.sweep_record import SweepFolder, TrialRecord
from runner.collection import Collection, CollectionFolder
from runner.config import RuntimeConfig, Target, plan_run
from runner.results import RunFolder, find_runs
from runner.tracking.background import CollectionTracker

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--epochs", "1"]
GRID = ["--name", "grid", "--vary", "lr=0.002,0.1", "--vary", "class_position=end,front"]


@pytest.fixture(scope="module")
def where(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--max-concurrent", "1", "--tracking", "off"]


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


def test_the_figures_are_the_same_where_no_test_image_exists(searched, where, few_digits, tmp_path) -> None:
    shutil.copytree(few_digits, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    half = ["--name", "grid", "--vary", "lr=0.002,0.1", "--vary", "class_position=end"]
    blind = ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    assert main(["sweep", *ASKED, *half, *where, *blind]) == 0
    rows, seen = summary(tmp_path)["configurations"], summary(searched)["configurations"]
    assert len(rows) == 2
    wanted = {tuple(row["runs"]): (row["figure"], row["figures"]) for row in seen}
    for row in rows:
        assert (row["figure"], row["figures"]) == wanted[tuple(row["runs"])]


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
    asked = ["--methods", "coop,maple", "--datasets", "digits", "--epochs", "0", "--batch-size", "8",
             "--vary", "weight_decay=0.1", "--vary", "shots=3", "--vary", "betas=[0.8,0.9]", "--vary", "ctx_init=a b",
             "--vary", "n_ctx=2", "--backbone", str(tiny_checkpoint), "--data", str(few_digits),
             "--max-concurrent", "1",
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
        "max-concurrent: 1\ntracking: off\nlauncher: local\n"
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


def test_tpe_has_a_ray_of_its_own_where_nobody_said_whether_with_a_token(where, tmp_path) -> None:
    """In a process that has not imported Ray, with nothing of Ray in its environment."""
    results = tmp_path / "results"
    words = [*ASKED, "--name", "t", "--vary", "lr=log(1e-4,1)", "--search", "tpe", "--trials", "1", *where]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.cli", "sweep", *words, "--max-concurrent", "2", "--results", str(results)],
        env=without_settings(home=tmp_path),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0 and "2 at once on this machine" in process.stderr, process.stderr
    assert "InvalidAuthToken" not in process.stderr
    assert summary(results, "t")["counts"]["finished"] == 1


def test_a_sweep_that_found_no_room_does_not_keep_its_name(where, tmp_path, capsys) -> None:
    words = [*ASKED[:-2], "--name", "n", "--vary", "lr=0.1", *where, "--results", str(tmp_path)]
    nobody = ["--launcher", "ray", "--address", "127.0.0.1:1"]
    assert main(["sweep", *words, "--epochs", "1", *nobody]) == 1
    assert "no Ray cluster at 127.0.0.1:1" in said(capsys)[1] and find_runs(tmp_path) == []
    assert not list(tmp_path.rglob("*.json"))
    assert main(["sweep", *words, "--epochs", "0"]) == 0


def test_configurations_on_different_data_sets_are_not_compared() -> None:
    varied = sweep_settings(space={"dataset": ["digits", "tiles"], "recipe.lr": [1, 2]}, datasets=("digits", "tiles"))
    figures = {("digits", 1): 40.0, ("digits", 2): 50.0, ("tiles", 1): 90.0, ("tiles", 2): 80.0}
    records = {
        f"{number}": ended({"dataset": name, "recipe.lr": lr}, figure, number=number)
        for number, ((name, lr), figure) in enumerate(figures.items())
    }
    document = summarised(varied, records, [])
    assert document["best"] is None and document["best_by_method"] == {}
    assert {name: row["values"]["recipe.lr"] for name, row in document["best_by_dataset"].items()} == {
        "digits": 2,
        "tiles": 1,
    }
    assert [line.split()[0] for line in table(varied, records).splitlines() if "best" in line] == ["tiles", "digits"]
    assert "1 seed each" in _title(varied) and "2 data sets" in _title(sweep_settings(datasets=varied.datasets))
    one = sweep_settings(methods=("coop", "maple"), datasets=varied.datasets)
    found = {method: ended({"method": method}, figure) for method, figure in (("coop", 1.0), ("maple", 2.0))}
    assert summarised(one, found, [])["best"]["values"] == {"method": "maple"}
    assert summarised(one, found, [])["best_by_dataset"] == {}


def test_a_searcher_that_compares_is_refused_over_data_sets(where, tmp_path, capsys) -> None:
    both = ["--methods", "coop", "--vary", "dataset=digits,shapes", *where, "--results", str(tmp_path)]
    for flags in (["--search", "tpe"], ["--stop", "asha"]):
        assert main(["sweep", *both, *flags]) == 2
        assert "different data sets do not compare" in said(capsys)[1]


def test_all_images_are_a_number_of_shots_like_others(where, tmp_path, capsys) -> None:
    asked = ["--methods", "coop", "--datasets", "digits", "--vary", "shots=4,full,0", *where]
    assert main(["sweep", *asked, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    document = json.loads(said(capsys)[0].splitlines()[-1])
    assert [one["values"] for one in document["configurations"]] == [{"shots": 4}, {"shots": 0}]


def test_a_file_that_is_no_yaml_is_a_mistake_of_usage(tmp_path, capsys) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("methods: coop\nvary: {lr: [1\n")
    assert main(["sweep", str(file)]) == 2
    err = said(capsys)[1]
    assert f"{file} is no YAML in line 3" in err and "unicode" not in err and len(err.splitlines()) == 1


def test_a_configuration_that_fails_leaves_the_others_alone(where, tmp_path, capsys) -> None:
    asked = [*ASKED, "--name", "f", "--vary", "lr=0.002,1e30", "--recipe-field", "warmup=none", *where]
    assert main(["sweep", *asked, "--results", str(tmp_path), "--json"]) == 3
    out, err = said(capsys)
    document = json.loads(out.splitlines()[-1])
    assert document["counts"] == {"finished": 1, "stopped": 0, "running": 0, "failed": 1}
    assert document["best"]["values"] == {"recipe.lr": 0.002}
    [failed] = [row for row in document["configurations"] if row["state"] == "failed"]
    assert "not finite" in failed["why"] and "lr 1e+30: failed" in err
    kept = CollectionFolder(tmp_path / "collections/sweep/f").collection()
    assert kept is not None and kept.status == "failed" and len(kept.runs) == 4
    assert list(kept.failed) == failed["runs"]
    assert all(why.startswith(run) and "not finite" in why for run, why in kept.failed.items())
    assert all("a lower lr" in why and "fp32" not in why for why in kept.failed.values()), "it is fp32 already"


def test_a_file_that_cannot_be_read_fails_its_configuration_alone(searched, where, tmp_path, capsys) -> None:
    results = tmp_path / "results"
    shutil.copytree(searched, results)
    shutil.rmtree(results / "sweeps")
    broken = results / summary(searched)["best"]["runs"][0] / "train.json"
    broken.write_text("{")
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(results), "--json"]) == 3
    document = json.loads(said(capsys)[0].splitlines()[-1])
    assert document["counts"] == {"finished": 3, "stopped": 0, "running": 0, "failed": 1}
    [failed] = [row for row in document["configurations"] if row["state"] == "failed"]
    assert str(broken) in failed["why"]


def test_why_is_said_of_the_runs_that_failed_and_of_no_others() -> None:
    half = TrialRecord(
        number=0, values={}, runs=("a", "b"), state="failed", figures={"b": 50.0}, failures={"a": "full"}
    )
    whole = TrialRecord(number=1, values={}, runs=("c", "d"), state="failed", failures={"c": "d: lost", "d": "d: lost"})
    open_ = TrialRecord(number=2, values={}, runs=("e",))
    records = {"x": half, "y": whole, "z": open_}
    assert failed_runs(records) == {"a": "full", "c": "d: lost", "d": "lost"}


@pytest.mark.parametrize("search", ["grid", "tpe"])
def test_each_failed_run_of_a_configuration_has_its_own_reason(tmp_path, search) -> None:
    """Where the runs are one job, the reason of the job is that of all that have not finished."""
    settings = sweep_settings(search=search, seeds=(1, 2, 3), space={"recipe.lr": [0.002]})
    at = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(settings, at, SweepFolder.of(tmp_path, "s"), Nobody())
    [digest] = {str(task["task"]).partition("-")[0] for task in [sweep.next_task()] if task}
    runs = sweep.records[digest].runs
    tasks = [{"task": f"{digest}-0"}, *[task for _ in runs[1:] if search == "grid" and (task := sweep.next_task())]]
    reasons = ["no images", "the disk is full", "no images"]
    for number, task in enumerate(tasks):
        sweep.ended(str(number), task, Report(state="failed", why=reasons[number]))
    record = sweep.records[digest]
    expected = reasons if search == "grid" else ["no images"] * 3
    assert record.state == "failed" and record.why == f"{runs[0]}: no images"
    assert failed_runs(sweep.records) == dict(zip(runs, expected, strict=True))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--pretrained", "/none.pt", "--backbone", "ViT-B/16"], "/none.pt"),
        (["--device", "cpu", "--accelerate", "graphs"], "needs a CUDA device, not cpu"),
    ],
)
def test_what_no_run_would_have_is_said_once_and_leaves_no_sweep(few_digits, tmp_path, capsys, words, named) -> None:
    places = [
        "--data",
        str(few_digits),
        "--results",
        str(tmp_path / "results"),
        "--tracking",
        "off",
        "--max-concurrent",
        "1",
    ]
    assert main(["sweep", *ASKED, *GRID, *words, *places]) in (1, 2)
    errors = [line for line in said(capsys)[1].splitlines() if "error" in line]
    assert len(errors) == 1 and named in errors[0]
    assert not list((tmp_path / "results").rglob("*.json"))


class Nobody:
    """Listens to a sweep and says nothing."""

    def begun(self, record, configuration) -> None: ...

    def heard(self, record, task, job, report) -> None: ...

    def over(self, record, task, job, report) -> None: ...

    def settled(self, record) -> None: ...


def test_configurations_that_are_one_run_are_trained_once(few_digits, tiny_checkpoint, tmp_path) -> None:
    """AdamW does not read momentum: both values are the same training."""
    same = sweep_settings(
        space={"recipe.momentum": [0.8, 0.9]}, shots=2, backbone=str(tiny_checkpoint),
        overrides={"optimizer": "adamw", "epochs": 1},
    )  # fmt: skip
    at = RuntimeConfig(data=few_digits, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(same, at, SweepFolder.of(tmp_path, "s"), Nobody())
    carry_out(sweep, StoragePaths(str(few_digits), str(tmp_path), at), Capacity(Resources(), 1, ray=False))
    assert sweep.complete and sweep.next_task() is None and sweep.begun == 2
    assert [record.state for record in sweep.records.values()] == ["finished", "finished"]
    assert len({record.figure for record in sweep.records.values()}) == len(find_runs(tmp_path)) == 1


TOLD = {
    "done": Report(state="done", figures={"score": 60.0}),
    "failed": Report(state="failed", why="the disk is full"),
    "stopped": Report(epoch=3, of=9, figures={"score": 55.0}),
}


@pytest.mark.parametrize(("end", "search", "stop"), [("done", "tpe", "none"), ("failed", "tpe", "none"),
                                                     ("stopped", "grid", "asha")])  # fmt: skip
def test_configurations_that_are_the_same_runs_are_one_job_and_share_its_end(end, search, stop, tmp_path) -> None:
    """Nobody trains by the size of test batches. What was told before the second one was chosen is its own as well."""
    same = sweep_settings(space={"recipe.test_batch_size": [32, 64]}, search=search, stop=stop)
    at = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(same, at, SweepFolder.of(tmp_path, "s"), Nobody())
    task = sweep.next_task()
    assert task is not None
    sweep.reported("0", task, TOLD["stopped"])
    assert sweep.next_task() is None and sweep.begun == 2 and sweep.settled == 0
    sweep.stopped |= {"0"} if end == "stopped" else set()
    sweep.ended("0", task, TOLD[end])
    wanted = {"done": ("finished", 60.0), "failed": ("failed", None), "stopped": ("stopped", 55.0)}[end]
    assert [(record.state, record.figure) for record in sweep.records.values()] == [wanted] * 2
    assert sweep.complete and sweep.settled == 2
    if end == "stopped":
        assert [record.epoch for record in sweep.folder.trials().values()] == [3, 3]


def test_only_a_job_that_starts_once_more_was_lost(capsys, tmp_path) -> None:
    """Not another one that is the same runs."""
    place = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off")
    tracker = CollectionTracker(place, Collection(kind="sweep", name="s"))
    job, record = Job(pieces=configure(sweep_settings(), {}, tmp_path).pieces), TrialRecord(number=0, values={})
    with SweepProgress(sweep_settings(), tracker, None) as progress:
        for task in ("a", "b"):
            progress.heard(record, task, job, Report())
        assert "lost" not in said(capsys)[1]
        progress.over(record, "b", job, Report(state="done", host="here"))
        progress.heard(record, "a", job, Report())
        assert f"lost the process of {job.name}" in said(capsys)[1]


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
        (["--vary", "lr=1e-3", "--hours", "inf"], "hours = inf: input should be a finite number"),
        (["--vary", "lr=1e-3", "--hours", "nan"], "hours = nan: input should be a finite number"),
        (["--vary", "lr=1e-3", "--search", "tpee"], "did you mean tpe"),
        (["--vary", "epochs=1,2", "--stop", "asha"], "cannot be varied"),
        (["--vary", "lr=1e-3", "--stop", "asha"], "give a smaller --grace or more --epochs"),
        (["--vary", "shots=4,many"], "'many' is not a whole number of 0 or more, or full"),
        (["--vary", "lr=1", "--vary", "lr=2"], "given twice"),
        (["--vary", "lr=1e-3", "--accelerate", "foo", "--dry-run"], "known are auto, off,"),
        (["--vary", "lr=1e-3", "--engine", "deepspeed", "--zero-stage", "7", "--dry-run"], "ZeRO stage 7 is not"),
        (["--vary", "lr=1e-3", "--engine", "deepspeed", "--deepspeed-config", "none.json", "--dry-run"], "none.json"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line_and_starts_nothing(words, said_of_it, where, tmp_path, capsys):
    # Shots and epochs are not asked for twice.
    asked = ASKED[:-4] if words[1].startswith(("shots", "epochs")) else ASKED
    assert main(["sweep", *asked, *words, *where, "--results", str(tmp_path)]) == 2
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
    places = StoragePaths("", str(tmp_path), RuntimeConfig(data=tmp_path, results=tmp_path))
    assert _wants(varied, places).plain()["files"] == [str(tiny_checkpoint)]


def test_a_search_ends_where_no_run_accepts_what_is_drawn(few_digits, tiny_checkpoint, tmp_path) -> None:
    """Time alone would not end it: it is looked at between runs, and there are none."""
    refused = sweep_settings(space={"recipe.lr": {"uniform": [-2, -1]}}, search="random", hours=9.0)
    at = RuntimeConfig(data=few_digits, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(refused, at, SweepFolder.of(tmp_path, "s"), Nobody())
    assert sweep.next_task() is None and sweep.begun == MOST_REFUSED
    assert {record.state for record in sweep.records.values()} == {"failed"}
