"""Estimates of run time: from counted operations at first, from finished runs once there are any."""

import json
import math
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from made_results import put_config, put_run, put_score

from benchmarks.cli import main
from benchmarks.results.profiles import MINI
from benchmarks.suites import load_suite
from benchmarks.suites.cost import CostModel, Machine, find_machine, makespan
from benchmarks.suites.progress import RunProgress
from cluster.run import RunSpec, TrialReport
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.run_folders import RunFolder

pytestmark = pytest.mark.usefixtures("at_home")
H200 = Machine("NVIDIA H200", "cuda")
HERE = Machine(platform.machine(), "cpu")
HALVES = ("digits:base:test", "digits:novel:test")
PLAN = ("bench", "base-to-novel", "--profile", "mini", "--datasets", "digits", "--methods", "maple,coop", "--dry-run")


@pytest.fixture
def runtime(tmp_path):
    return RuntimeConfig(tmp_path / "data", tmp_path / "results")


def config(method: str = "maple", seed: int = 1, **fields: object) -> RunConfig:
    return plan_run(method=method, dataset="digits", seed=seed, **fields)  # type: ignore[arg-type]


def spec_of(one: RunConfig) -> RunSpec:
    return RunSpec(config=one, targets=HALVES)


def finish(runtime: RuntimeConfig, one: RunConfig, *targets: str) -> None:
    put_config(runtime.results, one)
    for target in targets:
        put_score(runtime.results, one, target, 3, 5)


def test_more_work_takes_longer(runtime):
    model = CostModel(runtime, H200)
    one = config(backbone="ViT-B-16", precision="bf16", overrides={"epochs": 10})
    base, novel = (Target("digits", half) for half in ("base", "novel"))
    alone = model.work(one, [])
    assert 20 < alone < model.work(one, [base]) < model.work(one, [base, novel])
    assert model.work(one, [base], trained=0.5) < model.work(one, [base])
    longer = config(backbone="ViT-B-16", precision="bf16", overrides={"epochs": 100})
    assert model.work(longer, []) - 20 == pytest.approx(10 * (alone - 20), rel=0.05)
    assert CostModel(runtime, Machine("A100", "cuda")).work(longer, []) > model.work(longer, [])
    assert CostModel(runtime, HERE).work(longer, []) > 100 * model.work(longer, [])


def test_only_what_is_left_of_a_run_is_estimated(runtime):
    trained, halfway, done, broken, new = (config(seed=seed) for seed in range(1, 6))
    finish(runtime, trained)
    finish(runtime, halfway, HALVES[0])
    finish(runtime, done, *HALVES)
    RunFolder(runtime.results / broken.path).train_file.parent.mkdir(parents=True)
    RunFolder(runtime.results / broken.path).train_file.write_text("{")
    model = CostModel(runtime, H200)
    found = [model.seconds(spec_of(one)) for one in (done, halfway, trained, new)]
    assert found[0] == 0.0 and found == sorted(found) and len({*found}) == 4
    assert model.seconds(spec_of(broken)) == model.seconds(spec_of(new))
    assert CostModel(runtime, H200, force=True).seconds(spec_of(done)) == model.seconds(spec_of(new))


def test_finished_runs_of_this_machine_correct_the_estimate(runtime):
    fresh = CostModel(runtime, HERE).work(config(), [])
    for seed, seconds in ((1, 3 * fresh - 1), (2, 3 * fresh - 1), (3, 1e6)):
        put_run(runtime.results, "maple", "digits", seed=seed, seconds=seconds)
        file = RunFolder(runtime.results / config(seed=seed).path).train_file
        document = json.loads(file.read_text())
        name = "another machine" if seconds == 1e6 else HERE.name
        file.write_text(json.dumps(document | {"environment": {"gpu": None, "cpu": {"name": name}}}))
    model = CostModel(runtime, HERE)
    run = RunSpec(config=config(seed=4))
    assert model.seconds(run) == pytest.approx(3 * fresh, rel=0.01)
    assert model.ratio(config())[1] == "median of 2 finished maple runs"
    assert model.ratio(config("coop"))[1] == "median of 2 finished runs of other methods"


def test_the_time_on_an_unknown_data_set_is_unknown(runtime):
    model = CostModel(runtime, HERE)
    assert model.ratio(config())[1] == "assumed: 0.05 TFLOP/s"
    elsewhere = config().model_copy(update={"dataset": "nowhere"})
    assert model.seconds(spec_of(elsewhere)) == math.inf


def test_estimates_need_no_torch(runtime):
    code = """
import sys
from pathlib import Path
from benchmarks.suites.cost import CostModel, find_machine
from runner.config import RunConfig, RuntimeConfig, Target
config = RunConfig.model_validate_json(sys.argv[1])
assert CostModel(RuntimeConfig(Path("a"), Path("b")), find_machine("cpu")).work(config, [Target("digits", "base")]) > 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, config("procap").model_dump_json()], check=True)


def test_jobs_start_as_soon_as_a_slot_is_free():
    assert makespan([], 2) == 0.0 and makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0
    assert makespan([5.0, 1.0], 8) == 5.0 and find_machine("cpu") == HERE


def test_the_time_left_follows_from_the_work_that_has_ended(monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("benchmarks.suites.progress.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    progress = RunProgress([spec_of(config(seed=seed)) for seed in (1, 2)], [30.0, 10.0], quiet=True)
    with progress.display:
        for number in (0, 1):
            progress.started(str(number), {"number": number})
        assert progress.seconds_left() == math.inf
        progress.ended("0", {"number": 0}, TrialReport(state="done", seconds=4.0, host="a"))
        # At 20 s three quarters of the work have ended.
        assert progress.seconds_left() == pytest.approx(20 / 3) and progress.done == [0]


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    capsys.readouterr()
    assert main([*PLAN, *more]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if " machine-hours" in line]


def test_a_dry_run_forecasts_what_is_left_and_long_runs_on_clusters_of_several_sizes(runtime, capsys, monkeypatch):
    assert [line.split()[0] for line in planned(capsys)] == ["1"]
    monkeypatch.setattr("benchmarks.suites.cost.LONG_SECONDS", 0.0)
    new = planned(capsys)
    assert [line.split()[0] for line in new] == ["1", "2", "4", "8"] and not runtime.results.exists()
    assert [line.split()[0] for line in planned(capsys, "--processes", "2")] == ["2", "4", "8", "16"]
    suite = load_suite("base-to-novel")
    entries = suite.plan(suite.options(MINI, datasets=("digits",), methods=("maple", "coop")))
    runs = [entry.spec.config for entry in entries]
    for one in runs[:2]:
        finish(runtime, one, *HALVES)
    trained = planned(capsys)
    assert trained and trained[0] != new[0]
    for one in runs:
        finish(runtime, one, *HALVES)
    assert planned(capsys) == [] and len(planned(capsys, "--force")) == 4
