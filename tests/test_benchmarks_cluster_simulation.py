"""The cluster simulation against arithmetic: what can be computed by hand must come out of its events."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.cluster_simulation import Conditions, SimulatedRun, format_report, main, simulate
from benchmarks.suites.cost import makespan
from procap.errors import UsageError

RECORD = Path(__file__).parents[1] / "docs" / "results" / "cluster.json"
CALM = Conditions(mtbf_hours=None)
SECONDS = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=30)
GPUS = st.integers(1, 40)


@settings(deadline=None)
@given(seconds=SECONDS, gpus=GPUS, start=st.floats(0.0, 50.0))
def test_without_failures_runs_end_as_greedy_packing_does(seconds: list[float], gpus: int, start: float):
    found = simulate([SimulatedRun(one, start=start) for one in seconds], gpus, CALM)
    assert found.makespan == pytest.approx(makespan([one + start for one in seconds], gpus))
    assert (found.failures, found.interrupted, found.lost) == (0, 0, 0.0)
    assert found.utilization == pytest.approx(sum(seconds) / (gpus * found.makespan))
    # Graham 1966: any list is within 2 - 1/m of the best, which is no shorter than the floor.
    assert found.floor - 1e-6 <= found.makespan <= (2 - 1 / gpus) * found.floor + 1e-6


def test_a_failing_gpu_takes_what_the_renewal_formula_expects():
    conditions = Conditions(per_node=1, mtbf_hours=1.0, checkpoint=600.0, notice=30.0, replace=300.0)
    rate, segment, segments, start = 1 / 3600.0, 600.0, 12, 40.0
    # A segment from a cold start, begun again after every failure and replacement; and one that goes on from the last.
    cold = (math.exp(rate * (start + segment)) - 1) * (1 / rate + conditions.replace)
    warm = (1 - math.exp(-rate * segment)) * (1 / rate + conditions.replace + cold)
    expected = cold + (segments - 1) * warm
    found = [simulate([SimulatedRun(segment * segments, start=start)], 1, conditions, seed) for seed in range(1000)]
    times = [one.makespan for one in found]
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert abs(statistics.fmean(times) - expected) < 4 * error < 0.04 * expected
    for one in found:
        # Every second is work that counted, work that was lost, a start, or a wait for another node.
        waited = one.makespan - one.useful - one.lost - one.starting
        assert waited == pytest.approx(conditions.replace * one.failures, abs=1e-6)


@given(seconds=SECONDS, gpus=st.integers(1, 20), mtbf=st.floats(0.05, 2.0), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_failures_lose_at_most_what_lies_between_checkpoints(seconds: list[float], gpus: int, mtbf: float, seed: int):
    conditions = Conditions(per_node=4, mtbf_hours=mtbf, checkpoint=30.0, notice=10.0, replace=60.0)
    found = simulate([SimulatedRun(one, start=5.0) for one in seconds], gpus, conditions, seed)
    assert found.makespan >= found.floor - 1e-6
    assert found.useful == pytest.approx(sum(seconds))
    assert found.lost <= 30.0 * found.interrupted + 1e-6
    assert found.starting <= 5.0 * (len(seconds) + found.interrupted) + 1e-6


def test_nodes_that_fail_before_anything_is_saved_are_refused():
    conditions = Conditions(per_node=4, mtbf_hours=0.1)
    assert simulate([SimulatedRun(9000.0, (300.0,), start=20.0)], 4, conditions).failures > 0
    with pytest.raises(UsageError, match=r"fail every 0\.1 hours .* 0\.11 hours at least"):
        simulate([SimulatedRun(60.0, (350.0,), start=20.0)], 8, conditions)


def test_the_command_writes_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--gpus", "8,1", "--seeds", "2", "--mtbf-hours", "100", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "NO GPU WAS MEASURED" in text and "165 runs" in text and "Table 1 on 1 to 8 GPUs" in text
    report = json.loads((tmp_path / "cluster.json").read_text())
    for case in report["cases"]:
        one, eight = case["sizes"]
        assert 6 < one["seconds"] / eight["seconds"] < 8.5
        assert one["floor"] == pytest.approx(3600 * case["gpu_hours"])
    assert (tmp_path / "cluster.md").read_text() in text


def test_the_page_shows_the_record():
    assert RECORD.with_suffix(".md").read_text() == format_report(json.loads(RECORD.read_text()))


@pytest.mark.parametrize(("flag", "value"), [("--gpus", "none"), ("--gpus", "0,4"), ("--replace", "nan")])
def test_wrong_flags_are_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]):
    assert main([flag, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"procap: {flag}") and error.count("\n") == 1
