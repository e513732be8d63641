"""Sweeps without Ray: their files and domains, what is planned and refused, and how runs of a trial execute."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_process import start_process
from command_line import plan_sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import make_runtime

from benchmarks.cli import main
from benchmarks.cli.flags import EngineFlags
from benchmarks.cli.sweep import make_commands
from benchmarks.sweeps.outcome import find_best, format_configuration, sweep_table
from benchmarks.tables.summary import describe_best
from cluster import distributed_trial, executor, ray_cluster
from cluster.space import parse_param, resolve_field, round_value, to_tune, value_between
from cluster.sweep import Sweep
from cluster.sweep_record import Configuration, SweepFolder, SweepSettings, make_runs
from cluster.trial import Halving, StoragePaths, TrialReport
from procap.errors import UsageError, UserError
from runner.planning import plan_run
from runner.run_folders import RunFolder
from runner.run_state import RunSpec, score
from runner.session import Session

ASKED = ["--methods", "coop", "--datasets", "digits", "--seeds", "1,2", "--shots", "2", "--epochs", "3"]
PARAMS = ["--param", "ctx_init=an_old_grey_dog", "--recipe-field", "warmup=none"]
GRID = ["--name", "grid", "--param", "lr=1e4,1e3,0.02", *PARAMS]


def sweep_settings(**changes: object) -> SweepSettings:
    fields: dict[str, object] = {"name": "s", "space": {}, "methods": ("coop",), "datasets": ("digits",), "seeds": (1,)}
    return SweepSettings.model_validate(fields | changes)


def test_the_score_of_two_targets_is_their_harmonic_mean_and_of_more_their_mean():
    assert score([80.0, 40.0]) == pytest.approx(160 / 3)
    assert score([70.0]) == 70.0 and score([10.0, 20.0, 60.0]) == 30.0


def test_the_best_configuration_is_a_finished_one(tmp_path):
    run = plan_run(method="coop", dataset="digits").path
    stopped = Configuration(values={"recipe.lr": 1.0}, runs=(run,), state="stopped", curve={1: 99.0}, epochs=3)
    assert find_best([stopped, Configuration(values={"recipe.lr": 2.0})]) is None
    finished, second = (
        Configuration(values={"recipe.lr": lr}, runs=(run,), state="finished", scores={run: score}, epochs=3)
        for lr, score in ((3.0, 9.0), (4.0, 8.0))
    )
    assert find_best([stopped, finished]) == finished
    empty = finished.model_copy(update={"values": {"options.ctx_init": "", "pretrained": None}})
    assert format_configuration(empty) == 'ctx_init "", pretrained null: 9.00 %'
    table = sweep_table(sweep_settings(space={"recipe.lr": [1, 3, 4]}), [stopped, finished, second], tmp_path)
    ranks = {table.rows[row].cells[0]: rank for (row, _), rank in table.ranks().items()}
    assert ranks == {"3.0": "best", "4.0": "second"} and describe_best(table) == "best (val): 1 with 9.00 %"


@pytest.mark.parametrize(("words", "named"), [
    (["--device", "cuda:99"], "'cuda:99'"), (["--backbone", "/none.pt"], "/none.pt"),
    (["--device", "cpu", "--accelerate", "graphs"], "needs a CUDA device, not cpu"),
    (["--launcher", "ray", "--address", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1"),
])  # fmt: skip
def test_what_no_run_would_have_is_reported_once_and_leaves_no_sweep(few_digits, tmp_path, capsys, words, named):
    places = ["--data", str(few_digits), "--results", str(tmp_path / "results"), "--tracking", "off"]
    assert main(["sweep", *ASKED, *GRID, *words, *places]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and named in errors[0] and not list((tmp_path / "results").rglob("*.json"))


def test_a_plan_writes_nothing_and_lists_what_would_be_done(where, tmp_path, capsys):
    assert main(["sweep", *ASKED, *GRID, *where, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert "0 tried already. Nothing was written." in err and document["total"] == 3
    assert not list(tmp_path.iterdir())
    shots = ["--methods", "coop", "--datasets", "digits", "--param", "shots=4,full,all", *where]
    assert main(["sweep", *shots, "--results", str(tmp_path), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sweep"]["space"] == {"shots": [4, 0]}


@pytest.mark.parametrize(("words", "message"), [
    (["--param", "seed=1,2"], "unknown field 'seed'"), (["--param", "lr=1e-3,fast"], "lr = 'fast'"),
    (["--param", "shots=3,-1"], "shots = -1"), (["--param", "lr=0.1,inf"], "should be a finite number"),
    (["--param", "lr=0.1,1e999"], "should be a finite number"),
    (["--param", "lr=loguniform(1e-4,1)", "--search", "grid"], "use random or tpe"),
    (["--param", "lr=loguniform(1e-4,1)"], "--trials or --hours"),
    (["--param", "lr=0.1,0.2", "--search", "grid", "--trials", "1"], "trains all combinations: leave out --trials 1"),
    (["--param", "lr=0.1,0.2", "--search-seed", "3"], "trains all combinations: leave out --search-seed 3"),
    (["--param", "lr=0.1,0.2", "--grace-period", "2"], "without --scheduler asha nothing is stopped early"),
    (["--param", "lr=uniform(-2,-1)", "--trials", "9"], "lr = -1.5"),
    (["--param", "lr=1e-3", "--metric", "test"], "metric = 'test'"),
    (["--param", "lr=1e-3", "--classes", "novel"], "classes = 'novel'"),
    (["--param", "lr=1e-3", "--hours", "inf"], "hours = inf"),
    (["--param", "lr=1e-3", "--search", "tpee"], "search = 'tpee'"),
    (["--param", "epochs=1,2", "--scheduler", "asha"], "cannot be varied"),
    (["--param", "lr=1e-3", "--accelerate", "foo", "--dry-run"], "known are auto, off,"),
    (["--param", "lr=1e-3", "--engine", "deepspeed", "--zero-stage", "7", "--dry-run"], "ZeRO stage 7 is not"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused_in_one_line_and_starts_nothing(words, message, where, tmp_path, capsys):
    # Shots and epochs must not be given twice.
    asked = ASKED[:-4] if words[1].startswith(("shots", "epochs")) else ASKED
    assert main(["sweep", *asked, *words, *where, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_data_set_without_validation_images_is_refused(tmp_path, capsys):
    assert main(["sweep", "--methods", "coop", "--datasets", "imagenet", "--data", str(tmp_path)]) == 2
    assert "imagenet has no validation images" in capsys.readouterr().err


def test_a_varied_field_replaces_its_single_value_and_lists_with_a_limit_are_drawn_from(where, tmp_path):
    fixed = [*ASKED, "--lr", "0.5", *where, "--results", str(tmp_path)]
    asked = plan_sweep(*fixed, "--param", "lr=0.1,0.2", "--trials", "1")
    assert (asked.search, asked.size) == ("random", 1)
    [run, _] = make_runs(asked, {"recipe.lr": 0.1}, Path(where[3]))
    assert run.config.recipe.lr == 0.1


def test_the_printed_command_trains_the_runs_of_the_sweep(where, tmp_path, capsys):
    """With ProCAP's recipe, which gives MaPLe more tokens, and an option that the sweep varies."""
    fixed = ["--methods", "maple", "--datasets", "digits", "--recipe", "procap", *where, "--results", str(tmp_path)]
    asked = plan_sweep(*fixed, "--param", "depth=3,9")
    values = {"options.depth": 9}
    engine_flags = EngineFlags(data=where[3], results=str(tmp_path), engine="deepspeed", zero_stage=1)
    command, evaluation = make_commands(asked, values, engine_flags)
    assert "--engine deepspeed" in command and "--engine" not in evaluation, "an evaluation has no engine"
    assert main([*shlex.split(command)[1:], "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    [run] = make_runs(asked, values, Path(where[3]))
    assert [entry["run"] for entry in plan["runs"]] == [run.path]
    assert run.config.options["n_ctx"] == 4 and run.config.options["depth"] == 9


def test_several_data_sets_are_averaged_over(few_digits, tiny_checkpoint):
    both = sweep_settings(datasets=("digits", "shapes"), seeds=(1, 2), backbone=str(tiny_checkpoint))
    runs = make_runs(both, {"recipe.lr": 0.1}, few_digits)
    assert [(run.config.dataset, run.config.seed, run.targets) for run in runs] == [
        (name, seed, (f"{name}:base:val",)) for name in ("digits", "shapes") for seed in (1, 2)
    ]


def test_held_out_selection_for_all_classes_searches_the_recipe_that_trains_them():
    asked = sweep_settings(methods=("maple",), classes="all", metric="held-out")
    [run] = make_runs(asked, {"recipe.lr": 0.1}, None)
    trained = plan_run(method="maple", dataset="digits", classes="all", overrides={"lr": 0.1})
    assert run.config.classes == "dev-base" and run.config.recipe == trained.recipe


NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False))
SCALARS = st.one_of(NUMBERS, st.booleans(), st.none(), st.text("abcxyz_/-", min_size=1, max_size=8))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), min_size=1, max_size=6))
def test_a_list_is_read_value_by_value(values):
    field, domain = parse_param("pretrained=" + ",".join(json.dumps(value) for value in values), ["coop"])
    assert field == "pretrained" and isinstance(domain, list)
    assert domain == [value for number, value in enumerate(values) if value not in values[:number]]


