"""What is left is what is forecast: in the plan of a suite, in the order of its runs, and in what they teach."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from made_results import put_config, put_score

from benchmarks.cli import main
from benchmarks.cost.estimate import CostModel, Machine, here
from benchmarks.cost.forecast import CostForecast, forecast_on
from benchmarks.results.profiles import MINI
from benchmarks.studies.cluster_simulation.cluster import Conditions
from benchmarks.studies.cluster_simulation.study import cases
from benchmarks.studies.cluster_simulation.study import job as simulated_job
from benchmarks.suites import suite_named
from benchmarks.sweeps.progress import SweepProgress
from cluster.job import Job, Report, RunSpec
from cluster.job_progress import JobProgress
from cluster.sweep_record import TrialRecord
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.progress import duration
from runner.results import RunFolder

HALVES = ("digits:base:test", "digits:novel:test")
PLAN = ("bench", "base-to-novel", "--profile", "mini", "--datasets", "digits", "--methods", "maple,coop", "--dry-run")


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PROCAP_DATA", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))


@pytest.fixture
def at(tmp_path: Path) -> RuntimeConfig:
    return RuntimeConfig(tmp_path / "data", tmp_path / "results")


def config(method: str = "maple", seed: int = 1) -> RunConfig:
    return plan_run(method=method, dataset="digits", seed=seed)


def job_of(one: RunConfig) -> Job:
    return Job(pieces=(RunSpec(config=one, targets=HALVES),))


def finish(at: RuntimeConfig, one: RunConfig, *targets: str) -> None:
    put_config(at.results, one)
    for target in targets:
        put_score(at.results, one, target, 3, 5)


def test_only_what_is_left_of_a_run_is_forecast(at: RuntimeConfig):
    model = CostModel(here(device="cpu"))
    both = [Target.recorded(one) for one in HALVES]
    trained, halfway, done, broken, new = (config(seed=seed) for seed in range(1, 6))
    finish(at, trained)
    finish(at, halfway, HALVES[0])
    finish(at, done, *HALVES)
    RunFolder(at.results / broken.path).train_file.parent.mkdir(parents=True)
    RunFolder(at.results / broken.path).train_file.write_text("{")
    costs = CostForecast(model, at)
    found = [costs.seconds(job_of(one)) for one in (trained, halfway, done, broken, new)]
    whole = model.estimate(new, both).seconds
    tests = [model.estimate(new, left, train=False).seconds for left in (both, both[1:])]
    assert found == pytest.approx([*tests, 0.0, whole, whole], rel=0.01) and tests[0] < 0.5 * whole
    assert costs.longest_first([job_of(trained), job_of(new)]) == [job_of(new), job_of(trained)]
    repeated = CostForecast(model, at, force=True)
    assert repeated.seconds(job_of(done)) == pytest.approx(whole, rel=0.01)


def test_a_run_that_was_evaluated_only_teaches_nothing_of_training(at: RuntimeConfig):
    costs = CostForecast(CostModel(here(device="cpu")), at)
    trained, new = job_of(config(seed=1)), job_of(config(seed=2))
    finish(at, config(seed=1))
    before = costs.seconds(new)
    costs.learn(trained, costs.seconds(trained))
    assert costs.seconds(new) == pytest.approx(before) and costs.basis(new) != "measured here"


class Guess:
    """A forecast that remembers what it was taught, and of which jobs it was asked."""

    def __init__(self) -> None:
        self.learned: list[float] = []
        self.asked: list[str] = []

    def seconds(self, job: Job) -> float:
        self.asked.append(job.name)
        return 10.0

    def learn(self, job: Job, taken: float) -> None:
        self.learned.append(taken)

    def remaining(self, left, at_once: int) -> float:
        return sum(left) / at_once


RUNNING, WAITING = Report(host="a"), Report(state="waiting", why="held", host="a")
TOLD = {"at once": [RUNNING], "lost": [RUNNING, Report()], "held by others": [WAITING, RUNNING]}


@pytest.mark.parametrize("told", TOLD)
def test_only_an_attempt_that_did_all_that_was_left_corrects_the_forecast(told: str):
    guess, done, job = Guess(), Report(state="done", seconds=4.0, host="a"), job_of(config())
    with JobProgress([job], guess, 1, quiet=True) as ledger:
        ledger.started("0", {"number": 0})
        for report in TOLD[told]:
            if report.host:
                ledger.reported("0", {"number": 0}, report)
            else:
                ledger.started("0", {"number": 0})
        ledger.ended("0", {"number": 0}, done)
    assert guess.learned == ([4.0] if told == "at once" else []) and ledger.outcome.done == [0]


class Silent:
    """Who is told of a collection's runs."""

    def update(self, *told: object) -> None: ...


