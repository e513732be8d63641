"""Estimates of cost rest on recorded figures, agree with what was measured, and learn from what runs really take."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from made_results import put_run, put_score

from benchmarks.cli.plan import plan
from benchmarks.cost.estimate import CostModel, Machine, here, makespan
from benchmarks.cost.figures import RESULTS, collect, counted, measured, read
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.environment import cpu_name
from runner.results import RunFolder
from shards.errors import DataUsageError

FROM_FIGURES = ("devices", "accelerators", "decode", "published")
H200 = Machine("NVIDIA H200", "cuda")
MEASURED = Machine(read()["devices"][0]["name"], "cpu")


def run(method: str, dataset: str = "oxford-flowers", **fields: object) -> RunConfig:
    return plan_run(method=method, dataset=dataset, backbone="ViT-B-16", precision="bf16", **fields)  # type: ignore[arg-type]


def halves(config: RunConfig) -> list[Target]:
    return [Target(config.dataset, "base"), Target(config.dataset, "novel")]


def test_the_installed_table_is_what_the_recorded_figures_give():
    if not RESULTS.is_dir():
        pytest.skip("the recorded figures are not installed")
    installed = read()
    _same(json.loads(json.dumps(measured(installed["counts"]))), {name: installed[name] for name in FROM_FIGURES})
    _same(json.loads(json.dumps(counted("ViT-B-16", "procap"))), installed["counts"]["ViT-B-16"]["procap"])
    _same(json.loads(json.dumps(counted("mini", "cocoop"))), installed["counts"]["mini"]["cocoop"])


@pytest.mark.slow
def test_the_whole_installed_table_is_what_counting_and_reading_anew_give():
    if not RESULTS.is_dir():
        pytest.skip("the recorded figures are not installed")
    _same(json.loads(json.dumps(collect())), read())


def _same(found: object, installed: object) -> None:
    if isinstance(found, dict):
        assert isinstance(installed, dict) and found.keys() == installed.keys()
        for name in found:
            _same(found[name], installed[name])
    elif isinstance(found, list):
        assert isinstance(installed, list) and len(found) == len(installed)
        for one, other in zip(found, installed, strict=True):
            _same(one, other)
    else:
        # Fits differ in their last digits between processors.
        assert found == (pytest.approx(installed, rel=1e-6, abs=1e-12) if isinstance(found, float) else installed)


def test_estimated_steps_are_those_that_were_measured():
    device = read()["devices"][0]
    model = CostModel(MEASURED)
    steps = [step for step in device["steps"] if step["kind"] == "train"]
    assert len(steps) > 10
    for step in steps:
        config = plan_run(
            method=step["method"], dataset="digits", backbone=step["backbone"], precision=step["precision"]
        )
        seconds = model.paces.step(config, step["classes"], step["batch"])
        assert seconds == pytest.approx(step["seconds"], rel=0.15), step


def test_estimated_steps_on_h200s_are_those_of_the_recorded_scaling():
    scaling = json.loads((RESULTS / "scaling.json").read_text())
    model = CostModel(H200)
    rows = [(one, row) for one in scaling["estimates"] if one["gpu"] == "H200" for row in one["ranks"]]
    assert {one["method"] for one, _ in rows} >= {"maple", "procap"}
    for one, row in rows:
        step = model.paces.step(run(one["method"]), one["parts"]["classes"], one["batch"], row["ranks"])
        assert step == pytest.approx(row["seconds"], rel=0.01)


def test_every_estimate_says_what_it_rests_on():
    config = run("procap")
    assert CostModel(H200).estimate(config).basis.startswith("assumed: counted operations at 40 % of H200's peak")
    unknown = CostModel(Machine("Some GPU", "cuda")).estimate(config)
    assert "A100" in unknown.basis and unknown.seconds > CostModel(H200).estimate(config).seconds
    other = CostModel(Machine("Another processor", "cpu")).estimate(config)
    assert other.basis == f"scaled from ViT-B-16 in bf16 on {MEASURED.name}, 2 cores"
    own = config.model_copy(update={"method": "somebody's own"})
    assert "never counted" in CostModel(H200).estimate(own).basis
    with pytest.raises(DataUsageError):
        CostModel(H200).estimate(config.model_copy(update={"dataset": "nowhere"}))


def test_more_work_takes_longer_and_evaluations_add_up():
    model = CostModel(MEASURED)
    config = run("procap")
    alone, base = model.estimate(config), model.estimate(config, [Target(config.dataset, "base")])
    assert model.start < alone.seconds < base.seconds < model.estimate(config, halves(config)).seconds
    longer = run("procap", overrides={"epochs": 100})
    worked = model.estimate(longer).seconds - model.start
    assert worked == pytest.approx(2 * (alone.seconds - model.start), rel=0.02)
    only = model.estimate(config, halves(config), train=False).seconds
    assert only == pytest.approx(model.estimate(config, halves(config)).seconds - alone.seconds + model.start)
    few = model.estimate(config, halves(config), train=False, limit=10).seconds
    assert few < 0.1 * only
    # Conditional prompts are encoded anew for every image.
    assert model.estimate(run("cocoop", "imagenet"), halves(run("cocoop", "imagenet")), train=False).seconds > (
        3 * model.estimate(run("coop", "imagenet"), halves(run("coop", "imagenet")), train=False).seconds
    )


def test_an_evaluation_is_warmed_up_by_two_batches_on_a_gpu_and_by_two_images_on_a_processor():
    small, large = (run("procap", overrides={"test_batch_size": size}) for size in (100, 200))
    target = [Target("oxford-flowers", "base")]

    # So slow that nothing waits for images.
    gpu, processor = CostModel(H200, reached=0.01), CostModel(MEASURED)

    def seconds(model: CostModel, config: RunConfig, limit: int, ranks: int = 1) -> float:
        return sum(model.estimate(config, target, train=False, limit=limit, ranks=ranks).evaluations)

    assert seconds(processor, small, 400) == seconds(processor, large, 400)
    each = (seconds(gpu, small, 400) - seconds(gpu, small, 300)) / 100
    assert seconds(gpu, large, 400) - seconds(gpu, small, 400) == pytest.approx(2 * 100 * each)
    # Two GPUs have 150 images each.
    assert seconds(gpu, large, 300, 2) - seconds(gpu, small, 300, 2) == pytest.approx(2 * 50 * each)


def test_thousands_of_runs_are_estimated_at_once_and_without_torch():
    """In calls of functions, which are as many on every machine: a thousand calls take less than a millisecond."""
    code = """