@pytest.mark.parametrize(("text", "domain"), [
    ("lr = loguniform( 1e-5, 1e-2 )", {"loguniform": [1e-5, 1e-2]}), ("lr=uniform(0,1)", {"uniform": [0.0, 1.0]}),
    ("n_ctx=randint(1,10)", {"randint": [1, 10]}),
])  # fmt: skip
def test_distributions_are_those_of_ray_tune(text, domain):
    assert parse_param(text, ["coop"])[1] == domain
    ((_, (low, high)),) = domain.items()
    drawn = [round_value(domain, to_tune(domain).sample()) for _ in range(20)]
    assert all(low <= value <= high for value in [*drawn, value_between(domain)]) and len(set(drawn)) > 2
    assert to_tune([1, 2], grid=True) == {"grid_search": [1, 2]} and to_tune([1, 2]).categories == [1, 2]


@pytest.mark.parametrize(
    ("name", "field"), [("lr", "recipe.lr"), ("recipe.lr", "recipe.lr"), ("n_ctx", "options.n_ctx"), ("shots", "shots")]
)
def test_plain_names_find_their_field(name, field):
    assert resolve_field(name, ["coop", "maple"]) == field


@pytest.mark.parametrize(("name", "message"), [
    ("seed", "unknown field 'seed'"), ("classes", "unknown field 'classes'"), ("recipe.n_ctx", "unknown field"),
    ("momentun", "did you mean momentum"), ("learning_rate", "did you mean lr"), ("depth", "unknown field 'depth'"),
])  # fmt: skip
def test_fields_that_cannot_be_varied_are_refused_in_one_line(name, message):
    with pytest.raises(UsageError, match=message) as raised:
        resolve_field(name, ["coop", "maple"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", [
    "lr", "lr=", "=3", "lr=loguniform(0,1)", "lr=loguniform(1,2,3)", "lr=uniform(2,1)",
    "lr=randint(0.5,2)", "lr=gauss(0,1)", "lr=uniform(a,b)", "lr=uniform(0,inf)", "lr=loguniform(1,2",
])  # fmt: skip
def test_what_is_no_domain_is_refused(text):
    with pytest.raises(UsageError, match="bracket is missing" if text == "lr=loguniform(1,2" else None):
        parse_param(text, ["coop"])


