"""Trials without Ray: how runs of a trial execute, and what the driver reports and sends to its processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import make_runtime

from cluster.distributed_trial import rank_environments
from cluster.executor import RunExecutor
from cluster.paths import StoragePaths
from cluster.ray_cluster import Capacity, Resources
from cluster.run import Halving, RunSpec, TrialReport
from cluster.tune_runner import explain_failure
from runner.config import RunConfig, plan_run
from runner.run_folders import RunFolder
from shards.errors import DataError


def run(method: str = "coop", seed: int = 1, epochs: int = 1, **more: Any) -> RunConfig:
    changes = {"epochs": epochs, "batch_size": 16, "warmup_epochs": 0, "lr": 0.01}
    return plan_run(method=method, dataset="digits", seed=seed, shots=4, recipe="procap", overrides=changes, **more)


def spec(config: RunConfig, targets: Sequence[str] = ("digits:base", "digits:novel")) -> RunSpec:
    return RunSpec(config=config, targets=tuple(targets))


def make_paths(data: Path, results: Path, **more: Any) -> StoragePaths:
    runtime = make_runtime(data, results, **more)
    return StoragePaths(str(data), str(results), runtime)


def test_test_images_that_are_not_there_are_found_before_the_training(few_digits: Path, tmp_path: Path) -> None:
    shutil.copytree(few_digits / "digits", tmp_path / "data" / "digits")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    place = make_runtime(tmp_path / "data", tmp_path / "results")
    with pytest.raises(DataError, match=r"'digits' test: .*0\.tar is missing"):
        RunExecutor([spec(run())], place, lambda report: None).execute()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("device", "gpus", "ray", "expected"),
    [
        ("auto", 0, True, "cpu"),
        ("auto", 0, False, "cpu"),
        ("auto", 0.5, True, "auto"),
        ("auto", 1, False, "auto"),
        ("cuda:1", 1, True, "cuda"),
        ("cuda:1", 1, False, "cuda:1"),
        ("cuda", 0, True, "cuda"),
    ],
)
def test_runs_without_a_gpu_use_the_cpu_and_ray_numbers_the_gpus(
    device: str, gpus: float, ray: bool, expected: str
) -> None:
    """Ray shows a process one GPU, whatever its number on the machine."""
    assert Capacity(Resources(1, 1.0, gpus), 1, ray=ray).device(device) == expected


def test_file_names_are_absolute_for_runs_in_another_folder(few_digits: Path, tmp_path: Path) -> None:
    runtime = replace(make_paths(few_digits, tmp_path).runtime, engine="deepspeed", deepspeed_json=Path("ds.json"))
    shared = StoragePaths.with_absolute_paths("data", "results", runtime)
    assert shared.runtime.deepspeed_json == Path("ds.json").absolute()
    assert (shared.data, shared.results) == (os.path.abspath("data"), os.path.abspath("results"))


def test_seeds_in_step_report_their_mean_of_every_epoch(few_digits: Path, tmp_path: Path) -> None:
    """The last one with the final report, when all runs are finished."""
    watched = ("digits:base:val",)
    runs = [RunSpec(config=run(seed=seed, epochs=3), targets=watched) for seed in (1, 2)]
    reports: list[TrialReport] = []
    runtime = make_paths(few_digits, tmp_path).local_runtime()
    reports.append(RunExecutor(runs, runtime, reports.append, halving=Halving(1, 2)).execute())
    assert [report.epoch for report in reports] == [1, 2, 3] and reports[-1].state == "done"
    histories = [RunFolder(tmp_path / one.path).validation() for one in runs]
    for report in reports:
        counts = [count for history in histories for count in history if count.epoch == report.epoch - 1]
        assert report.score == pytest.approx(sum(100 * c.correct / c.total for c in counts) / 2)


DIED = """The actor died unexpectedly before finishing this task.
\tpid: 26803
The actor is dead because its worker process has died."""
RAISED = """\x1b[36mray::ImplicitFunc.train()\x1b[39m (pid=1, ip=10.0.0.2, repr=trial)
  File "/site-packages/ray/tune/trainable/trainable.py", line 329, in train
    raise skipped from exception_cause(skipped)
"""


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ([RAISED + "KeyError: 'a'", DIED], "attempts: The actor is dead because its worker process has died;"),
        ([DIED, RAISED + "KeyError: 'a'"], "attempts: KeyError: 'a';"),
        ([RAISED + "KeyError: " + "long " * 99], "attempts: KeyError: long long"),
        ([], "attempts: it was lost;"),
    ],
)
def test_the_last_error_of_a_run_is_the_reason_that_is_reported(errors: list[str], reason: str) -> None:
    """As Ray Tune writes the errors of its attempts down."""
    text = "".join(f"Failure # {at} (occurred at 2026-01-01_00-00-0{at})\n{error}\n" for at, error in enumerate(errors))
    why = explain_failure(text)
    assert reason in why and len(why) < 400 and "\n" not in why


def test_ranks_of_one_node_follow_each_other() -> None:
    found = [("b", "10.0.0.2", 1), ("a", "10.0.0.1", 2), ("b", "10.0.0.2", 3), ("a", "10.0.0.1", 4)]
    environments = rank_environments(found)
    assert [int(one["RANK"]) for one in environments] == [0, 2, 1, 3]
    assert [int(one["LOCAL_RANK"]) for one in environments] == [0, 0, 1, 1]
    assert {one["LOCAL_WORLD_SIZE"] for one in environments} == {"2"} and {
        one["WORLD_SIZE"] for one in environments
    } == {"4"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in environments} == {("10.0.0.2", "1")}
