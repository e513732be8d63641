"""The cluster simulation against arithmetic: what can be computed by hand must come out of its events."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cost.estimate import makespan
from benchmarks.studies.cluster_simulation.__main__ import main
from benchmarks.studies.cluster_simulation.cluster import Conditions, Job, simulate
from benchmarks.studies.cluster_simulation.outlook import outlook
from benchmarks.studies.cluster_simulation.study import cases, configs, job, widened
from procap.errors import UsageError

CALM = Conditions(hand_out=0.0)
SECONDS = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=30)
PLACES = st.integers(1, 40)


@settings(deadline=None)
@given(runs=PLACES, gpus=PLACES, seconds=st.floats(1.0, 100.0), start=st.floats(0.0, 50.0))
def test_equal_runs_without_failures_come_in_waves(runs: int, gpus: int, seconds: float, start: float):
    found = simulate([Job(seconds, start=start)] * runs, gpus, CALM)
    assert found.makespan == pytest.approx(math.ceil(runs / gpus) * (seconds + start))
    assert (found.failures, found.struck, found.lost) == (0, 0, 0.0)
    assert found.utilisation == pytest.approx(runs * seconds / (gpus * found.makespan))
    assert found.starting == pytest.approx(runs * start)


@settings(deadline=None)
@given(seconds=SECONDS, gpus=PLACES)
def test_lists_end_when_list_scheduling_says_and_within_grahams_bound(seconds: list[float], gpus: int):
    assert simulate(seconds, gpus, CALM).makespan == pytest.approx(makespan(seconds, gpus))
    found = simulate(sorted(seconds, reverse=True), gpus, CALM)
    assert found.floor - 1e-6 <= found.makespan
    # Graham 1966: any list is within 2 - 1/m of the best, which is no shorter than the floor.
    assert simulate(seconds, gpus, CALM).makespan <= (2 - 1 / gpus) * found.floor + 1e-6


@given(seconds=st.lists(st.integers(1, 20), min_size=1, max_size=7), gpus=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_long_runs_first_are_within_four_thirds_of_the_best_there_is(seconds: list[int], gpus: int):
    best = _best(tuple(sorted(seconds, reverse=True)), (0,) * gpus)
    found = simulate(sorted(seconds, reverse=True), gpus, CALM).makespan
    assert best - 1e-9 <= found <= (4 / 3 - 1 / (3 * gpus)) * best + 1e-9


def _best(seconds: tuple[int, ...], loads: tuple[int, ...]) -> float:
    if not seconds:
        return max(loads)
    first, *rest = seconds
    tried = {tuple(sorted((*loads[:i], load + first, *loads[i + 1 :]))) for i, load in enumerate(loads)}
    return min(_best(tuple(rest), one) for one in tried)


def test_a_failing_gpu_takes_what_the_renewal_formula_expects():
    given = Conditions(per_node=1, mtbf_hours=1.0, checkpoint=600.0, notice=30.0, replace=300.0, hand_out=0.0)
    rate, segment, segments, start = 1 / 3600.0, 600.0, 12, 40.0
    # A segment from a cold start, begun anew after every failure and replacement; and one that goes on from the last.
    cold = (math.exp(rate * (start + segment)) - 1) * (1 / rate + given.replace)
    warm = (1 - math.exp(-rate * segment)) * (1 / rate + given.replace + cold)
    expected = cold + (segments - 1) * warm
    found = [simulate([Job(segment * segments, start=start)], 1, given, seed) for seed in range(1500)]
    times = [one.makespan for one in found]
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - expected) < 4 * error < 0.03 * expected
    for one in found:
        # Every second is work that counted, work that was lost, a start, or a wait for another node.
        waited = one.makespan - one.useful - one.lost - one.starting
        assert waited == pytest.approx(given.replace * one.failures, abs=1e-6)


@given(seconds=SECONDS, gpus=st.integers(1, 20), mtbf=st.floats(0.05, 2.0), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_failures_only_cost_and_lose_at_most_what_lies_between_checkpoints(
    seconds: list[float], gpus: int, mtbf: float, seed: int
):
    given = Conditions(per_node=4, mtbf_hours=mtbf, checkpoint=30.0, notice=10.0, replace=60.0)
    runs = [Job(one, start=5.0) for one in seconds]
    found = simulate(runs, gpus, given, seed)
    assert found.makespan >= found.floor - 1e-6
    assert found.useful == pytest.approx(sum(seconds))
    assert found.lost <= 30.0 * found.struck + 1e-6
    assert found.starting <= 5.0 * (len(seconds) + found.struck) + 1e-6
    assert found == simulate(runs, gpus, given, seed)
    assert found.useful + found.lost + found.starting <= found.gpus * found.makespan + 1e-6


def test_an_evaluation_that_was_struck_is_done_again_and_a_training_is_not():
    run = Job(100.0, (40.0, 20.0))
    assert run.kept(0.0, 99.0, 30.0) == 90.0
    assert run.kept(90.0, 9.0, 30.0) == 90.0
    assert run.kept(90.0, 30.0, 30.0) == 100.0
    assert run.kept(100.0, 39.0, 30.0) == 100.0
    assert run.kept(90.0, 55.0, 30.0) == 140.0
    assert run.kept(140.0, 19.0, 30.0) == 140.0


def test_groups_are_placed_whole_and_overtaken_while_they_wait():
    pair, one = Job(10.0, gpus=2), Job(10.0)
    assert simulate([pair, pair], 2, CALM).makespan == 20.0
    # The pair does not fit beside the first: the third run goes ahead of it.
    assert simulate([one, pair, one], 2, CALM).makespan == 20.0
    assert simulate([Job(10.0, gpus=4), Job(10.0, gpus=4)], 4, replace(CALM, per_node=2)).makespan == 20.0
    with pytest.raises(ValueError, match="4 GPUs on a cluster of 2"):
        simulate([Job(1.0, gpus=4)], 2)


@given(jobs=st.lists(st.tuples(st.floats(1, 500), st.integers(1, 6)), min_size=1, max_size=15), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_groups_on_failing_nodes_all_end_and_never_hold_more_than_there_is(jobs: list[tuple[float, int]], seed: int):
    runs = [Job(seconds, gpus=gpus, start=5.0) for seconds, gpus in jobs]
    # Replaced before the loss is noticed, and after it.
    for replaced in (5.0, 90.0):
        given = Conditions(per_node=2, mtbf_hours=0.1, notice=20.0, replace=replaced)
        found = simulate(runs, 6, given, seed)
        assert found.useful + found.lost + found.starting <= 6 * found.makespan + 1e-6
        assert found.makespan >= found.floor - 1e-6


def test_a_slow_driver_hands_runs_out_one_after_another():
    assert simulate([10.0] * 4, 4, replace(CALM, hand_out=1.0)).makespan == pytest.approx(14.0)


def test_an_outlook_has_a_line_per_size_until_there_are_as_many_gpus_as_runs():
    lines = outlook([Job(1800.0), Job(3600.0), Job(1800.0)], CALM, price=2.0)
    assert len(lines) == 3
    assert lines[0].split() == ["1", "GPU:", "2.0", "h,", "2.0", "GPU-hours,", "costs", "4.00,", "100%", "used"]
    assert lines[1].split()[:4] == ["2", "GPUs:", "60", "min,"]
    assert outlook([Job(20.0, (7.0,), start=1.0)], CALM, what="machine") == [
        "   1 machine: 28 s, 0.0078 machine-hours, 96% used"
    ]


def test_an_outlook_knows_groups_and_nodes_that_fail():
    groups = [Job(3600.0, gpus=4, start=20.0)] * 3
    assert [line.split()[0] for line in outlook(groups, CALM)] == ["4", "8", "16"]
    [calm, failing] = (
        outlook(groups, replace(CALM, mtbf_hours=mtbf), sizes=(4,), price=1.0)[0].split() for mtbf in (None, 0.5)
    )
    assert calm[2] == "3.0" and float(failing[2]) > 3.7
    assert float(failing[7].strip(",")) > 1.2 * float(calm[7].strip(","))


def test_nodes_that_fail_before_anything_is_saved_are_refused(capsys: pytest.CaptureFixture[str]):
    given = Conditions(per_node=4, mtbf_hours=0.1)
    assert simulate([Job(9000.0, (300.0,), start=20.0)], 4, given).failures > 0
    for endless in (Job(60.0, (350.0,), start=20.0), Job(60.0, (170.0,), gpus=8, start=20.0)):
        with pytest.raises(UsageError, match=r"fail every 0\.1 hours .* 0\.11 hours at least"):
            simulate([endless], 8, given)
    assert main(["--mtbf-hours", "0.01", "--seeds", "1", "--gpus", "8"]) == 2
    assert "fail every 0.01 hours" in capsys.readouterr().err


def test_two_gpus_for_the_longest_run_pay_only_where_steps_are_long():
    fast, slow = cases()
    runs = [config for config in configs() if config.dataset in ("imagenet", "eurosat") and config.seed == 1]
    assert all(one.gpus == 1 for one in widened(fast.model, runs, 512))
    # One image a step cannot be dealt out: CoCoOp stays, and is what all wait for.
    assert all(one.gpus == 1 for one in widened(slow.model, runs, 512))
    rest = [config for config in runs if config.method != "cocoop"]
    wide = widened(slow.model, rest, 512)
    assert max(one.gpus for one in wide) > 1
    assert max(one.seconds for one in wide) < 0.5 * max(job(slow.model, config).seconds for config in rest)


def test_the_study_says_what_is_measured_and_what_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--gpus", "8,1", "--seeds", "2", "--mtbf-hours", "100", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for words in ("NO GPU WAS MEASURED", "ASSUMED", "165 runs", "not a measurement", "no offer"):
        assert words in told
    assert "Table 1 on 1 to 8 GPUs" in told
    assert "    python -m benchmarks.studies.cluster_simulation --gpus 8,1 --mtbf-hours 100 --seeds 2\n" in told
    report = json.loads((tmp_path / "cluster.json").read_text())
    for case in report["cases"]:
        one, eight = case["sizes"]
        assert (one["gpus"], eight["gpus"]) == (1, 8)
        assert 6 < one["seconds"] / eight["seconds"] < 8.5
        assert one["floor"] == pytest.approx(3600 * case["gpu_hours"])
    assert (tmp_path / "cluster.md").read_text() in told and (tmp_path / "cluster.png").stat().st_size > 10_000


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["--gpus", "none"]) == 2
    assert capsys.readouterr().err.strip() == "procap: --gpus none: numbers with commas between, as in 1,8,64"
    assert main(["--gpus", "0,4"]) == 2
    capsys.readouterr()
    for flag, value in (("--mtbf-hours", "inf"), ("--replace", "nan"), ("--start", "inf"), ("--price", "-1")):
        assert main([flag, value]) == 2
        assert capsys.readouterr().err == f"procap: {flag} {value}: a number from 0 to 1,000,000,000 is needed\n"
