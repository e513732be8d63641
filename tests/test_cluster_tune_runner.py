"""Runs on real Ray nodes: equal to local ones, placed as a whole or not at all, resumed after losses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Nodes

from cluster.distributed_trial import Rank, rank_environments
from cluster.executor import RunExecutor
from cluster.launcher import Launcher, connect, launch
from cluster.paths import StoragePaths
from cluster.ray_cluster import Capacity, Resources, connected
from cluster.run import Halving, RunSpec, TrialReport
from cluster.tune_runner import StallDetector, explain_failure, run_trials
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, plan_run
from runner.results import RunFolder
from shards.errors import DataError

TARGETS = ("digits:base", "digits:novel")


class Recorder:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.reports: list[tuple[int, TrialReport]] = []
        self.ends: dict[int, TrialReport] = {}

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        self.began.append(config["number"])

    def reported(self, trial: str, config: Mapping[str, Any], report: TrialReport) -> None:
        self.reports.append((config["number"], report))

    def ended(self, trial: str, config: Mapping[str, Any], report: TrialReport) -> None:
        self.ends[config["number"]] = report


def run(method: str = "coop", seed: int = 1, epochs: int = 1, **more: Any) -> RunConfig:
    changes = {"epochs": epochs, "batch_size": 16, "warmup_epochs": 0, "lr": 0.01}
    return plan_run(method=method, dataset="digits", seed=seed, shots=4, recipe="procap", overrides=changes, **more)


def spec(config: RunConfig, targets: Sequence[str] = TARGETS) -> RunSpec:
    return RunSpec(config=config, targets=tuple(targets))


@pytest.fixture(scope="module")
def data(few_digits: Path) -> Path:
    return few_digits


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with Nodes(tmp_path_factory.mktemp("nodes")) as cluster:
        cluster.head(cpus=1)
        cluster.add(cpus=2)
        # One connection for all tests: `connect` uses it.
        with connected(cluster.address):
            yield cluster


def make_paths(data: Path, results: Path, **more: Any) -> StoragePaths:
    runtime = RuntimeConfig(data=data, results=results, device="cpu", tracking_uri="off", quiet=True, **more)
    return StoragePaths(str(data), str(results), runtime)


def facts(results: Path, config: RunConfig) -> tuple[str, list[tuple[str, int, int]]]:
    """Learned weights and counts of a finished run."""
    folder = RunFolder(results / config.path)
    training = folder.train()
    assert training is not None
    return training.checkpoint_sha256, [(e.target, e.correct, e.total) for e in folder.evaluations()]


def stray(results: Path) -> list[Path]:
    return [path for path in results.rglob("*") if path.name.endswith(".tmp") or path.name == "state"]


LONG = run("maple", epochs=2)
BROKEN = run(seed=3)
RUNS = [LONG, run("zeroshot"), run("coop")]


@pytest.fixture(scope="module")
def executed(nodes: Nodes, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """Three runs and a broken one, two at once; the process of the first is killed after its first checkpoint."""
    from ray.tune.search import grid_search
    from ray.tune.search.basic_variant import BasicVariantGenerator

    results, saved = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("saved") / "folder"
    recorder, done = Recorder(), threading.Event()
    tasks = [*map(spec, RUNS), spec(BROKEN, ["shapes-sketch:all:train"])]

    def waits_once(config: Mapping[str, Any], runtime: RuntimeConfig) -> list[RunSpec]:
        """On the node: the first process of the first run stops after its first checkpoint, until it is killed."""
        from runner.checkpointer import Checkpointer

        save = Checkpointer.save

        def save_and_wait(checkpointer: Checkpointer, *status: Any) -> None:
            save(checkpointer, *status)
            saved.write_text(os.getcwd())
            time.sleep(600)

        if config["number"] == 0 and not saved.exists():
            Checkpointer.save = save_and_wait  # type: ignore[method-assign]
        return [tasks[config["number"]]]

    def kill() -> None:
        """Kill the process of the first run after its first checkpoint."""
        while not saved.exists():
            assert not done.wait(0.02), "no state was saved before the end"
        holder = re.search(r"pid (\d+)", (results / LONG.path / ".lock").read_text())
        assert holder, "no process to kill"
        os.kill(int(holder[1]), signal.SIGKILL)

    paths = make_paths(data, results, checkpoint_seconds=0.0)
    space, generator = {"number": grid_search(list(range(len(tasks))))}, BasicVariantGenerator(max_concurrent=2)
    with connect(Launcher(kind="ray", address=nodes.address), paths) as found, ThreadPoolExecutor(1) as killer:
        assert found == Capacity(Resources(1, 1.0, 0.0), 3, ray=True)
        killed = killer.submit(kill)
        try:
            run_trials(space, waits_once, paths, found, recorder, search_alg=generator)
        finally:
            done.set()
    killed.result()
    # Runs execute in the folder of their node: relative names, as in $PROCAP_HOME, keep their meaning.
    assert saved.read_text() == os.getcwd()
    return results, recorder


def test_runs_on_nodes_have_the_bits_of_local_ones_also_after_a_killed_process(
    executed: tuple[Path, Recorder], data: Path, tmp_path: Path
) -> None:
    results, recorder = executed
    here = Recorder()
    launch(list(map(spec, RUNS)), make_paths(data, tmp_path), Capacity(Resources(), 1, ray=False), here)
    assert all(report.state == "done" for report in here.ends.values()), here.ends
    assert sorted(recorder.began) == [0, 0, 1, 2, 3]
    assert [facts(results, one) for one in RUNS] == [facts(tmp_path, one) for one in RUNS]
    training = RunFolder(results / LONG.path).train()
    assert training is not None and training.resumed == 1


def test_a_run_that_fails_stops_no_other(executed: tuple[Path, Recorder]) -> None:
    results, recorder = executed
    assert recorder.ends[3].state == "failed" and "train" in recorder.ends[3].why
    assert "Traceback" not in recorder.ends[3].why
    assert [recorder.ends[number].state for number in range(3)] == ["done"] * 3
    assert not stray(results)


@pytest.mark.slow
def test_groups_are_placed_as_a_whole_or_not_at_all(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    """Two runs of two processes each at once, on three CPUs: half-placed ones would wait for ever."""
    runs = [run(seed=seed) for seed in (1, 2)]
    recorder = Recorder()
    paths = make_paths(data, tmp_path, timeout=60.0)
    with connect(Launcher(kind="ray", address=nodes.address, processes=2), paths) as found:
        assert found.max_concurrent == 1
        launch([spec(one, targets=()) for one in runs], paths, replace(found, max_concurrent=2), recorder)
    assert {number: report.state for number, report in recorder.ends.items()} == {0: "done", 1: "done"}
    for one in runs:
        training = RunFolder(tmp_path / one.path).train()
        assert training is not None and len(training.ranks) == 2


@pytest.mark.slow
def test_a_group_waits_for_a_run_that_another_process_holds(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    one, recorder = run(), Recorder()
    paths = make_paths(data, tmp_path, timeout=60.0)
    with connect(Launcher(kind="ray", address=nodes.address, processes=2), paths) as found:
        with RunFolder(tmp_path / one.path).locked():
            group = threading.Thread(target=launch, args=([spec(one)], paths, found, recorder))
            group.start()
            while not any(report.state == "waiting" for _, report in recorder.reports):
                assert group.is_alive(), recorder.ends
                time.sleep(0.1)
        group.join()
    assert f"pid {os.getpid()} on" in next(report.why for _, report in recorder.reports if report.state == "waiting")
    assert recorder.began == [0] and recorder.ends[0].state == "done"


def test_test_images_that_are_not_there_are_found_before_the_training(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "digits", tmp_path / "data" / "digits")
    shutil.rmtree(tmp_path / "data" / "digits" / "test")
    place = RuntimeConfig(tmp_path / "data", tmp_path / "results", device="cpu", tracking_uri="off", quiet=True)
    with pytest.raises(DataError, match=r"'digits' test: .*0\.tar is missing"):
        RunExecutor([spec(run())], place, lambda report: None).execute()
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_placed_is_refused_before_anything_waits(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    for launcher, message in (
        (Launcher(kind="ray", address=nodes.address, processes=4), "hold 3 such processes"),
        (Launcher(kind="ray", address=nodes.address, gpus=1), "hold 0 such processes"),
        (Launcher(kind="ray", address=nodes.address, cpus=3), "hold 0 such processes"),
        (Launcher(kind="ray", address=nodes.address, cpus=0), "a run has to ask for something"),
        (Launcher(kind="ray", address=nodes.address, cpus=0, gpus=0), "a run has to ask for something"),
    ):
        with pytest.raises(UsageError, match=message), connect(launcher, make_paths(data, tmp_path)):
            pass


def test_resources_on_nodes_that_are_not_up_yet_have_to_be_given(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    """Derived from nodes without GPUs they would be none, and all runs of a later node would share its first GPU."""
    asked, paths = Launcher(kind="ray", address=nodes.address, autoscale=True), make_paths(data, tmp_path)
    anywhere = replace(paths, runtime=replace(paths.runtime, device="auto"))
    with pytest.raises(UsageError, match=r"add --gpus 1 or --gpus 0$"), connect(asked, anywhere):
        pass
    for launcher, where, gpus in ((replace(asked, gpus=1), anywhere, 1), (replace(asked, gpus=0), anywhere, 0),
                               (asked, paths, 0)):  # fmt: skip
        with connect(launcher, where) as found:
            assert found.resources.gpus == gpus and found.autoscale


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


def test_file_names_are_absolute_for_runs_in_another_folder(data: Path, tmp_path: Path) -> None:
    runtime = replace(make_paths(data, tmp_path).runtime, engine="deepspeed", deepspeed_json=Path("ds.json"))
    shared = StoragePaths.with_absolute_paths("data", "results", runtime)
    assert shared.runtime.deepspeed_json == Path("ds.json").absolute()
    assert (shared.data, shared.results) == (os.path.abspath("data"), os.path.abspath("results"))


def test_runs_wait_for_lost_nodes_for_a_limited_time(
    nodes: Nodes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.tune_runner.STALL_SECONDS", 0.0)
    paths, recorder, share = make_paths(data, tmp_path), Recorder(), Resources(1, 3.0)
    with connect(Launcher(kind="ray", address=nodes.address), paths):
        with pytest.raises(
            UserError, match=r"3 CPUs does not fit on the nodes of the cluster now: 2, .* repeat the command to go on"
        ):
            launch([spec(run())], paths, Capacity(share, 1, ray=True), recorder)
        autoscaled = StallDetector(share, autoscale=True)
        for _ in range(3):
            autoscaled.check([])
    assert not recorder.began
    assert [record.message.partition(":")[0] for record in caplog.records] == ["waiting"] * 2


def test_seeds_in_step_report_their_mean_of_every_epoch(data: Path, tmp_path: Path) -> None:
    """The last one with the final report, when all runs are finished."""
    watched = ("digits:base:val",)
    runs = [RunSpec(config=run(seed=seed, epochs=3), targets=watched) for seed in (1, 2)]
    reports: list[TrialReport] = []
    runtime = make_paths(data, tmp_path).local_runtime()
    reports.append(RunExecutor(runs, runtime, reports.append, halving=Halving(1, 2)).execute())
    assert [report.epoch for report in reports] == [1, 2, 3] and reports[-1].state == "done"
    histories = [RunFolder(tmp_path / one.path).validation() for one in runs]
    for report in reports:
        counts = [count for history in histories for count in history if count.epoch == report.epoch - 1]
        assert report.score == pytest.approx(sum(100 * c.correct / c.total for c in counts) / 2)


def test_the_port_of_a_process_group_stays_reserved(nodes: Nodes) -> None:
    rank = Rank()
    _, _, port = rank.locate()
    with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))


@pytest.mark.slow
def test_a_run_that_always_loses_its_process_is_started_five_times(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    recorder, paths = Recorder(), make_paths(data, tmp_path)
    with connect(Launcher(kind="ray", address=nodes.address), paths) as found:
        run_trials({"number": 7}, lambda config, runtime: os._exit(1), paths, found, recorder)
    assert recorder.began == [7] * 5
    assert recorder.ends[7].state == "failed"
    assert "given up after 5 attempts: The actor is dead because" in recorder.ends[7].why


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


def test_a_missing_device_is_refused_locally_and_left_to_the_nodes_of_a_cluster(
    nodes: Nodes, data: Path, tmp_path: Path
) -> None:
    """A numbered GPU is refused on a cluster: a process of Ray sees only its own."""
    paths = make_paths(data, tmp_path)
    paths = replace(paths, runtime=replace(paths.runtime, device="cuda:99"))
    for at_once in (1, 2):
        with (
            pytest.raises(UsageError, match="device 'cuda:99' does not exist"),
            connect(Launcher(max_concurrent=at_once), paths),
        ):
            pass
    cluster = Launcher(kind="ray", address=nodes.address)
    with pytest.raises(UsageError, match=r"--device cuda:99: .*: use --device cuda$"), connect(cluster, paths):
        pass
    with connect(cluster, replace(paths, runtime=replace(paths.runtime, device="cuda"))) as found:
        assert found.max_concurrent == 3