@pytest.mark.parametrize("reduction", [2, 3, 10])
@pytest.mark.parametrize("grace", [1, 2, 5])
def test_runs_pause_where_asha_decides_and_not_at_their_end(grace, reduction):
    from ray.tune.schedulers import ASHAScheduler

    for epochs in range(grace + 1, 240):
        scheduler = ASHAScheduler(max_t=epochs, grace_period=grace, reduction_factor=reduction)
        [bracket] = scheduler._brackets
        milestones = sorted(milestone for milestone, _ in bracket._rungs if milestone < epochs)
        assert Halving(grace, reduction).rungs(epochs) == tuple(milestones), epochs


@pytest.mark.parametrize(("scheduler", "left"), [("asha", 1), ("none", 2)])
def test_tpe_continues_what_asha_stopped_if_the_sweep_no_longer_uses_it(scheduler, left, tmp_path, monkeypatch):
    space = {"recipe.lr": {"loguniform": [0.1, 10.0]}}
    settings = sweep_settings(space=space, search="tpe", trials=3, scheduler=scheduler)
    run = plan_run(method="coop", dataset="digits").path
    finished = Configuration(values={"recipe.lr": 2.0}, state="finished", scores={run: 9.0})
    stopped = Configuration(values={"recipe.lr": 1.0}, runs=(run,), state="stopped", curve={1: 99.0}, epochs=3)
    folder = SweepFolder(tmp_path / "sweeps" / "s")
    folder.save(settings, [finished, stopped])
    asked: dict[str, object] = {}
    monkeypatch.setattr("cluster.sweep.run_trials", lambda *_, **config: asked.update(config))
    runtime = make_runtime(tmp_path, tmp_path)
    capacity = ray_cluster.Capacity(ray_cluster.Resources(cpus=1), max_concurrent=1, ray=True)
    Sweep(settings, Session(runtime), folder).run(StoragePaths("", "", runtime), capacity, None)
    assert asked["num_samples"] == left


