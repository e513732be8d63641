"""Jobs on real Ray nodes: equal to local ones, placed as groups or not at all, carried on after losses."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Nodes

from cluster.fleet import Fleet, Room, do_all, gathered
from cluster.group import announcements
from cluster.job import Job, Piece, Report
from cluster.places import Places
from cluster.pool import carry_out
from cluster.site import Node, Share, fair_share, room
from cluster.slots import slots_here
from procap.errors import UsageError
from runner.config import RunConfig, Workplace, plan_run
from runner.results import RunFolder

TARGETS = ("digits:base", "digits:novel")


class Heard:
    """Everything that a listener is told."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.reports: list[tuple[int, Report]] = []
        self.ends: dict[int, Report] = {}

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        self.began.append(config["number"])

    def reported(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        self.reports.append((config["number"], report))

    def ended(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        self.ends[config["number"]] = report


def run(method: str = "coop", seed: int = 1, epochs: int = 1, **more: Any) -> RunConfig:
    changes = {"epochs": epochs, "batch_size": 16, "warmup_epochs": 0, "lr": 0.01}
    return plan_run(method=method, dataset="digits", seed=seed, shots=4, recipe="procap", overrides=changes, **more)


def job(config: RunConfig, targets: Sequence[str] = TARGETS) -> Job:
    return Job(pieces=(Piece(config=config, targets=tuple(targets)),))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shards.known import known
    from shards.pack import pack_source
    from shards.records import source_of

    root = tmp_path_factory.mktemp("data")
    pack_source(source_of(known("digits", root)), root)
    return root


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with Nodes(tmp_path_factory.mktemp("nodes")) as cluster:
        cluster.head(cpus=1)
        cluster.add(cpus=1)
        cluster.add(cpus=1)
        yield cluster


def places(data: Path, results: Path, **more: Any) -> Places:
    rest = Workplace(data=data, results=results, device="cpu", tracking_uri="off", quiet=True, **more)
    return Places(str(data), str(results), rest)


def facts(results: Path, config: RunConfig) -> tuple[str, list[tuple[str, int, int]]]:
    """Learned weights and counts of a finished run."""
    folder = RunFolder(results / config.path)
    training = folder.train()
    assert training is not None
    return training.checkpoint_sha256, [(e.target, e.correct, e.total) for e in folder.evaluations()]


def stray(results: Path) -> list[Path]:
    return [path for path in results.rglob("*") if path.name.endswith(".tmp") or path.name == "state"]


@pytest.fixture(scope="module")
def here(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunConfig]]:
    """Four runs done one after the other in this process: what every other way has to equal."""
    results = tmp_path_factory.mktemp("here")
    runs = [run(method, seed) for method in ("zeroshot", "coop") for seed in (1, 2)]
    heard = Heard()
    do_all([job(one) for one in runs], places(data, results), Room(Share(), 1, ray=False), heard)
    assert all(report.state == "done" for report in heard.ends.values()), heard.ends
    return results, runs


def test_runs_on_three_nodes_equal_local_ones(
    nodes: Nodes, data: Path, here: tuple[Path, list[RunConfig]], tmp_path: Path
) -> None:
    reference, runs = here
    heard = Heard()
    there = places(data, tmp_path)
    with gathered(Fleet(on="ray", address=nodes.address), there) as found:
        assert found == Room(Share(1, 1.0, 0.0), 3, ray=True)
        do_all([job(one) for one in runs], there, found, heard)
        # Typed again, nothing is done again.
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
        do_all([job(one) for one in runs], there, found, Heard())
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    assert sorted(heard.began) == list(range(4))
    assert [facts(tmp_path, one) for one in runs] == [facts(reference, one) for one in runs]
    assert not stray(tmp_path)


def test_groups_never_hold_half_of_each_others_room(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    """Two runs of two processes each at once, on three CPUs: half-placed ones would wait for ever."""
    runs = [run(seed=seed) for seed in (1, 2)]
    heard = Heard()
    there = places(data, tmp_path, timeout=60.0)
    with gathered(Fleet(on="ray", address=nodes.address, processes=2), there) as found:
        assert found.at_once == 1
        carry_out([job(one) for one in runs], there, found.share, heard, at_once=2)
    assert {number: report.state for number, report in heard.ends.items()} == {0: "done", 1: "done"}
    for one in runs:
        training = RunFolder(tmp_path / one.path).train()
        assert training is not None and len(training.ranks) == 2


@pytest.mark.slow
def test_a_group_waits_for_a_run_that_somebody_else_holds(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    one, heard = run(), Heard()
    there = places(data, tmp_path, timeout=60.0)
    with gathered(Fleet(on="ray", address=nodes.address, processes=2), there) as found:
        with RunFolder(tmp_path / one.path).locked():
            group = threading.Thread(target=do_all, args=([job(one)], there, found, heard))
            group.start()
            while not any(report.state == "waiting" for _, report in heard.reports):
                assert group.is_alive(), heard.ends
                time.sleep(0.1)
        group.join()
    assert f"pid {os.getpid()} on" in next(report.why for _, report in heard.reports if report.state == "waiting")
    assert heard.began == [0] and heard.ends[0].state == "done"


def test_a_run_that_fails_stops_no_other(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    broken, fine = run(seed=1), run(seed=2)
    heard = Heard()
    there = places(data, tmp_path)
    with gathered(Fleet(on="ray", address=nodes.address), there) as found:
        do_all([job(broken, ["shapes-sketch:all:train"]), job(fine)], there, found, heard)
    assert heard.ends[0].state == "failed" and "train" in heard.ends[0].why
    assert "Traceback" not in heard.ends[0].why
    assert heard.ends[1].state == "done"


def test_a_run_whose_process_is_killed_goes_on_to_the_same_bits(
    nodes: Nodes, data: Path, here: tuple[Path, list[RunConfig]], tmp_path: Path
) -> None:
    long = run("maple", epochs=6)
    reference = tmp_path / "reference"
    there = places(data, tmp_path / "there", checkpoint_seconds=0.2)
    killed: list[int] = []

    def kill() -> None:
        folder = tmp_path / "there" / long.path
        while not killed:
            if list(folder.glob("state/step-*")) and not (folder / "train.json").exists():
                holder = re.search(r"pid (\d+)", (folder / ".lock").read_text())
                assert holder is not None
                os.kill(int(holder[1]), 9)
                killed.append(int(holder[1]))
            time.sleep(0.02)

    killer = threading.Thread(target=kill, daemon=True)
    heard = Heard()
    with gathered(Fleet(on="ray", address=nodes.address), there) as found:
        killer.start()
        do_all([job(long)], there, found, heard)
    assert killed and heard.began == [0, 0] and heard.ends[0].state == "done"
    do_all([job(long)], places(data, reference), Room(Share(), 1, ray=False), Heard())
    assert facts(tmp_path / "there", long) == facts(reference, long)
    training = RunFolder(tmp_path / "there" / long.path).train()
    assert training is not None and training.resumed == 1


def test_what_cannot_be_placed_is_refused_before_anything_waits(nodes: Nodes, data: Path, tmp_path: Path) -> None:
    for fleet, said in (
        (Fleet(on="ray", address=nodes.address, processes=4), "hold 3 such processes"),
        (Fleet(on="ray", address=nodes.address, gpus=1), "hold 0 such processes"),
        (Fleet(on="ray", address=nodes.address, cpus=2), "hold 0 such processes"),
    ):
        with pytest.raises(UsageError, match=said), gathered(fleet, places(data, tmp_path)):
            pass


def test_seeds_in_step_report_their_mean_of_every_epoch(data: Path, tmp_path: Path) -> None:
    watched = ("digits:base:val",)
    pieces = tuple(Piece(config=run(seed=seed, epochs=3), targets=watched) for seed in (1, 2))
    heard = Heard()
    together = Job(pieces=pieces, rungs=(1, 2), watched=(watched, watched))
    do_all([together], places(data, tmp_path), Room(Share(), 1, ray=False), heard)
    assert [report.epoch for _, report in heard.reports] == [1, 2, 3]
    histories = [RunFolder(tmp_path / piece.config.path).validation() for piece in pieces]
    for _, report in heard.reports:
        counts = [count for history in histories for count in history if count.epoch == report.epoch - 1]
        assert report.figures["score"] == pytest.approx(sum(100 * c.correct / c.total for c in counts) / 2)
    assert heard.ends[0].figures == heard.reports[-1][1].figures


def test_ranks_of_one_node_follow_each_other() -> None:
    found = [("b", "10.0.0.2", 1), ("a", "10.0.0.1", 2), ("b", "10.0.0.2", 3), ("a", "10.0.0.1", 4)]
    said = announcements(found)
    assert [int(one["RANK"]) for one in said] == [0, 2, 1, 3]
    assert [int(one["LOCAL_RANK"]) for one in said] == [0, 0, 1, 1]
    assert {one["LOCAL_WORLD_SIZE"] for one in said} == {"2"} and {one["WORLD_SIZE"] for one in said} == {"4"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in said} == {("10.0.0.2", "1")}


def test_a_run_gets_a_gpu_and_its_part_of_the_cpus() -> None:
    machines = [Node("a", "10.0.0.1", "1", 96, 8, "H200"), Node("b", "10.0.0.2", "2", 32, 4, "H200")]
    assert fair_share(machines) == Share(1, 8.0, 1.0)
    assert room(machines, Share(1, 8.0, 1.0)) == 12
    assert room(machines, Share(8, 8.0, 1.0)) == 1
    assert room(machines, fair_share(machines, gpus=0.5)) == 24
    assert fair_share([Node("c", "10.0.0.3", "3", 16, 0)]) == Share(1, 1.0, 0.0)


def test_runs_of_many_processes_have_the_room_of_many() -> None:
    cores = os.cpu_count() or 1
    assert slots_here(device="cpu", processes=cores).at_once == 1
    assert slots_here(at_once=3, device="cpu", processes=cores).at_once == 3


def test_a_report_survives_ray_tune() -> None:
    report = Report(state="done", epoch=3, of=5, why="", figures={"score": 71.5})
    assert Report.of_flat(json.loads(json.dumps({**report.flat(), "training_iteration": 9}))) == report
