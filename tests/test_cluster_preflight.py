"""Resources of a run, and the checks of every node before the first run."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from plug_ins import METHOD, install
from toy_shards import toy_source

from benchmarks.studies.chaos.nodes import Nodes
from benchmarks.studies.chaos.object_server import object_server
from cluster import node_probe
from cluster.launcher import RUN_BYTES, Launcher, local_capacity
from cluster.node_probe import ProbeRequest, probe_node
from cluster.preflight import TRAINING_SPLITS, check_nodes, find_problems, make_probe_request
from cluster.ray_cluster import Node, Resources, count_runs, default_resources
from cluster.run import StoragePaths
from procap.errors import UsageError, UserError
from runner.config import RuntimeConfig
from shards.pack import pack_source


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    pack_source(toy_source(), root, per_shard=5)
    return root


@dataclass(frozen=True)
class Requirements:
    """The arguments of `check_nodes`."""

    data: str
    results: str
    datasets: Mapping[str, Collection[str]]
    backbones: Sequence[tuple[str, str | None]] = ()
    methods: Sequence[str] = ()

    @property
    def paths(self) -> StoragePaths:
        return StoragePaths(self.data, self.results, RuntimeConfig(data=Path(self.data), results=Path(self.results)))

    def check(self, **how):
        check_nodes(self.paths, self.datasets, self.backbones, **how, methods=self.methods)

    def to_request(self) -> ProbeRequest:
        return make_probe_request(self.paths, self.datasets, self.backbones, self.methods)


@pytest.fixture
def wants(data, tmp_path) -> Requirements:
    return Requirements(str(data), str(tmp_path / "results"), {"toy": ("train", "test")})


class Pair:
    """The driver and one node, both in this process."""

    def __init__(self, wants: Requirements) -> None:
        self.request = wants.to_request()
        self.here, problems = probe_node(self.request)
        assert not problems

    def reasons(self, facts=(), **request):
        """The problems of the node if parts of the request or of its facts were others."""
        found, problems = probe_node(replace(self.request, node="0123", **request))
        return find_problems(found | dict(facts), problems, self.here)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(node_probe, "VISIBLE_SECONDS", 0.0)


def test_a_node_like_the_driver_has_no_problems(wants):
    assert Pair(wants).reasons() == []


def test_other_versions_and_other_code_are_named(wants):
    pair = Pair(wants)
    assert pair.reasons({"torch": "1.0"}) == [f"torch 1.0, here {pair.here['torch']}"]
    assert pair.reasons({"program": "f" * 16})[0].startswith("program: other content than here; install")


def test_a_node_needs_the_plug_ins_of_the_runs_with_the_same_code(wants, tmp_path, monkeypatch):
    wants = replace(wants, methods=("coop", "theirs"))
    problem = "method theirs: its package is not installed there; install it, or use `procap submit`, which sends it"
    assert problem in probe_node(wants.to_request())[1]
    install(tmp_path / "lib", {"probed": METHOD}, {"theirs": "probed:Theirs"})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    pair = Pair(wants)
    assert pair.reasons() == []
    assert pair.reasons({"method theirs": "f" * 16})[0].startswith("method theirs: other content than here; install")


def test_a_results_folder_that_is_not_shared_is_named(wants, tmp_path):
    pair = Pair(wants)
    (tmp_path / "own").mkdir()
    reasons = pair.reasons(results=str(tmp_path / "own"))
    assert len(reasons) == 1 and "is not the same storage as here" in reasons[0]
    assert os.listdir(tmp_path / "own") == [], "nothing is left in a folder of another user"


def test_a_results_folder_that_a_node_cannot_write_to_is_named(wants):
    pair = Pair(wants)
    file = Path(wants.results) / f".preflight-{pair.request.nonce}-0123"
    file.mkdir()
    (file / "x").touch()
    [reason] = pair.reasons()
    assert reason.startswith("results: ") and str(file) in reason


def test_missing_altered_and_cut_data_are_named(wants, data, tmp_path):
    pair = Pair(wants)
    assert "no shards of 'toy'" in pair.reasons(data=str(tmp_path / "nowhere"))[0]
    cut = shutil.copytree(data, tmp_path / "cut")
    file = cut / "toy" / "test" / "1.tar"
    file.write_bytes(file.read_bytes()[:-512])
    assert pair.reasons(data=str(cut)) == [f"data toy: {file} is missing, cut short or not readable"]
    trained_on = Pair(replace(wants, datasets={"toy": TRAINING_SPLITS}))
    assert trained_on.reasons(data=str(cut)) == [], "a test split that nothing is evaluated on may be absent"
    other = shutil.copytree(data, tmp_path / "other")
    manifest = other / "toy" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"template": "a sketch of a {}."}))
    assert pair.reasons(data=str(other)) == ["data toy: other content than here"]


def test_a_built_in_data_set_may_be_missing_where_it_can_be_packed(wants, tmp_path):
    pair = Pair(wants)
    new = {"data": str(tmp_path / "new")}
    assert pair.reasons(datasets={"digits": ["train"]}, **new) == []
    assert "no shards of 'dtd'" in pair.reasons(datasets={"dtd": ["train"]}, **new)[0]


def test_weights_in_a_file_are_the_same_bytes(wants, tmp_path):
    file = tmp_path / "clip.pt"
    file.write_bytes(os.urandom(3_000_000))
    pair = Pair(replace(wants, backbones=(("ViT-B-16", str(file)), ("mini", None))))
    assert pair.request.files == [str(file)] and pair.reasons() == []
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    assert pair.reasons() == [f"weights {file}: other content than here"]
    file.unlink()
    [reason] = pair.reasons()
    assert reason.startswith(f"weights {file}: ") and "No such file or directory" in reason


def test_a_node_without_this_program_can_be_probed(wants):
    """With the standard library alone."""
    pair = Pair(wants)
    request = replace(pair.request, node="bare", files=["/nowhere/clip.pt"])
    code = f"exec(open({node_probe.__file__!r}).read()); import json; print(json.dumps(probe_node({request!r})))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    reasons = find_problems(*json.loads(done.stdout), pair.here)
    assert any("torch is not installed" in reason for reason in reasons)
    assert any("the package procap of this program is not installed" in reason for reason in reasons)
    assert any("weights /nowhere/clip.pt: " in reason and "No such file or directory" in reason for reason in reasons)


def test_weights_with_a_tag_are_checked_on_the_nodes_only(wants, tmp_path, monkeypatch):
    """A driver on a head without GPUs computes nothing; mini, random weights and files need no tag."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    named = replace(wants, backbones=(("ViT-B-16", None), ("mini", None), ("ViT-B-32", "random")))
    assert named.to_request().backbones == [("ViT-B-16", None)]
    [reason] = Pair(named).reasons()
    assert reason.startswith("weights: weights 'openai' of ViT-B-16 are not on this machine")
    (tmp_path / "home/weights").mkdir(parents=True)
    (tmp_path / "home/weights/ViT-B-16-openai.safetensors").write_bytes(b"weights")
    assert Pair(named).reasons() == []


