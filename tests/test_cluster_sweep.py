"""`procap sweep` on a local Ray that the tests of this file share; on real Ray nodes in test_cluster_sweep_slow."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

import pytest

from benchmarks.cli import main
from benchmarks.cli.sweep import list_backbones
from benchmarks.sweeps.table import find_best_of_each, format_table, summarize
from cluster.address import LOCAL
from cluster.configuration import Configuration, SweepFolder, SweepSettings, make_runs
from cluster.paths import StoragePaths
from cluster.ray_cluster import connected
from cluster.run import TrialReport
from cluster.sweep import Sweep
from runner.config import RuntimeConfig, Target, plan_run
from runner.results import RunFolder, find_runs
from runner.run_collection import read_collection

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--epochs", "3"]
PARAMS = ["--param", "class_position=front", "--recipe-field", "warmup=none"]
RATES = (1e4, 1e3, 0.02)
GRID = ["--name", "grid", "--param", "lr=1e4,1e3,0.02", *PARAMS]


def sweep_settings(**changes: object) -> SweepSettings:
    fields: dict[str, object] = {"name": "s", "space": {}, "methods": ("coop",), "datasets": ("digits",), "seeds": (1,)}
    return SweepSettings.model_validate(fields | changes)


@pytest.fixture(scope="module")
def where(few_digits, tiny_checkpoint) -> list[str]:
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--max-concurrent", "1", "--tracking", "off"]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with connected(LOCAL, cpus=2):
            yield


@pytest.fixture(scope="module")
def halved(local_ray, where, tmp_path_factory) -> tuple[Path, int]:
    """Results of a sweep with ASHA of which a configuration fails, and its exit code; leave them as they are."""
    results = tmp_path_factory.mktemp("halved")
    words = [*ASKED, "--name", "asha", "--param", "lr=1e4,1e3,0.02,1e30", *PARAMS, *where, "--results", str(results)]
    code = main(["sweep", *words, "--scheduler", "asha", "--grace-period", "1", "--reduction-factor", "2"])
    return results, code


@pytest.fixture(scope="module")
def searched(halved, where, tmp_path_factory) -> Path:
    """Results with a finished grid of 3 configurations, of which `halved` trained a part; leave them as they are."""
    results = shutil.copytree(halved[0], tmp_path_factory.mktemp("searched") / "results")
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(results)]) == 0
    return results


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def summary(results: Path, name: str = "grid") -> dict:
    return json.loads((results / "sweeps" / name / "summary.json").read_text())


def test_its_runs_are_those_of_procap_train(searched, few_digits, tiny_checkpoint) -> None:
    wanted = {
        plan_run(method="coop", dataset="digits", seed=seed, shots=2, backbone=str(tiny_checkpoint),
                 overrides={"epochs": 3, "lr": lr, "warmup": "none"}, options={"class_position": "front"}).path
        for lr in RATES for seed in (1, 2)
    }  # fmt: skip
    assert {run for row in summary(searched)["configurations"] for run in row["runs"]} == wanted
    assert all(RunFolder(searched / run).train() for run in wanted)


def test_its_scores_are_the_counts_of_validation_images(searched) -> None:
    rows = summary(searched)["configurations"]
    assert len(rows) == 3
    for row in rows:
        results = [RunFolder(searched / run).evaluation(Target("digits", "base", "val")) for run in row["runs"]]
        accuracies = [100 * result.correct / result.total for result in results if result]
        assert row["score"] == pytest.approx(fmean(accuracies)) and len(accuracies) == 2
        assert row["std"] == pytest.approx(stdev(accuracies))
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True) and summary(searched)["best"] == rows[0]


@pytest.mark.slow
def test_the_scores_are_the_same_where_no_test_image_exists(searched, where, few_digits, tmp_path) -> None:
    shutil.copytree(few_digits, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    half = ["--name", "grid", "--param", "lr=0.02", *PARAMS]
    blind = ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    assert main(["sweep", *ASKED, *half, *where, *blind]) == 0
    wanted = {tuple(row["runs"]): row["scores"] for row in summary(searched)["configurations"]}
    rows = summary(tmp_path)["configurations"]
    assert len(rows) == 1 and all(row["scores"] == wanted[tuple(row["runs"])] for row in rows)


def test_repeated_it_trains_nothing_and_prints_the_same(searched, where, capsys) -> None:
    files = {file: file.stat().st_mtime_ns for run in find_runs(searched) for file in run.path.rglob("*.json")}
    before = summary(searched)
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == before == summary(searched)
    assert "3 done already" in captured.err
    assert files == {file: file.stat().st_mtime_ns for file in files}


def test_the_commands_at_its_end_train_the_best_and_test_it(searched, capsys) -> None:
    document = summary(searched)
    train, evaluate = (shlex.split(line)[1:] for line in document["commands"])
    assert main([*train, "--tracking", "off", "--json"]) == 0
    assert {run["run"] for run in printed(capsys)["trained"]} == set(document["best"]["runs"])
    assert main([*evaluate, "--dry-run", "--json"]) == 0
    planned = printed(capsys)["runs"]
    assert {run["run"] for run in planned} == set(document["best"]["runs"])
    targets = {target["target"] for run in planned for target in run["targets"]}
    assert targets == {"digits:base:test", "digits:novel:test"}


@pytest.mark.slow
def test_commands_name_every_field_that_was_varied(local_ray, few_digits, tiny_checkpoint, capsys, tmp_path) -> None:
    asked = ["--methods", "coop,maple", "--datasets", "digits", "--epochs", "0", "--batch-size", "8",
             "--param", "weight_decay=0.1", "--param", "shots=3", "--param", "betas=[0.8,0.9]", "--param",
             "ctx_init=a b", "--param", "n_ctx=2", "--backbone", str(tiny_checkpoint), "--data", str(few_digits),
             "--recipe-field", "optimizer=adamw", "--results", str(tmp_path), "--tracking", "off"]  # fmt: skip
    assert main(["sweep", "--name", "fields", *asked, "--json"]) == 0
    document = printed(capsys)
    train, _ = (shlex.split(line)[1:] for line in document["commands"])
    assert main([*train, "--json"]) == 0
    assert {run["run"] for run in printed(capsys)["trained"]} == set(document["best"]["runs"])
    assert set(document["best_by_method"]) == {"coop", "maple"}


def test_the_same_name_for_another_search_is_refused_and_more_of_the_same_is_not(searched, where, capsys) -> None:
    place = [*where, "--results", str(searched), "--dry-run"]
    other = ["--name", "grid", "--param", "lr=0.002,0.2", *PARAMS]
    assert main(["sweep", *ASKED, *other, *place]) == 2
    error = capsys.readouterr().err
    assert "searched for something else: space was" in error and "another --name" in error and error.count("\n") == 1
    assert main(["sweep", *ASKED, *GRID, "--hours", "2", *place]) == 0


def test_a_file_says_what_flags_say(searched, few_digits, tiny_checkpoint, tmp_path, capsys) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        f"methods: [coop]\ndatasets: digits\nseeds: [1, 2]\nshots: 2\nepochs: 3\nbackbone: {tiny_checkpoint}\n"
        "recipe_field: {warmup: none}\nparam:\n  lr: [1e4, 1e+3, 0.02]\n  class_position: [front]\n"
        f"data: {few_digits}\ntracking: off\n"
    )
    assert main(["sweep", str(file), "--results", str(searched), "--json"]) == 0
    assert printed(capsys)["counts"]["finished"] == 3


def test_a_sweep_that_another_process_carries_out_is_refused(searched, where, capsys) -> None:
    with SweepFolder(searched / "sweeps" / "grid").locked():
        assert main(["sweep", *ASKED, *GRID, *where, "--results", str(searched)]) == 1
    error = capsys.readouterr().err
    assert "being carried out by another process (pid " in error and error.count("\n") == 1


def test_tpe_resumes_and_keeps_to_its_budget(local_ray, where, tmp_path, capsys) -> None:
    """After a killed driver: two configurations are finished and a third is not; the fourth is new."""
    folder = SweepFolder(tmp_path / "sweeps" / "t")
    finished = [
        Configuration(number=number, values={"recipe.lr": lr}, state="finished", scores={f"x/seed1-{number}": score},
                      score=score, epochs=1)
        for number, (lr, score) in enumerate([(0.002, 40.0), (0.5, 20.0)])
    ]  # fmt: skip
    folder.save([*finished, Configuration(number=2, values={"recipe.lr": 0.03})])
    words = ["sweep", *ASKED[:-1], "1", "--seeds", "1", "--name", "t", "--param", "lr=loguniform(1e-4,1)", *where]
    words += ["--search", "tpe"]
    assert main([*words, "--trials", "4", "--results", str(tmp_path), "--json"]) == 0
    assert printed(capsys)["counts"] == {"finished": 4, "stopped": 0, "running": 0, "failed": 0}
    found = list(folder.load().values())
    assert found[:2] == finished and found[2].values == {"recipe.lr": 0.03}
    assert len(find_runs(tmp_path)) == 2


@pytest.mark.slow
def test_random_draws_follow_from_the_seed_and_are_the_same_for_all_seeds_of_runs(
    local_ray, where, tmp_path, capsys
) -> None:
    words = ["sweep", *ASKED[:-1], "0", "--name", "r", "--param", "lr=loguniform(1e-4,1)", "--search", "random"]
    drawn = []
    for trials, name in ((3, "a"), (3, "b"), (4, "a")):
        assert main([*words, *where, "--trials", str(trials), "--results", str(tmp_path / name), "--json"]) == 0
        rows = printed(capsys)["configurations"]
        assert len(rows) == trials and all(len(row["scores"]) == 2 for row in rows)
        drawn.append({row["values"]["recipe.lr"] for row in rows})
    assert drawn[0] == drawn[1] < drawn[2]


def mean_at(configuration: Configuration, epoch: int, results: Path) -> float:
    """The mean over its runs of what `validation.json` says of an epoch, 1-based."""
    accuracies = []
    for run in configuration.runs:
        [count] = [count for count in RunFolder(results / run).validation() if count.epoch == epoch - 1]
        assert count.target == "digits:base:val"
        accuracies.append(100 * count.correct / count.total)
    return fmean(accuracies)


def test_a_configuration_that_fails_leaves_the_others_alone(halved) -> None:
    results, code = halved
    document = summary(results, "asha")
    assert code == 3 and document["counts"]["failed"] == 1 and document["counts"]["running"] == 0
    [failed] = [row for row in document["configurations"] if row["state"] == "failed"]
    assert failed["values"]["recipe.lr"] == 1e30 and set(failed["failures"]) == set(failed["runs"])
    kept = read_collection(results / "collections/sweep/asha")
    assert kept is not None and kept.status == "failed" and len(kept.runs) == 8
    assert set(kept.failed) == set(failed["runs"])
    assert all("not finite" in why for why in kept.failed.values())


def test_asha_stops_by_the_mean_over_seeds_and_what_it_stopped_can_be_resumed(halved, searched) -> None:
    results, _ = halved
    configurations = SweepFolder(results / "sweeps" / "asha").load().values()
    found = [one for one in configurations if one.state != "failed"]
    stopped = [one for one in found if one.state == "stopped"]
    assert stopped and {one.state for one in found} == {"stopped", "finished"}
    for one in found:
        assert all(score == pytest.approx(mean_at(one, epoch, results)) for epoch, score in one.curve.items())
        assert one.curve or one.state == "finished"
        if one.state == "stopped":
            assert one.epoch < 3 and one.score == one.curve[one.epoch]
            assert all(not (results / run / "train.json").exists() for run in one.runs)
            assert all((results / run / "state").exists() for run in one.runs)
    resumed = [done.resumed for one in stopped for run in one.runs if (done := RunFolder(searched / run).train())]
    assert len(resumed) == 2 * len(stopped) and all(resumed)


@pytest.mark.slow
def test_a_time_limit_leaves_states_that_are_resumed(local_ray, where, tmp_path, capsys) -> None:
    words = [*ASKED[:-1], "4000", "--name", "h", "--param", "lr=loguniform(1e-4,1)", "--batch-size", "4", *where]
    assert main(["sweep", *words, "--hours", str(90 / 3600), "--results", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    counts = json.loads(captured.out.splitlines()[-1])["counts"]
    assert counts["running"] > 0 == counts["finished"] + counts["stopped"] + counts["failed"]
    assert "unfinished, with their states kept" in captured.err


@pytest.mark.slow
def test_a_file_that_cannot_be_read_fails_its_configuration_alone(searched, where, tmp_path, capsys) -> None:
    results = tmp_path / "results"
    shutil.copytree(searched, results)
    shutil.rmtree(results / "sweeps")
    broken = results / summary(searched)["best"]["runs"][0] / "train.json"
    broken.write_text("{")
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(results), "--json"]) == 3
    document = printed(capsys)
    assert document["counts"] == {"finished": 2, "stopped": 0, "running": 0, "failed": 1}
    [failed] = [row for row in document["configurations"] if row["state"] == "failed"]
    assert str(broken) in str(failed["failures"])


@pytest.mark.slow
def test_configurations_that_are_the_same_runs_train_them_once(
    local_ray, few_digits, tiny_checkpoint, tmp_path
) -> None:
    """AdamW does not read momentum: both values are the same training."""
    same = sweep_settings(
        space={"recipe.momentum": [0.8, 0.9]}, shots=2, backbone=str(tiny_checkpoint),
        overrides={"optimizer": "adamw", "epochs": 1},
    )  # fmt: skip
    from cluster.ray_cluster import Capacity, Resources

    at = RuntimeConfig(data=few_digits, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(same, at, SweepFolder(tmp_path / "sweeps" / "s"))
    sweep.run(StoragePaths(str(few_digits), str(tmp_path), at), Capacity(Resources(), 2, ray=True))
    assert sweep.is_complete
    assert [one.state for one in sweep.configurations.values()] == ["finished", "finished"]
    assert len({one.score for one in sweep.configurations.values()}) == len(find_runs(tmp_path)) == 1


@pytest.mark.parametrize("search", ["grid", "tpe"])
def test_each_failed_run_of_a_configuration_has_its_own_reason(tmp_path, search) -> None:
    """Where all seeds are one trial, its reason is that of all runs that have not finished."""
    settings = sweep_settings(search=search, seeds=(1, 2, 3), space={"recipe.lr": [0.002]}, trials=1)
    at = RuntimeConfig(data=tmp_path, results=tmp_path, tracking_uri="off", quiet=True)
    sweep = Sweep(settings, at, SweepFolder(tmp_path / "sweeps" / "s"))
    reasons = ["no images", "the disk is full", "no images"]
    for seed, why in zip((1, 2, 3) if search == "grid" else (0,), reasons, strict=False):
        config = {"recipe.lr": 0.002, **({"seed": seed} if seed else {})}
        sweep.started(f"{seed}", config)
        sweep.ended(f"{seed}", config, TrialReport(state="failed", why=why))
    [one] = sweep.configurations.values()
    expected = reasons if search == "grid" else ["no images"] * 3
    assert one.state == "failed" and one.failures == dict(zip(one.runs, expected, strict=True))


@pytest.mark.slow
def test_held_out_selection_scores_classes_that_were_not_trained_on(local_ray, where, tmp_path, capsys) -> None:
    words = [*ASKED, "--name", "h", "--param", "lr=0.002", "--metric", "held-out", *where]
    assert main(["sweep", *words, "--results", str(tmp_path), "--json"]) == 0
    document = printed(capsys)
    [row] = document["configurations"]
    for run, score in row["scores"].items():
        base, novel = (
            RunFolder(tmp_path / run).evaluation(Target("digits", half, "val")) for half in ("dev-base", "dev-novel")
        )
        assert score == pytest.approx(2 * base.accuracy * novel.accuracy / (base.accuracy + novel.accuracy))
        assert run.startswith("dev-base/")
    assert all("dev-" not in command and "--metric" not in command for command in document["commands"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "cuda:99"], "'cuda:99'"),
        (["--pretrained", "/none.pt", "--backbone", "ViT-B/16"], "/none.pt"),
        (["--device", "cpu", "--accelerate", "graphs"], "needs a CUDA device, not cpu"),
        (["--launcher", "ray", "--address", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_no_run_would_have_is_reported_once_and_leaves_no_sweep(
    local_ray, few_digits, tmp_path, capsys, words, named
):
    places = ["--data", str(few_digits), "--results", str(tmp_path / "results"), "--tracking", "off"]
    assert main(["sweep", *ASKED, *GRID, *words, *places]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and named in errors[0]
    assert not list((tmp_path / "results").rglob("*.json"))


def test_a_plan_writes_nothing_and_lists_what_would_be_done(where, tmp_path, capsys) -> None:
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert "6 runs in all" in out and document["total"] == 3
    assert [one["state"] for one in document["configurations"]] == ["new"] * 3
    assert not list(tmp_path.iterdir())
    shots = ["--methods", "coop", "--datasets", "digits", "--param", "shots=4,full,0", *where]
    assert main(["sweep", *shots, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    assert [one["values"] for one in printed(capsys)["configurations"]] == [{"shots": 4}, {"shots": 0}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--param", "seed=1,2"], "averaged over all of --seeds"),
        (["--param", "lr=1e-3,fast"], "lr = 'fast'"),
        (["--param", "shots=3,-1"], "shots = -1"),
        (["--param", "lr=0.1,inf"], "lr must be a finite number"),
        (["--param", "lr=0.1,1e999"], "lr must be a finite number"),
        (["--param", "lr=loguniform(1e-4,1)", "--search", "grid"], "use random or tpe"),
        (["--param", "lr=loguniform(1e-4,1)"], "--trials or --hours"),
        (["--param", "lr=uniform(-2,-1)", "--trials", "9"], "lr = -1.5"),
        (["--param", "lr=1,2", "--trials", "1"], "leave out --trials"),
        (["--param", "lr=1e-3", "--metric", "test"], "metric = 'test'"),
        (["--param", "lr=1e-3", "--classes", "novel"], "classes = 'novel'"),
        (["--param", "lr=1e-3", "--grace-period", "2"], "add --scheduler asha"),
        (["--param", "lr=1e-3", "--hours", "inf"], "hours = inf: input should be a finite number"),
        (["--param", "lr=1e-3", "--search", "tpee"], "search = 'tpee'"),
        (["--param", "epochs=1,2", "--scheduler", "asha"], "cannot be varied"),
        (
            ["--param", "lr=1e-3", "--scheduler", "asha", "--grace-period", "3"],
            "give a smaller --grace-period",
        ),
        (["--param", "shots=4,many"], "--shots many: one number of images per class"),
        (["--param", "lr=1", "--param", "recipe.lr=2"], "given twice"),
        (["--param", "lr=1e-3", "--lr", "0.5"], "has one value as well"),
        (["--param", "lr=1e-3", "--accelerate", "foo", "--dry-run"], "known are auto, off,"),
        (["--param", "lr=1e-3", "--engine", "deepspeed", "--zero-stage", "7", "--dry-run"], "ZeRO stage 7 is not"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line_and_starts_nothing(words, message, where, tmp_path, capsys):
    # Shots and epochs must not be given twice.
    asked = ASKED[:-4] if words[1].startswith(("shots", "epochs")) else ASKED
    assert main(["sweep", *asked, *words, *where, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_data_sets_that_cannot_be_compared_or_have_no_validation_images_are_refused(where, tmp_path, capsys) -> None:
    both = ["--methods", "coop", "--param", "dataset=digits,shapes", *where, "--results", str(tmp_path)]
    for flags in (["--search", "tpe", "--trials", "2"], ["--scheduler", "asha"]):
        assert main(["sweep", *both, *flags]) == 2
        assert "different data sets do not compare" in capsys.readouterr().err
    assert main(["sweep", "--methods", "coop", "--datasets", "imagenet", "--data", str(tmp_path)]) == 2
    assert "imagenet has no validation images" in capsys.readouterr().err


def test_configurations_on_different_data_sets_are_not_compared() -> None:
    varied = sweep_settings(space={"dataset": ["digits", "tiles"], "recipe.lr": [1, 2]}, datasets=("digits", "tiles"))
    scores = {("digits", 1): 40.0, ("digits", 2): 50.0, ("tiles", 1): 90.0, ("tiles", 2): 80.0}
    found = [
        Configuration(number=number, values={"dataset": name, "recipe.lr": lr}, state="finished", score=score, epochs=9)
        for number, ((name, lr), score) in enumerate(scores.items())
    ]
    document = summarize(varied, found, [])
    assert document["best"] is None and document["best_by_method"] == {}
    assert {name: one.values["recipe.lr"] for name, one in find_best_of_each(varied, found).items()} == {
        "digits": 2,
        "tiles": 1,
    }
    assert [line.split()[0] for line in format_table(varied, found).splitlines() if "best" in line] == [
        "tiles",
        "digits",
    ]


def test_several_data_sets_are_averaged_over(few_digits, tiny_checkpoint) -> None:
    both = sweep_settings(datasets=("digits", "shapes"), seeds=(1, 2), backbone=str(tiny_checkpoint))
    runs = make_runs(both, {"recipe.lr": 0.1}, few_digits)
    assert [(run.config.dataset, run.config.seed, run.targets) for run in runs] == [
        (name, seed, (f"{name}:base:val",)) for name in ("digits", "shapes") for seed in (1, 2)
    ]


def test_a_checkpoint_gets_an_absolute_path_and_a_name_with_a_slash_is_a_name(tiny_checkpoint, monkeypatch) -> None:
    monkeypatch.chdir(tiny_checkpoint.parent)
    varied = sweep_settings(space={"backbone": ["ViT-B/16", tiny_checkpoint.name]})
    assert [name for name, _ in list_backbones(varied)] == ["ViT-B-16", str(tiny_checkpoint)]


def test_a_score_that_is_missing_is_not_a_number_for_ray_tune() -> None:
    assert math.isnan(TrialReport().to_result()["score"])
    report = TrialReport(state="done", epoch=3, score=71.5)
    assert TrialReport.of_result(json.loads(json.dumps({**report.to_result(), "training_iteration": 9}))) == report
