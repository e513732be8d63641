"""Check the cluster files with the programs that read them: Ray, EC2, Kubernetes, and our own command line."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import ValidationError
from jsonschema import validate as validate_by_schema

from benchmarks.cli.app import program
from procap import __version__

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
    assert pinned
    assert {cluster_of(read(path))["rayVersion"] for path in KUBERAY} == {pinned[1]}
    named = {
        path.name: set(re.findall(r"procap-bench[:-]([0-9][\w.]*?)(?=\.tar|[\s|;]|$)", path.read_text()))
        for path in FILES
    }
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
    looks_secret = re.compile(
        r"AKIA[0-9A-Z]{16}|-----BEGIN|(?i:password|secret_access_key|token)\s*[:=]\s*[\"']?[\w/+]{12,}"
    )
    for path in FILES:
        assert not looks_secret.search(path.read_text()), path.name
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