import sys
from benchmarks.cost.estimate import CostModel, here
from runner.config import RunConfig, Target
config = RunConfig.model_validate_json(sys.argv[1])
model, calls = CostModel(here(device="cpu")), 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
for number in range(30):
    if number == 10:
        sys.setprofile(count)
    model.estimate(config, [Target(config.dataset, "base"), Target(config.dataset, "novel")])
sys.setprofile(None)
assert "torch" not in sys.modules
print(calls)
"""
    answer = subprocess.run(
        [sys.executable, "-c", code, run("procap").model_dump_json()], capture_output=True, text=True, check=True
    )
    assert 20 < int(answer.stdout) < 20 * 300


def test_remaining_time_converges_on_hidden_factors_of_the_machine_and_the_methods():
    draw = random.Random(0)
    hidden = {"coop": 3.0, "maple": 0.5, "procap": 2.0}
    model = CostModel(H200)
    runs = [run(method, seed=seed) for seed in range(1, 21) for method in hidden]
    first = {config: model.estimate(config) for config in runs}
    truth = {config: hidden[config.method] * first[config].seconds * draw.lognormvariate(0, 0.05) for config in runs}

    def error(left: list[RunConfig]) -> float:
        return abs(sum(model.estimate(one).seconds for one in left) / sum(truth[one] for one in left) - 1)

    before = error(runs)
    for number, config in enumerate(runs[:30]):
        # What was estimated on the way is corrected already, which must not matter.
        model.learn(config, first[config] if number % 2 else model.estimate(config), truth[config])
    assert before > 0.4 and error(runs[30:]) < 0.05
    for method, factor in hidden.items():
        assert model.correction(run(method)) == pytest.approx(factor, rel=0.1)
    assert model.estimate(runs[-1]).basis == "measured here"


def test_one_run_that_hung_for_hours_spoils_nothing_and_a_new_method_takes_what_others_took():
    model = CostModel(H200)
    for seconds in (20.0, 21.0, 19.0, 36000.0, 20.5):
        model.learn(run("maple"), 10.0, seconds)
    assert model.correction(run("maple")) == pytest.approx(2.05, rel=0.05)
    assert model.correction(run("procap")) == pytest.approx(2.05, rel=0.05)
    model.learn(run("procap"), 10.0, 10.0)
    assert 1.0 < model.correction(run("procap")) < 1.5
    assert model.estimate(run("coop")).basis.startswith("assumed")


def test_finished_runs_on_the_disk_are_learned_from_where_this_machine_made_them(tmp_path: Path):
    machine = Machine(cpu_name(), "cpu")
    fresh = CostModel(machine)
    for seed in (1, 2, 3):
        config = plan_run(method="maple", dataset="digits", seed=seed)
        expected = fresh.estimate(config).seconds - fresh.start
        put_run(tmp_path, "maple", "digits", seed=seed, seconds=3 * expected + 2 * fresh.start)
        put_score(tmp_path, config, "digits:base:test", 3, 5, rate=1e9)
        _made_on(tmp_path, config, {"gpu": None, "cpu": {"name": machine.name}})
    # Whatever is broken or from elsewhere is passed over.
    elsewhere = put_run(tmp_path, "maple", "digits", seed=4, seconds=1e6)
    _made_on(tmp_path, elsewhere, {"gpu": "NVIDIA H200", "cpu": {"name": machine.name}})
    RunFolder(tmp_path / put_run(tmp_path, "maple", "digits", seed=5).path).train_file.write_text("{")
    learned = CostModel.of(tmp_path, machine)
    found = learned.estimate(config)
    assert found.basis == "measured here" and found.seconds == pytest.approx(3 * found.uncorrected, rel=0.02)
    assert CostModel.of(tmp_path, H200).correction(elsewhere) > 1000
    assert CostModel.of(tmp_path / "nowhere", machine).correction(config) == 1.0


def _made_on(results: Path, config: RunConfig, environment: dict[str, object]) -> None:
    file = RunFolder(results / config.path).train_file
    file.write_text(json.dumps(json.loads(file.read_text()) | {"environment": environment}))


def test_a_plan_costs_what_is_left_of_it(tmp_path: Path):
    place = RuntimeConfig(tmp_path / "data", tmp_path)
    model = CostModel(H200)
    config = run("maple")
    [new] = plan([config], place, halves)
    assert model.of_plan(new).seconds == pytest.approx(model.estimate(config, halves(config)).seconds, rel=0.01)
    put_run(tmp_path, "maple", "oxford-flowers", backbone="ViT-B-16", precision="bf16")
    [trained] = plan([config], place, halves)
    assert model.of_plan(trained).seconds == pytest.approx(
        model.estimate(config, halves(config), train=False).seconds, rel=0.01
    )
    for half in ("base", "novel"):
        file = put_score(tmp_path, config, f"oxford-flowers:{half}:test", 1, 2)
    [done] = plan([config], place, halves)
    assert (model.of_plan(done).seconds, model.of_plan(done).basis) == (0.0, "done")
    put_score(tmp_path, config, "oxford-flowers:novel:test", 1, 2, checkpoint="of another training")
    [stale] = plan([config], place, halves)
    assert [one.done for one in stale.targets] == [True, False] and file.is_file()


def test_a_run_that_goes_on_costs_what_is_left_after_its_saved_step(tmp_path: Path):
    place, model, config = RuntimeConfig(tmp_path / "data", tmp_path), CostModel(H200), run("maple")
    [new] = plan([config], place, halves)
    steps = 16 * 51 // config.recipe.batch_size * config.recipe.epochs
    state = RunFolder(tmp_path / config.path).state
    state.mkdir(parents=True)
    for step in (steps // 2, 3 * steps // 4):
        (state / f"step-{step:08d}-{'a' * 16}.safetensors").touch()
    [resumed] = plan([config], place, halves)
    assert resumed.state == "resume" and resumed.train_images == pytest.approx(new.train_images / 4, rel=0.02)
    assert model.of_plan(resumed).training < 0.4 * model.of_plan(new).training
    assert model.of_plan(resumed).evaluations == model.of_plan(new).evaluations


def test_this_machine_is_known_by_its_own_name():
    assert here(device="cpu") == Machine(cpu_name(), "cpu")
    assert here().name


def test_runs_begin_as_soon_as_there_is_room():
    assert makespan([], 2) == 0.0
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0
    assert makespan([1.0] * 10, 3) == 4.0
    assert math.isclose(makespan([5.0, 1.0], 8), 5.0)
