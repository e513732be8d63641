"""Resources of a run, and the checks of every node before the first run."""

import logging
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from nodes import Nodes
from object_server import object_server
from ports import free_port
from toy_shards import toy_source

from cluster import preflight
from cluster.launcher import RUN_BYTES, Launcher, local_capacity
from cluster.preflight import TRAINING_SPLITS, Requirements, check_node, check_nodes, read_digest
from cluster.ray_cluster import Node, Resources, count_runs, default_resources, ray_connection
from cluster.trial import StoragePaths
from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from shards.pack import pack_source


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    pack_source(toy_source(per_shard=5), root)
    return root


@pytest.fixture
def requirements(data, tmp_path, monkeypatch) -> Requirements:
    """What runs need, with the mark of the driver in place."""
    monkeypatch.setattr(preflight, "VISIBLE_SECONDS", 0.0)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mark").write_text("mark")
    splits = {"toy": ("train", "test")}
    digests = {"toy": read_digest(str(data), "toy", splits["toy"])}
    return Requirements(str(data), str(tmp_path / "results"), splits, digests, version("procap-bench"), "mark")


def test_a_node_like_the_driver_has_no_problems_and_leaves_no_file(requirements):
    assert check_node(requirements) == []
    assert os.listdir(requirements.results) == ["mark"]


def test_another_version_is_named_with_its_folder(requirements):
    [reason] = check_node(replace(requirements, version="0.0"))
    here = f"procap-bench in {Path(__file__).parents[1]} is {requirements.version}"
    assert reason == f"{here}, on the driver 0.0: use `procap submit`"


def test_a_results_folder_that_is_not_shared_or_not_writable_is_named(requirements, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    [reason] = check_node(replace(requirements, results=str(tmp_path / "own")))
    assert "is not the storage that the driver writes to" in reason and os.listdir(tmp_path / "own") == []


def test_missing_altered_and_cut_data_are_named(requirements, data, tmp_path):
    [reason] = check_node(replace(requirements, data=str(tmp_path / "nowhere")))
    assert "no shards of 'toy'" in reason
    cut = replace(requirements, data=str(shutil.copytree(data, tmp_path / "cut")))
    file = tmp_path / "cut" / "toy" / "test" / "1.tar"
    file.write_bytes(file.read_bytes()[:-512])
    [reason] = check_node(cut)
    assert str(file) in reason
    assert check_node(replace(cut, datasets={"toy": TRAINING_SPLITS})) == [], "no test split is read"
    manifest = shutil.copytree(data, tmp_path / "other") / "toy" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("a photo of a {}", "a sketch of a {}"))
    [reason] = check_node(replace(requirements, data=str(tmp_path / "other")))
    assert reason.startswith("data set toy is ") and f"on the driver {requirements.digests['toy']}" in reason


def test_a_generated_data_set_may_be_missing(requirements, tmp_path):
    datasets, digests = {"digits": ["train"]}, {"digits": "f" * 16}
    assert check_node(replace(requirements, data=str(tmp_path / "new"), datasets=datasets, digests=digests)) == []


@pytest.fixture(scope="module")
def nodes(data, tmp_path_factory):
    """A head and another node, each with its own cache and both with the driver's data."""
    import ray

    folder = tmp_path_factory.mktemp("nodes")
    patched = pytest.MonkeyPatch.context()
    with object_server(folder) as s3, Nodes(folder, environment=s3.environment) as running, patched as patch:
        for name, value in {**s3.environment, "RAY_AUTH_MODE": "disabled", "PROCAP_HOME": str(folder / "home")}.items():
            patch.setenv(name, value)
        running.start_head(PROCAP_HOME=str(folder / "head"), PROCAP_DATA=str(data))
        running.add(PROCAP_HOME=str(folder / "node1"), PROCAP_DATA=str(data))
        ray.init(address=running.address, log_to_driver=False, logging_level=logging.ERROR)
        running.s3 = s3
        yield running
        ray.shutdown()


def check(data: str, results: str, **how: float) -> None:
    runtime = RuntimeConfig(data=Path(data), results=Path(results))
    # A busy machine takes its time to start the processes of several nodes.
    check_nodes(StoragePaths(data, results, runtime), {"toy": ("train", "test")}, **{"timeout": 600.0} | how)


@pytest.mark.slow
def test_results_and_data_behind_a_url_are_checked_on_every_real_node(nodes, data, tmp_path):
    from shards.remote import upload

    there = f"s3://{nodes.s3.bucket}/data"
    for file in (data / "toy").rglob("*"):
        if file.is_file():
            upload(file.read_bytes(), f"{there}/{file.relative_to(data).as_posix()}")
    check(str(data), str(tmp_path))
    assert os.listdir(tmp_path) == []
    check(there, f"s3://{nodes.s3.bucket}/results")
    with pytest.raises(UserError, match=r"s3://no-such-bucket.* is not there"):
        check(there, "s3://no-such-bucket/results")