@pytest.fixture(scope="module")
def nodes(data, tmp_path_factory) -> Iterator[Nodes]:
    """A head and another node, each with a cache of its own and both with the driver's data."""
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


@pytest.mark.slow
def test_every_real_node_is_probed_and_no_file_is_left(nodes, wants):
    wants.check()
    assert os.listdir(wants.results) == []


@pytest.mark.slow
def test_results_and_data_behind_a_url_are_checked_on_every_real_node(nodes, wants, data):
    from shards.remote import RemoteFolder

    there = RemoteFolder(f"s3://{nodes.s3.bucket}/data")
    for file in (data / "toy").rglob("*"):
        if file.is_file():
            there.write(file.relative_to(data).as_posix(), file.read_bytes())
    replace(wants, data=there.url, results=f"s3://{nodes.s3.bucket}/results").check()
    assert RemoteFolder(f"s3://{nodes.s3.bucket}/results").list() == {}
    with pytest.raises(UserError, match=r"s3://no-such-bucket.* is not there"):
        replace(wants, results="s3://no-such-bucket/results").check()


@pytest.mark.slow
def test_a_suite_with_data_and_results_behind_urls_gives_the_local_table(nodes, few_digits, tmp_path):
    from shards.remote import RemoteFolder

    there = RemoteFolder(f"s3://{nodes.s3.bucket}/digits")
    for file in (few_digits / "digits").rglob("*"):
        if file.is_file():
            there.write(file.relative_to(few_digits).as_posix(), file.read_bytes())
    words = ["bench", "base-to-novel", "--profile", "mini", "--quick", "--datasets", "digits", "--seeds", "1"]
    words += ["--methods", "zeroshot,coop", "--epochs", "1", "--device", "cpu", "--tracking", "off", "--json"]

    def counts(*more: str) -> list[list[object]]:
        code = "from benchmarks.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
        environment = {**os.environ, "PROCAP_HOME": str(tmp_path / "driver"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *words, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        accuracies, *_ = json.loads(done.stdout.splitlines()[-1])["tables"]
        return [[line["labels"], line["cells"]] for line in accuracies["rows"]]

    results = f"s3://{nodes.s3.bucket}/{tmp_path.name}"
    spread = counts("--launcher", "ray", "--address", nodes.address, "--data", there.url, "--results", results)
    assert spread == counts("--data", str(few_digits), "--results", str(tmp_path / "local"))
    assert sum(name.endswith("/train.json") for name in RemoteFolder(results).list()) == 2


@pytest.mark.slow
def test_a_node_without_the_data_is_named_before_anything_runs(nodes, wants, tmp_path, monkeypatch):
    monkeypatch.setenv("PROCAP_DATA", wants.data)
    node = nodes.add(PROCAP_DATA=str(tmp_path / "empty"))
    try:
        message = rf"1 of 3 nodes cannot be used: .*{node.name}\): data toy: no shards of 'toy'"
        with pytest.raises(UserError, match=message):
            replace(wants, data="").check()
    finally:
        node.kill()


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_named_and_a_dead_one_is_left_out(nodes, wants):
    node = nodes.add()
    for process in node.processes():
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=rf"{node.name}\): no answer within 3 s") as error:
            wants.check(timeout=3.0)
        assert "\n" not in str(error.value)
    finally:
        node.kill()
    import ray

    deadline = time.monotonic() + 120
    while sum(each["Alive"] for each in ray.nodes()) > 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    wants.check()


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
    machines = [Node("a", "10.0.0.1", "1", 96, 8, "H200"), Node("b", "10.0.0.2", "2", 32, 4, "H200")]
    assert default_resources(machines) == Resources(1, 8.0, 1.0)
    assert count_runs(machines, Resources(1, 8.0, 1.0)) == 12
    assert count_runs(machines, Resources(8, 8.0, 1.0)) == 1
    assert count_runs(machines, default_resources(machines, gpus=0.5)) == 24
    assert default_resources([Node("c", "10.0.0.3", "3", 16, 0)]) == Resources(1, 1.0, 0.0)


def test_parts_of_a_processor_fit_as_often_as_ray_places_them():
    machines = [Node(name, name, name, 1, 0) for name in ("a", "b")]
    assert [count_runs(machines, Resources(1, part)) for part in (0.1, 0.2, 0.3, 0.6, 1)] == [20, 10, 6, 2, 2]
    assert count_runs(machines, Resources(20, 0.1)) == 1
    assert count_runs([Node("c", "c", "c", 2, 0)], Resources(1, 0.6)) == 3


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


@pytest.mark.parametrize(("cgroup", "file"), [
    ("0::/slurm/job_7/step_0\n", "slurm/job_7/memory.max"),
    ("9:cpu,memory:/docker/1f\n0::/\n", "memory/memory.limit_in_bytes"),
])  # fmt: skip
def test_concurrent_runs_fit_in_the_memory_limit(cgroup, file, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("cgroup", "files"), [
    ("0::/slurm/job_7/step_0\n", {"slurm/job_7/cpu.max": "350000 100000\n", "slurm/cpu.max": "max 100000\n"}),
    ("9:cpu,cpuacct:/docker/1f\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}),
])  # fmt: skip
def test_concurrent_runs_fit_in_the_cpu_quota_of_a_container(cgroup, files, tmp_path, monkeypatch):
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
