"""Resources of a run on a cluster or this machine, and how many runs fit at once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.address import LOCAL
from cluster.launcher import RUN_BYTES, Launcher, local_capacity, visible_gpu
from cluster.ray_cluster import Node, Resources, connected, count_runs, default_resources
from procap.errors import UsageError


def count_local_runs(device: str = "auto", **flags: float) -> int:
    return local_capacity(Launcher(**flags), device).max_concurrent  # type: ignore[arg-type]


def test_one_gpu_by_its_number_holds_what_one_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: 4)
    monkeypatch.setattr("cluster.launcher.available_cores", lambda: 64)
    monkeypatch.setattr("cluster.launcher.available_memory", lambda: 64 * RUN_BYTES)
    assert [count_local_runs(device=device) for device in ("cuda", "cuda:1")] == [4, 1]
    assert count_local_runs(device="cuda:1", gpus=0.5) == 2
    with pytest.raises(UsageError, match="--gpus 2: on this machine there are 1 with --device cuda:1"):
        count_local_runs(device="cuda:1", gpus=2)


def test_a_run_gets_a_gpu_and_its_part_of_the_cpus() -> None:
    machines = [Node("a", "10.0.0.1", "1", 96, 8, "H200"), Node("b", "10.0.0.2", "2", 32, 4, "H200")]
    assert default_resources(machines) == Resources(1, 8.0, 1.0)
    assert count_runs(machines, Resources(1, 8.0, 1.0)) == 12
    assert count_runs(machines, Resources(8, 8.0, 1.0)) == 1
    assert count_runs(machines, default_resources(machines, gpus=0.5)) == 24
    assert default_resources([Node("c", "10.0.0.3", "3", 16, 0)]) == Resources(1, 1.0, 0.0)


def test_parts_of_a_processor_fit_as_often_as_ray_places_them() -> None:
    machines = [Node(name, name, name, 1, 0) for name in ("a", "b")]
    assert [count_runs(machines, Resources(1, part)) for part in (0.1, 0.2, 0.3, 0.6, 1)] == [20, 10, 6, 2, 2]
    assert count_runs(machines, Resources(20, 0.1)) == 1
    assert count_runs([Node("c", "c", "c", 2, 0)], Resources(1, 0.6)) == 3


def test_parts_of_a_gpu_fit_as_often_as_ray_places_them_here_and_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fraction is always of one GPU."""
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: 2)
    monkeypatch.setattr("cluster.launcher.available_cores", lambda: 64)
    monkeypatch.setattr("cluster.launcher.available_memory", lambda: 64 * RUN_BYTES)
    for part, fit in ((0.1, 20), (0.2, 10), (0.3333, 6), (0.6, 2), (1, 2), (2, 1)):
        assert count_runs([Node("a", "a", "a", 64, 2)], Resources(1, 1.0, part)) == fit
        assert count_local_runs(gpus=part) == fit


@pytest.mark.parametrize(
    ("available", "gpus", "device", "message"),
    [
        (0, 0.5, "auto", "--gpus 0.5: on this machine there are 0 with --device auto"),
        (1, 2, "cuda", "--gpus 2: on this machine there are 1 with --device cuda"),
        (4, 1, "cpu", "--gpus 1: on this machine there are 0 with --device cpu"),
    ],
)
def test_more_gpus_than_there_are_here_are_refused(
    available: int, gpus: float, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: available)
    with pytest.raises(UsageError, match=re.escape(message)):
        count_local_runs(gpus=gpus, device=device)
    assert local_capacity(Launcher(gpus=0), device).resources.gpus == 0


def test_runs_of_several_processes_need_several_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert count_local_runs(device="cpu", processes=cores) == 1
    assert count_local_runs(max_concurrent=3, device="cpu", processes=cores) == 3


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/memory.max"),
        ("9:cpu,memory:/docker/1f\n0::/\n", "memory/memory.limit_in_bytes"),
    ],
)
def test_concurrent_runs_fit_in_the_memory_limit(
    cgroup: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cgroup version 2 of a job step, and version 1 inside a container."""
    monkeypatch.setattr("runner.environment.CGROUPS", tmp_path)
    monkeypatch.setattr("runner.environment.OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5 * RUN_BYTES))
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "memory.max").write_text("max\n")
    assert count_local_runs(device="cpu") == 5
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{2 * RUN_BYTES}\n")
    assert count_local_runs(device="cpu") == 2
    monkeypatch.setattr("cluster.launcher.count_gpus", lambda: 8)
    assert count_local_runs() == 2 and count_local_runs(gpus=0.5) == 2


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/cpu.max": "350000 100000\n", "slurm/cpu.max": "max 100000\n"}),
        ("9:cpu,cpuacct:/docker/1f\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_concurrent_runs_fit_in_the_cpu_quota_of_a_container(
    cgroup: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.5 processors in cgroup version 2, 3 in version 1; -1 is no limit."""
    monkeypatch.setattr("runner.environment.CGROUPS", tmp_path)
    monkeypatch.setattr("runner.environment.OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr("cluster.launcher.available_memory", lambda: 64 * RUN_BYTES)
    (tmp_path / "cgroup").write_text(cgroup)
    assert count_local_runs(device="cpu") == 64
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert count_local_runs(device="cpu") == 3
    for file in files:
        (tmp_path / file).write_text("-1\n")
    assert count_local_runs(device="cpu") == 64


@pytest.mark.slow
def test_a_local_ray_sees_only_the_gpu_of_the_device_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpu("cuda:1") == "6" and visible_gpu("cuda") is None
    with connected(LOCAL, cpus=1, gpu=visible_gpu("cuda:1")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
        seen = ray.remote(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        assert ray.get(seen.remote()) == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpu("cuda:1") == "1"