@pytest.mark.parametrize("told", TOLD)
def test_a_sweep_learns_by_the_same_rule_from_what_was_left_when_a_job_began(
    told: str, monkeypatch: pytest.MonkeyPatch
):
    guess, job, record = Guess(), job_of(config()), TrialRecord(number=0, values={})
    progress = SweepProgress(None, Silent(), None)  # type: ignore[arg-type]
    progress.follow(None, guess, 1)  # type: ignore[arg-type]
    for report in (Report(), *TOLD[told]):
        progress.heard(record, "0", job, report)
    assert guess.asked == [job.name]
    progress.over(record, "0", job, Report(state="done", seconds=4.0, host="a"))
    assert guess.learned == ([4.0] if told == "at once" else [])


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """The lines of the outlook, by cluster size."""
    capsys.readouterr()
    assert main([*PLAN, *more]) == 0
    out = capsys.readouterr().out
    return [line.strip() for line in out.splitlines() if " machine-hours" in line]


def test_a_plan_says_how_long_what_is_left_of_it_takes(
    at: RuntimeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, hand_out = CostModel(here(device="cpu")), Conditions().hand_out
    suite = suite_named("base-to-novel")
    entries = suite.plan(suite.options(MINI, datasets=("digits",), methods=("maple", "coop")))
    runs = [entry.spec.config for entry in entries]
    both = [Target.recorded(one) for one in HALVES]

    def took(*, train: bool = True) -> str:
        seconds = sum(model.estimate(one, both, train=train).seconds + hand_out for one in runs)
        return f"1 machine: {duration(seconds)}, "

    new = planned(capsys)
    assert new[0].startswith(took()) and [line.split()[0] for line in new] == ["1", "2", "4", "8"]
    assert not at.results.exists()
    for one in runs:
        finish(at, one)
    trained = planned(capsys)
    assert trained[0].startswith(took(train=False)) and trained[0] != new[0]
    for one in runs:
        finish(at, one, *HALVES)
    assert planned(capsys) == [] and planned(capsys, "--force") == new
    shutil.rmtree(at.results)
    hour = float(new[0].split(", ")[1].split()[0])
    priced = planned(capsys, "--price", "3.5", "--processes", "2")
    assert [line.split()[0] for line in priced] == ["2", "4", "8", "16"]
    assert "costs" not in new[0] and f"costs {3.5 * hour:.1f}" in planned(capsys, "--price", "3.5")[0]
    assert main([*PLAN[:-1], "--price", "3.5"]) == 2
    assert "add --dry-run" in capsys.readouterr().err


def test_a_plan_and_the_simulation_of_table_one_assume_the_same(at: RuntimeConfig):
    [fast, _] = cases()
    costs = forecast_on(Machine("H200", "cuda"), at)
    for method, dataset in (("maple", "imagenet"), ("zeroshot", "eurosat"), ("cocoop", "dtd")):
        one = plan_run(method=method, dataset=dataset, seed=1, backbone="ViT-B-16", precision="bf16")
        targets = (f"{dataset}:base:test", f"{dataset}:novel:test")
        [simulated] = costs.simulated(Job(pieces=(RunSpec(config=one, targets=targets),)))
        expected = simulated_job(fast.model, one)
        assert simulated.start == expected.start > 0
        assert simulated.seconds == pytest.approx(expected.seconds, rel=0.01)
