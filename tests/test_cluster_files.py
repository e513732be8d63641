"""The files of a cluster, of its jobs and its image, run and checked by the programs that read them."""

import contextlib
import copy
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml
from jsonschema import ValidationError
from jsonschema import validate as validate_by_schema

from benchmarks.cli.app import program
from procap import __version__
from runner.environment import LIBRARY_DEFAULTS

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
AUTOSCALER = sorted((CLUSTER / "autoscaler").glob("*.yaml"))
KUBERAY = [CLUSTER / "kuberay" / "raycluster.yaml", CLUSTER / "kuberay" / "rayjob.yaml"]

FILES = [
    *AUTOSCALER,
    *sorted((CLUSTER / "kuberay").glob("*.yaml")),
    CLUSTER / "container" / "Dockerfile",
    *(CLUSTER / "slurm").glob("*.sbatch"),
]

Change = Callable[[Any], object]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def changed(document: Any, change: Change) -> Any:
    other = copy.deepcopy(document)
    change(other)
    return other


def by_name(path: Path) -> str:
    return path.name


def check_autoscaler(config: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


@pytest.mark.parametrize("path", AUTOSCALER, ids=by_name)
def test_ray_accepts_the_autoscaler_files_and_refuses_broken_ones(path):
    config = read(path)
    check_autoscaler(copy.deepcopy(config))
    breaks: list[Change] = [
        lambda it: it.update(max_worker=3),
        lambda it: it["docker"].update(images="x"),
        lambda it: it.update(head_start_ray_commands="ray start --head"),
        lambda it: it["provider"].update(type="nowhere"),
        lambda it: it.pop("provider"),
    ]
    for change in breaks:
        broken = changed(config, change)
        with pytest.raises((ValueError, ValidationError, NotImplementedError, KeyError)):
            check_autoscaler(broken)


def check_instances(config: dict[str, Any]) -> None:
    """Raise ValueError if EC2 would reject the parameters of a node."""
    loaders = pytest.importorskip("botocore.loaders")
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    model = ServiceModel(loaders.Loader().load_service_model("ec2", "service-2"), "ec2")
    shape = model.operation_model("RunInstances").input_shape
    for kind in config["available_node_types"].values():
        report = ParamValidator().validate({"MinCount": 1, "MaxCount": 1, **kind["node_config"]}, shape)
        if report.has_errors():
            raise ValueError(report.generate_report())


def test_ec2_understands_the_nodes_of_the_aws_file_and_refuses_a_wrong_one():
    config = read(CLUSTER / "autoscaler" / "aws.yaml")
    check_instances(config)
    breaks: list[Change] = [
        lambda node: node.update(InstanceTypes="g6e.2xlarge"),
        lambda node: node.update(IamInstanceProfile="procap"),
        lambda node: node.update(BlockDeviceMappings={}),
    ]
    for change in breaks:
        broken = copy.deepcopy(config)
        change(broken["available_node_types"]["worker"]["node_config"])
        with pytest.raises(ValueError):
            check_instances(broken)


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["rayClusterSpec"] if document["kind"] == "RayJob" else document["spec"]


def groups_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_of(document)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in groups_of(document):
        yield from group["template"]["spec"]["containers"]


def check_kubernetes(document: dict[str, Any]) -> None:
    """Raise where KubeRay's resource, or one of its pods by Kubernetes' own schema, is not as the API has it."""
    validate = pytest.importorskip("kubernetes_validate")
    if document["apiVersion"].startswith("ray.io"):
        validate_by_schema(document, json.loads((ROOT / "tests" / "schemas" / "kuberay.json").read_text()))
        for group in groups_of(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
            validate.validate(pod, "1.34", strict=True)
    else:
        validate.validate(document, "1.34", strict=True)


@pytest.mark.parametrize("path", KUBERAY, ids=by_name)
def test_kubernetes_accepts_ray_clusters_and_jobs_and_refuses_broken_ones(path):
    document = read(path)
    check_kubernetes(document)
    breaks: list[Change] = [
        lambda it: cluster_of(it).update(headGroupSpecs={}),
        lambda it: cluster_of(it).update(rayVersion=2.6),
        lambda it: cluster_of(it)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda it: cluster_of(it)["workerGroupSpecs"][0].update(replicas="2"),
        lambda it: cluster_of(it)["authOptions"].update(mode="none"),
        lambda it: it["spec"].update(entrypoints="procap"),
        lambda it: next(containers_of(it)).update(images="x"),
        lambda it: next(containers_of(it))["resources"]["limits"].update(cpu=["2"]),
        lambda it: groups_of(it)[1]["template"]["spec"]["tolerations"][0].update(effect=1),
        lambda it: groups_of(it)[1]["template"]["spec"]["volumes"][1]["emptyDir"].update(size="8Gi"),
    ]
    for change in breaks:
        broken = changed(document, change)
        with pytest.raises(ValidationError):
            check_kubernetes(broken)


def test_the_volume_that_pods_mount_is_the_one_that_its_file_claims():
    volume = read(CLUSTER / "kuberay" / "volume.yaml")
    check_kubernetes(volume)
    broken = changed(volume, lambda it: it["spec"].update(accessModes="ReadWriteMany"))
    with pytest.raises(ValidationError):
        check_kubernetes(broken)
    for path in KUBERAY:
        for group in groups_of(read(path)):
            spec = group["template"]["spec"]
            claims = {
                v["name"]: v["persistentVolumeClaim"]["claimName"]
                for v in spec["volumes"]
                if len(v) == 2 and "persistentVolumeClaim" in v
            }
            assert claims == {"shared": volume["metadata"]["name"]}
            for container in spec["containers"]:
                assert {"name": "shared", "mountPath": "/shared"} in container["volumeMounts"]


def test_the_cluster_of_a_job_is_the_standing_cluster():
    assert cluster_of(read(KUBERAY[0])) == cluster_of(read(KUBERAY[1]))


def test_versions_are_those_of_the_project():
    """One image of this version everywhere, and Ray as installed in it: KubeRay and nodes refuse or fail on another."""
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and {cluster_of(read(path))["rayVersion"] for path in KUBERAY} == {pinned[1]}
    tag = r"procap-bench[:-]([0-9][\w.]*?)(?=\.tar|[\s|;]|$)"
    named = {path.name: set(re.findall(tag, path.read_text())) for path in FILES}
    assert set().union(*named.values()) == {__version__}, named
    assert {c["image"] for path in KUBERAY for c in containers_of(read(path))} == {f"procap-bench:{__version__}"}
    assert {read(path)["docker"]["image"] for path in AUTOSCALER} == {f"procap-bench:{__version__}"}


def test_ports_beyond_loopback_have_a_comment_and_every_cluster_needs_a_token():
    for path in FILES:
        lines = path.read_text().splitlines()
        for above, line in itertools.pairwise(lines):
            if "0.0.0.0" in line:
                assert above.lstrip().startswith("#"), f"{path.name}: {line.strip()}"
    for path in AUTOSCALER:
        config = read(path)
        heads = [line for line in config["head_start_ray_commands"] if "--head" in line]
        assert heads and all("--dashboard-host=127.0.0.1" in line for line in heads)
        assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
        assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for path in KUBERAY:
        assert cluster_of(read(path))["authOptions"]["mode"] == "token"
    script = (CLUSTER / "slurm" / "ray.sbatch").read_text()
    assert "--dashboard-host 127.0.0.1" in script and "RAY_AUTH_MODE=token" in script


def test_no_file_holds_a_secret():
    """Keys come from Kubernetes' secrets, instance roles and files; pods name secrets and give no variable a value."""
    secret = r"AKIA[0-9A-Z]{16}|-----BEGIN|(?i:password|secret_access_key|token)\s*[:=]\s*[\"']?[\w/+]{12,}"
    for path in FILES:
        assert not re.search(secret, path.read_text()), path.name
    for path in KUBERAY:
        for container in containers_of(read(path)):
            assert "env" not in container and [next(iter(source)) for source in container["envFrom"]] == ["secretRef"]


def commands_in(path: Path) -> list[list[str]]:
    """The commands of procap that a file sends or tells people to send."""
    text = re.sub(r"\n# ", " ", path.read_text())
    found = re.findall(r"procap submit -- ([^;(\n]+?)(?: #|[;(\n])", text)
    found += re.findall(r"^ +entrypoint: procap (.+)$", text, re.MULTILINE)
    found += re.findall(r"ray\.sbatch (bench [^,]+),", text)
    return [shlex.split(line) for line in found]


def parse(words: list[str]) -> Any:
    """The parsed options of a command line of procap. Raises click's errors for what the program does not know."""
    command: Any = typer.main.get_command(program)
    while hasattr(command, "list_commands"):
        command, words = command.get_command(None, words[0]), words[1:]
    return command.make_context("procap", list(words)).params


def test_the_commands_in_the_files_are_those_of_the_program():
    with_commands = [path for path in FILES if path.name not in ("Dockerfile", "volume.yaml", "train.sbatch")]
    for path in with_commands:
        (words,) = commands_in(path)
        options = parse(words)
        assert words[0] == "bench" and options["launcher"] == "ray", path.name
        for place in ("data", "results"):
            assert str(options[place]).startswith(("/shared/", "s3://")), path.name
        assert parse(["submit", "--", *words])["words"] == words
        with pytest.raises(Exception, match=r"(?i)no such option"):
            parse([*words, "--resluts", "x"])


DOCKERFILE = ROOT / "cluster" / "container" / "Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if binary is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([binary, "--no-color", str(path)], capture_output=True, text=True, timeout=300)


def test_the_container_file_is_understood_and_a_broken_one_is_refused(tmp_path):
    ended = hadolint(DOCKERFILE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    broken = tmp_path / "Dockerfile"
    for old, new in (("\nRUN ", "\nRUNS "), (":3.11.14-slim-bookworm", ":latest"), ("WORKDIR /opt", "WORKDIR opt")):
        assert old in DOCKERFILE.read_text()
        broken.write_text(DOCKERFILE.read_text().replace(old, new, 1))
        assert hadolint(broken).returncode == 1, new


def copied() -> list[str]:
    lines = [line.split()[1:] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    return [source for *sources, _ in lines for source in sources]


def reaches_the_builder(name: str) -> bool:
    """Whether Dockerfile.dockerignore lets a path pass: the last pattern that matches it decides."""
    passes = True
    for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parts = [name, *(str(parent) for parent in Path(name).parents)]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(part, pattern) for part in parts):
            passes = line.startswith("!")
    return passes


def test_only_what_the_image_needs_reaches_its_builder():
    sources = copied()
    assert all((ROOT / source).exists() and reaches_the_builder(source) for source in sources)
    for private in ("results/x.json", ".venv/bin/python", ".git/config", ".ray-token-7", "demo/mlflow.db", "id_rsa"):
        assert not reaches_the_builder(private) and private.split("/")[0] not in sources


def test_what_the_image_copies_is_enough_to_build_the_package(tmp_path):
    for source in copied():
        here, there = ROOT / source, tmp_path / "context" / source
        if here.is_dir():
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            there.parent.mkdir(exist_ok=True)
            shutil.copy(here, there)
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    line += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "context")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    held = set(zipfile.ZipFile(tmp_path / f"procap_bench-{__version__}-py3-none-any.whl").namelist())
    sources = {
        str(file.relative_to(ROOT))
        for package in ("procap", "shards", "runner", "cluster", "benchmarks")
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".safetensors", ".csv", ".json", ".txt", ".html") and "studies" not in file.parts
    }
    assert sources <= held, sorted(sources - held)
    assert not any(name.startswith("benchmarks/studies/") for name in held)


def test_the_image_keeps_libraries_as_quiet_as_the_program_does():
    """Ray's own processes start before the program can say anything."""
    text = DOCKERFILE.read_text()
    for name in ("RAY_USAGE_STATS_ENABLED", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_OFFLINE"):
        assert f"{name}={LIBRARY_DEFAULTS[name]}" in text


SCRIPT = ROOT / "cluster" / "slurm" / "ray.sbatch"
STAND_INS = {name: (ROOT / "tests" / "slurm" / name).read_text() for name in ("scontrol", "srun", "scancel")}
RAY, PROCAP = ((ROOT / "tests" / "slurm" / name).read_text() for name in ("ray", "procap"))


# In the place of the look for nodes that have joined: the first one is there.
PYTHON = f"""#!/bin/sh
[ "$1" = - ] || exec {sys.executable} "$@"
until [ -s nodes.lines ]; do sleep 0.1; done
"""

FOR_EVER = 99

NODES = """
import os, ray
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print([(resources["CPU"], resources["object_store_memory"]) for resources in there])
print(ray.get(ray.remote(lambda: "answered").remote()))
"""


def free_job() -> int:
    """A job's number whose three ports are free here."""
    for number in ((os.getpid() + offset) % 4000 for offset in range(4000)):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(20000 + number * 3, 20003 + number * 3):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return number
    raise AssertionError("no three free ports")


@pytest.fixture
def submit(tmp_path):
    """Begin the script as Slurm would on the first node of several, with stand-ins in front of PATH."""

    def begin(*words: object, nodes: int, **stand_ins: str) -> subprocess.Popen[str]:
        bin = tmp_path / "bin"
        bin.mkdir()
        for name, text in {**STAND_INS, **stand_ins}.items():
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)
        # Slurm runs a copy that lies elsewhere.
        copy = Path(shutil.copy(SCRIPT, tmp_path / "slurm_script"))
        slurm = {
            "SLURM_JOB_ID": str(free_job()),
            "SLURM_JOB_NODELIST": ",".join(["localhost", *(f"node{n}" for n in range(1, nodes))]),
            "SLURM_NNODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_GPUS_ON_NODE": "2",
            "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        line = ["bash", str(copy), *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            line, cwd=tmp_path, env={**os.environ, **slurm}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    return begin


def ended(job: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a job, of which nothing may be left."""
    try:
        out, err = job.communicate(timeout=seconds)
        patience = time.monotonic() + 60
        while left := members(job.pid):
            assert time.monotonic() < patience, left
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, out, err


def members(group: int) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
    return found


def test_ray_starts_on_all_nodes_and_ends_with_the_command(submit, tmp_path):
    """The second node's Ray does not come up at first. The command's exit code is the job's."""
    (tmp_path / "broken").touch()
    job = submit(5, 4, "--methods", "maple,procap", nodes=3, ray=RAY, python=PYTHON, procap=PROCAP)
    code, out, err = ended(job)
    assert code == 5, err
    address, *words = out.split()
    assert address.startswith(("localhost:2", "localhost:3")) and words == ["5", "4", "--methods", "maple,procap"]
    port = int(address.partition(":")[2])
    assert (tmp_path / "srun.line").read_text().startswith("--ntasks 3 --ntasks-per-node 1 --kill-on-bad-exit=0 ")
    lines = (tmp_path / "nodes.lines").read_text().splitlines()
    started = [line for line in lines if line.endswith("--block")]
    sizes = "--num-cpus 1 --num-gpus 2 --object-store-memory 1000000000 --block"
    assert started[0] == (
        f"token 600:64 start --head --port {port} --ray-client-server-port {port + 2} "
        f"--dashboard-host 127.0.0.1 --dashboard-port {port + 1} {sizes}"
    )
    assert started[1:] == [f"token 600:64 start --address {address} {sizes}"] * 3
    assert sorted(line for line in lines if line.endswith("ended")) == ["0 ended", "1 ended", "2 ended"]
    assert not list(tmp_path.glob(".ray-token*"))


def test_the_warning_before_the_end_reaches_the_command_alone(submit, tmp_path):
    """As `--signal B:TERM@120` sends it; Ray goes on until the command has saved."""
    job = submit(0, FOR_EVER, nodes=1, ray=RAY, python=PYTHON, procap=PROCAP)
    assert job.stdout.readline().startswith("localhost:")
    before = (tmp_path / "nodes.lines").read_text()
    os.kill(job.pid, signal.SIGTERM)
    assert job.stdout.readline() == "saved\n" and "ended" not in before and ended(job)[0] == 143
    assert (tmp_path / "nodes.lines").read_text().endswith("0 ended\n")


def test_a_job_whose_ray_is_gone_does_not_wait_for_ever(submit, tmp_path):
    until_then = "until [[ -e at-work ]]; do sleep 0.1; done &"
    job = submit(0, FOR_EVER, nodes=1, ray=RAY.replace("sleep 600 &", until_then), python=PYTHON, procap=PROCAP)
    code, out, _ = ended(job)
    assert code == 143 and out.endswith("saved\n")


@pytest.mark.parametrize("name", ["ray.sbatch", "train.sbatch"])
def test_the_files_are_bash_and_say_how_to_use_them(name):
    path = SCRIPT.with_name(name)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""
    said = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert said.returncode == 2 and f"cluster/slurm/{name}" in said.stderr and said.stderr.count("\n") == 3
    options = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+( \S+)?", line) for line in options) and "#SBATCH --requeue" in options


@pytest.mark.slow
def test_two_real_nodes_of_ray_answer_to_the_command_and_leave_nothing(submit, tmp_path):
    """Real Ray, with a token; the nodes share this machine."""
    (tmp_path / "nodes.py").write_text(NODES)
    job = submit("bench", nodes=2, procap=f"#!/bin/sh\nexec python {tmp_path / 'nodes.py'}\n")
    code, out, err = ended(job)
    assert code == 0, err
    assert out.splitlines() == ["[(1.0, 1000000000.0), (1.0, 1000000000.0)]", "answered"]
    assert not list(tmp_path.glob(".ray-token*"))