@pytest.mark.slow
def test_a_node_without_the_data_is_named_before_anything_runs(nodes, data, tmp_path, monkeypatch):
    monkeypatch.setenv("PROCAP_DATA", str(data))
    node = nodes.add(PROCAP_DATA=str(tmp_path / "empty"))
    try:
        message = rf"1 of 3 nodes cannot be used: .*{node.name}\): UserError: no shards of 'toy'"
        with pytest.raises(UserError, match=message):
            check("", str(tmp_path / "results"))
    finally:
        node.kill()


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_named_and_a_dead_one_is_left_out(nodes, data, tmp_path):
    import ray

    node = nodes.add()
    for process in node.processes():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=rf"{node.name}\): no answer within 20 s") as error:
            # After about a minute Ray takes the node for dead, and it is left out.
            check(str(data), str(tmp_path), timeout=20.0)
        assert "\n" not in str(error.value)
    finally:
        node.kill()
    while sum(each["Alive"] for each in ray.nodes()) > 2:
        time.sleep(0.5)
    check(str(data), str(tmp_path))


def count_local_runs(device: str = "auto", **flags: float) -> int:
    return local_capacity(Launcher(**flags), device).max_concurrent  # type: ignore[arg-type]


def test_one_gpu_by_its_number_holds_what_one_gpu_holds(monkeypatch):
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: 4)
    monkeypatch.setattr("cluster.launcher.available_cores", lambda: 64)
    monkeypatch.setattr("cluster.launcher.available_memory", lambda: 64 * RUN_BYTES)
    assert [count_local_runs(device=device) for device in ("cuda", "cuda:1")] == [4, 1]
    assert count_local_runs(device="cuda:1", gpus=0.5) == 2
    with pytest.raises(UsageError, match="--gpus 2: on this machine there are 1 with --device cuda:1"):
        count_local_runs(device="cuda:1", gpus=2)


def test_a_run_gets_a_gpu_and_its_part_of_the_cpus():
    machines = [Node("a", "10.0.0.1", "1", 96, 8), Node("b", "10.0.0.2", "2", 32, 4)]
    assert default_resources(machines) == Resources(1, 8.0, 1.0)
    assert count_runs(machines, Resources(1, 8.0, 1.0)) == 12
    assert count_runs(machines, Resources(8, 8.0, 1.0)) == 1
    assert count_runs(machines, default_resources(machines, gpus=0.5)) == 24
    assert default_resources([Node("c", "10.0.0.3", "3", 16, 0)]) == Resources(1, 1.0, 0.0)


def test_parts_of_a_gpu_fit_as_often_as_ray_places_them_here_and_on_nodes(monkeypatch):
    """A fraction is always of one GPU."""
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: 2)
    monkeypatch.setattr("cluster.launcher.available_cores", lambda: 64)
    monkeypatch.setattr("cluster.launcher.available_memory", lambda: 64 * RUN_BYTES)
    for part, fit in ((0.1, 20), (0.2, 10), (0.3333, 6), (0.6, 2), (1, 2), (2, 1)):
        assert count_runs([Node("a", "a", "a", 64, 2)], Resources(1, 1.0, part)) == fit
        assert count_local_runs(gpus=part) == fit


@pytest.mark.parametrize(("available", "gpus", "device", "message"), [
    (0, 0.5, "auto", "--gpus 0.5: on this machine there are 0 with --device auto"),
    (1, 2, "cuda", "--gpus 2: on this machine there are 1 with --device cuda"),
    (4, 1, "cpu", "--gpus 1: on this machine there are 0 with --device cpu"),
])  # fmt: skip
def test_more_gpus_than_there_are_here_are_refused(available, gpus, device, message, monkeypatch):
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: available)
    with pytest.raises(UsageError, match=re.escape(message)):
        count_local_runs(gpus=gpus, device=device)
    assert local_capacity(Launcher(gpus=0), device).resources.gpus == 0


def test_runs_of_several_processes_need_several_cores():
    cores = len(os.sched_getaffinity(0))
    assert count_local_runs(device="cpu", processes=cores) == 1
    assert count_local_runs(max_concurrent=3, device="cpu", processes=cores) == 3
    assert count_local_runs(device="cpu", cpus=cores) == 1 == count_local_runs(device="cpu", cpus=4 * cores)
    with pytest.raises(UsageError, match="--cpus 0 without a GPU"):
        count_local_runs(device="cpu", cpus=0)


def test_the_address_of_a_cluster_that_died_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    with pytest.raises(UserError, match=f"no Ray cluster at {address} could be reached"), ray_connection("auto"):
        pass