COOP = ("--methods", "coop", "--datasets", "digits")


@pytest.mark.parametrize(("line", "message"), [
    ("--param epochs=uniform(1,4) --hours 1", "epochs = 2.5"),
    ("--trials many --param lr=0.1", "--trials many: input should be a valid integer (see `procap sweep --help`)"),
    ("--param betas=[1e999,0.9]", "should be a finite number"),
])  # fmt: skip
def test_what_would_be_lost_or_never_run_is_refused(capsys, line, message):
    assert main(["sweep", *COOP, *line.split(), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def run(method="coop", seed=1, epochs=1, **more):
    changes = {"epochs": epochs, "batch_size": 16, "warmup_epochs": 0, "lr": 0.01}
    return plan_run(method=method, dataset="digits", seed=seed, shots=4, recipe="procap", overrides=changes, **more)


def spec(config, targets=("digits:base", "digits:novel")):
    return RunSpec(config=config, targets=tuple(targets))


def make_paths(data, results, **more):
    runtime = make_runtime(data, results, **more)
    return StoragePaths(str(data), str(results), runtime)


def test_test_images_that_are_not_there_are_found_before_the_training(few_digits, tmp_path):
    shutil.copytree(few_digits / "digits", tmp_path / "data" / "digits")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    place = make_runtime(tmp_path / "data", tmp_path / "results")
    with pytest.raises(UserError, match=r"'digits' test: .*0\.tar cannot be read"):
        executor.RunExecutor(Session(place), [spec(run())], lambda report: None).execute()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("device", "gpus", "ray", "expected"), [
    ("auto", 0, True, "cpu"), ("auto", 0, False, "cpu"), ("auto", 0.5, True, "auto"), ("auto", 1, False, "auto"),
    ("cuda:1", 1, False, "cuda:1"), ("cuda", 0, True, "cuda"),
])  # fmt: skip
def test_runs_without_a_gpu_use_the_cpu(device, gpus, ray, expected):
    assert ray_cluster.Capacity(ray_cluster.Resources(1, 1.0, gpus), 1, ray=ray).device(device) == expected


def test_seeds_in_step_report_their_mean_of_every_epoch(few_digits, tmp_path):
    """The last one with the final report, when all runs are finished."""
    watched = ("digits:base:val",)
    runs = [RunSpec(config=run(seed=seed, epochs=3), targets=watched) for seed in (1, 2)]
    reports: list[TrialReport] = []
    runtime = make_paths(few_digits, tmp_path).local_runtime()
    reports.append(executor.RunExecutor(Session(runtime), runs, reports.append, Halving(1, 2)).execute())
    assert [report.epoch for report in reports] == [1, 2, 3] and reports[-1].state == "finished"
    histories = [RunFolder(tmp_path / one.path).read_validation() for one in runs]
    for report in reports:
        counts = [count for history in histories for count in history if count.epoch == report.epoch - 1]
        assert report.score == pytest.approx(sum(100 * c.correct / c.total for c in counts) / 2)


def test_ranks_of_one_node_follow_each_other():
    found = [("b", "10.0.0.2", 1), ("a", "10.0.0.1", 2), ("b", "10.0.0.2", 3), ("a", "10.0.0.1", 4)]
    environments = distributed_trial.rank_environments(found)
    assert [int(one["RANK"]) for one in environments] == [0, 2, 1, 3]
    assert [int(one["LOCAL_RANK"]) for one in environments] == [0, 0, 1, 1]
    assert {(one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"]) for one in environments} == {("2", "4")}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in environments} == {("10.0.0.2", "1")}


def test_a_temporary_folder_that_is_too_long_for_ray_says_what_to_set(tmp_path, monkeypatch):
    folder = tmp_path / ("a" * 90)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    remedy = "set RAY_TMPDIR to a folder with a short path"
    with pytest.raises(UserError, match=remedy) as refused, ray_cluster.ray_connection("local", cpus=1):
        pass
    assert f"see {folder}/ray/session_latest/logs" in str(refused.value)


@pytest.mark.slow
def test_a_signal_while_ray_starts_ends_with_its_code(few_digits, tmp_path):
    words = ["sweep", *ASKED, *GRID, "--data", str(few_digits), "--results", str(tmp_path), "--tracking", "off"]
    command = [sys.executable, "-m", "benchmarks.cli", *words]
    with start_process(command, stderr=subprocess.PIPE, text=True) as process:
        while "starting Ray" not in process.stderr.readline():
            pass
        time.sleep(2)
        process.terminate()
        assert process.wait() == 143
